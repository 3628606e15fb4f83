"""Qwen3.5, Qwen3-Next and the mixture against transformers, document by document: loss and all gradients, for every way of
training.

Stock transformers lets the states of a pack go from document to document, so each document is its own batch there."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decoder_layer import whole_float64
from test_short_conv_mixer import assert_float32_is_as_exact, assert_same, engine, fast, own
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.errors import ModelError
from pronghorn.kernels.delta.delta_chunks import chunk_table
from pronghorn.model.causal_lm import install
from pronghorn.model.config import empty_model, read_config
from pronghorn.model.families import why_not_fast
from pronghorn.model.formats.store import dequantize_, store_experts_, store_linears_, stored_modules
from pronghorn.model.formats.table import FORMATS, GATES
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.layers.mixers import gated_delta
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.verify import verify
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora
from samples import small
from tables import first_of

LENGTHS = (1, 63, 64, 65, 150, 5)
TOLERANCE = 1e-4  # of gradients in float32: transformers' own and ours are up to 5e-5 away from float64
SIZES = small(num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"], head_dim=16)
SIZES |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
SIZES |= {"initializer_range": 0.08}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
CONFIGS = {
    "qwen3_5_text": AutoConfig.for_model("qwen3_5_text", **SIZES),
    "qwen3_5_moe_text": AutoConfig.for_model("qwen3_5_moe_text", **SIZES, **MOE),
    "qwen3_next": AutoConfig.for_model(
        "qwen3_next", **(SIZES | MOE | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]})
    ),
}


def model_of(kind: str, method: str) -> Any:
    """Norms are drawn: at their initial values mistakes in them would not show."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.set_experts_implementation("eager")
    for name, tensor in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(tensor, mean=float("linear_attn" in name), std=0.2)
        if name.endswith("A_log"):  # as initialized, a state is gone after a token, and a leak would not show
            tensor.data = torch.tensor([0.02, 0.1, 0.5, 4.0]).log()
    if method == "full":
        return model.train()
    if method == "nf4":
        store_linears_(model, FORMATS[method])
        store_experts_(model, FORMATS[method])
    model.requires_grad_(False)
    model = add_adapter(model, Lora(r=4, dora=method == "dora"), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


WAYS = [("qwen3_5_text", "lora"), ("qwen3_5_text", "full"), ("qwen3_5_moe_text", "lora"), ("qwen3_next", "full")]
LATER = [("qwen3_5_text", "dora"), ("qwen3_next", "lora"), ("qwen3_5_moe_text", "full")]


@pytest.mark.parametrize(("kind", "method"), first_of([*WAYS, *LATER], 5))
def test_all_gradients_are_those_of_transformers(kind: str, method: str) -> None:
    """In float64, where nothing but a mistake makes a difference."""
    model, packs = model_of(kind, method).double(), (LENGTHS, (5,), (150,))
    with whole_float64(model):
        truths = [own(model, lengths) for lengths in packs]
    assert install(model) == ""
    for lengths, truth in zip(packs, truths, strict=True):
        assert_same(fast(model, lengths), truth, 1e-10)
    assert all(layer.fused == (method != "dora") for layer in engine(model).layers)
    if method == "full":
        names = ("conv1d.weight", "A_log", "dt_bias", "norm.weight", "in_proj")
        assert all(any(f"layers.0.linear_attn.{name}" in trained for trained in truths[0][1]) for name in names)


@pytest.mark.parametrize(("kind", "method"), [*((kind, "lora") for kind in CONFIGS), ("qwen3_5_text", "full")])
def test_float32_is_as_exact_as_transformers(kind: str, method: str) -> None:
    model = model_of(kind, method)
    assert_float32_is_as_exact(model, (LENGTHS, (2048,)) if (kind, method) == ("qwen3_5_text", "lora") else (LENGTHS,))
    assert min(gradient.cosine for gradient in verify(model).gradients) > 0.99999


def test_a_long_document() -> None:
    """Of 2,048 tokens, in which the slowest heads forget little."""
    model = model_of("qwen3_5_text", "full").double()
    with whole_float64(model):
        expected = own(model, (2048,))
    assert install(model) == ""
    assert_same(fast(model, (2048,)), expected, 1e-10)


@pytest.mark.parametrize("kind", first_of(["qwen3_5_moe_text", "qwen3_next", "qwen3_5_text"], 2))
def test_frozen_weights_in_few_bits(kind: str) -> None:
    """With NF4 the numbers of the dequantized model. What decays and steps are made of stays as it is."""
    model, twin = model_of(kind, "nf4"), model_of(kind, "nf4")
    stored = {name.removesuffix(".base_layer").rpartition(".")[2] for name, _ in stored_modules(model)}
    assert not stored & set(GATES)
    assert stored & {"in_proj_qkv", "in_proj_qkvz"}
    dequantize_(twin, torch.float32)
    assert install(model) == ""
    assert_same(fast(model, LENGTHS), own(twin, LENGTHS), TOLERANCE)
    assert all(layer.fused for layer in engine(model).layers)


@pytest.mark.parametrize("kind", CONFIGS)
def test_documents_do_not_see_each_other(kind: str) -> None:
    """Of 70 and 90 tokens: to the bit, and gradients are exactly 0."""
    model = model_of(kind, "lora")
    assert install(model) == ""
    require_isolated_documents(model, torch.device("cpu"), 259)
    found, ids = engine(model), torch.randint(0, 259, (2, 160))
    ids[1, 70:] = ids[0, 70:]
    pack = PackedDocuments(
        positions_T=torch.cat([torch.arange(70), torch.arange(90)]),
        cu_seqlens=torch.tensor([0, 70, 160], dtype=torch.int32),
        longest=90,
    )
    embedded = [found.embed(row).detach().requires_grad_() for row in ids]
    one, other = (found.hidden(h, Documents.of(pack, found.positions))[70:] for h in embedded)
    if kind == "qwen3_5_text":  # experts multiply the tokens of all documents together
        assert torch.equal(one, other)
    torch.testing.assert_close(one, other)
    (gradient,) = torch.autograd.grad(one.sum(), embedded[:1])
    assert not gradient[:70].any()
    assert gradient[70:].abs().sum(1).all()


def test_verify_sees_a_state_that_is_lost_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3_5_text", "lora")
    assert install(model) == ""
    real = gated_delta.delta_rule_forward

    def broken(*given: Any, **options: Any) -> Any:
        """Each chunk is a document."""
        bounds, tokens = given[-1].tolist(), len(given[0])
        cut = torch.tensor([*(row for one in pairwise(bounds) for row in range(*one, 64)), tokens], dtype=torch.int32)
        return real(*given[:5], chunk_table(cut, tokens), cut, **options)

    verify(model)
    monkeypatch.setattr(gated_delta, "delta_rule_forward", broken)
    with pytest.raises(ModelError, match="differ"):
        verify(model)


def test_what_is_refused_says_so() -> None:
    other = AutoConfig.for_model("qwen3", **small(), layer_types=["linear_attention"] * 2)
    assert "linear_attention" in why_not_fast(other)


def test_the_config_of_a_multimodal_model_is_that_of_what_transformers_loads(tmp_path: Path) -> None:
    config = AutoConfig.for_model("qwen3_5", text_config=SIZES, architectures=["Qwen3_5ForConditionalGeneration"])
    config.save_pretrained(tmp_path / "images")
    found = read_config(str(tmp_path / "images"))
    assert (found.model_type, found.hidden_size) == ("qwen3_5_text", 32)
    assert why_not_fast(found) == ""
    assert type(AutoModelForCausalLM.from_config(config)) is type(empty_model("a", found))
    gemma = AutoConfig.for_model("gemma3")
    gemma.save_pretrained(tmp_path / "gemma")
    assert read_config(str(tmp_path / "gemma")).model_type == "gemma3"
