"""Nemotron-H, Granite 4 and Falcon-H1 against transformers, document by document: loss and all gradients, for every way of
training.

Stock transformers lets the states of a pack go from document to document, so each document is its own batch there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from test_decoder_layer import whole_float64
from test_short_conv_mixer import assert_float32_is_as_exact, assert_same, engine, fast, own
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.errors import ModelError, RecipeError
from pronghorn.kernels.delta.delta_chunks import chunk_table
from pronghorn.kernels.runtime import dispatch
from pronghorn.model.causal_lm import install
from pronghorn.model.families import why_not_fast
from pronghorn.model.formats.store import dequantize_, store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.layers.mixers import mamba
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.verify import verify
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora
from samples import small
from tables import first_of

LENGTHS = (1, 63, 64, 65, 150, 5)
SMALL = small(initializer_range=0.08)
SIZES = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.6,
    "shared_intermediate_size": 48,
}
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "head_dim": 16,
    "time_step_min": 0.05,
}
EXPERTS = {  # two groups of them, of which a token chooses from one
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
    "routed_scaling_factor": 2.5,
    "n_group": 2,
    "topk_group": 1,
}
# transformers has those of `ssm_multipliers` in float32.
FALCON = {
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.75,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.875, 1.125, 0.75, 1.25, 0.625],
    "mlp_multipliers": [1.4, 0.7],
    "mamba_d_ssm": 64,
}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
CONFIGS = {
    "nemotron_h": AutoConfig.for_model(
        "nemotron_h",
        **(SMALL | NEMOTRON | {"num_hidden_layers": 6}),
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
    ),
    "nemotron_h, experts": AutoConfig.for_model(
        "nemotron_h",
        **(SMALL | NEMOTRON | EXPERTS | {"num_hidden_layers": 5}),
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
    ),
    "granitemoehybrid": AutoConfig.for_model(
        "granitemoehybrid", **SMALL | SIZES | MULTIPLIERS | {"num_hidden_layers": 3}, layer_types=KINDS, num_local_experts=0
    ),
    "granitemoehybrid, experts": AutoConfig.for_model(
        "granitemoehybrid",
        **SMALL | SIZES | MULTIPLIERS | {"num_hidden_layers": 3, "intermediate_size": 16},
        layer_types=KINDS,
        num_local_experts=4,
        position_embedding_type="rope",
        mamba_conv_bias=False,
        mamba_proj_bias=True,
    ),
    "falcon_h1": AutoConfig.for_model("falcon_h1", **SMALL | SIZES | FALCON),
    "falcon_h1, a norm": AutoConfig.for_model(
        "falcon_h1",
        **SMALL | SIZES | FALCON,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        mamba_conv_bias=False,
        projectors_bias=True,
    ),
}


def model_of(kind: str, method: str) -> Any:
    """Norms, biases and D are drawn: at their initial values mistakes in them would not show."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.set_experts_implementation("eager")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or name.endswith((".D", "dt_bias", "bias")):
            torch.nn.init.normal_(tensor, mean=float(not name.endswith("bias")), std=0.2)
        if name.endswith("A_log"):  # as initialized, a state is gone after a token, and a leak would not show
            tensor.data = torch.tensor([0.02, 0.1, 0.5, 4.0]).log()
    if method == "full":
        return model.train()
    if method == "nf4":
        store_linears_(model, FORMATS[method])
        store_experts_(model, FORMATS[method])
    model.requires_grad_(False)
    targets = ("all-linear", "experts") if method == "lora on experts" else "all-linear"
    model = add_adapter(model, Lora(r=4, targets=targets, dora=method == "dora"), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


WAYS = [
    *((kind, method) for kind in CONFIGS for method in ("lora", "full")),
    *((kind, "lora on experts") for kind in CONFIGS if "experts" in kind),
    ("nemotron_h", "dora"),
    ("nemotron_h, experts", "dora"),
    ("granitemoehybrid, experts", "dora"),
    ("falcon_h1", "dora"),
]


@pytest.mark.parametrize(("kind", "method"), first_of(WAYS, 14))
def test_all_gradients_are_those_of_transformers(kind: str, method: str) -> None:
    """In float64, where nothing but a mistake makes a difference."""
    model, packs = model_of(kind, method).double(), (LENGTHS, (5,), (150,))
    with whole_float64(model):
        truths = [own(model, lengths) for lengths in packs]
    assert install(model) == ""
    tolerance = 1e-5 if method == "dora" and "experts" in kind else 1e-10  # DoRA runs the family's router, in float32
    for lengths, truth in zip(packs, truths, strict=True):
        assert_same(fast(model, lengths), truth, tolerance)
    assert all(layer.fused == (method != "dora") for layer in engine(model).layers)
    if method == "full":
        names = ["conv1d.weight", "A_log", "dt_bias", "D", "in_proj.weight", "out_proj.weight"]
        names += [] if kind == "falcon_h1" else ["norm.weight"]
        assert all(any(trained.endswith(f".{name}") for trained in truths[0][1]) for name in names)


def test_a_long_document() -> None:
    """Of 2,048 tokens, in which the slowest heads forget little."""
    model = model_of("nemotron_h", "full").double()
    with whole_float64(model):
        expected = own(model, (2048,))
    assert install(model) == ""
    assert_same(fast(model, (2048,)), expected, 1e-10)


@pytest.mark.parametrize("kind", CONFIGS)
def test_float32_is_as_exact_as_transformers(kind: str) -> None:
    model = model_of(kind, "lora")
    assert_float32_is_as_exact(model, (LENGTHS, (2048,)) if kind in ("nemotron_h", "falcon_h1") else (LENGTHS,))
    assert min(gradient.cosine for gradient in verify(model).gradients) > 0.99999


@pytest.mark.parametrize("kind", CONFIGS)
def test_frozen_weights_in_few_bits(kind: str) -> None:
    """With NF4 the numbers of the dequantized model."""
    model, twin = model_of(kind, "nf4"), model_of(kind, "nf4")
    dequantize_(twin, torch.float32)
    assert install(model) == ""
    assert_same(fast(model, LENGTHS), own(twin, LENGTHS), 2e-5)
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
    if "experts" not in kind:  # they multiply the tokens of all documents together
        assert torch.equal(one, other)
    torch.testing.assert_close(one, other)
    (gradient,) = torch.autograd.grad(one.sum(), embedded[:1])
    assert not gradient[:70].any()
    assert gradient[70:].abs().sum(1).all()


def test_verify_sees_a_state_that_is_lost_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("nemotron_h", "lora")
    assert install(model) == ""
    real = mamba.delta_rule_forward

    def broken(*given: Any, **options: Any) -> Any:
        """Each chunk is a document."""
        bounds, tokens = given[-1].tolist(), len(given[0])
        cut = torch.tensor([*(row for one in pairwise(bounds) for row in range(*one, 64)), tokens], dtype=torch.int32)
        return real(*given[:5], chunk_table(cut, tokens), cut, **options)

    verify(model)
    monkeypatch.setattr(mamba, "delta_rule_forward", broken)
    with pytest.raises(ModelError, match="differ"):
        verify(model)


def test_adapters_are_where_peft_allows_them(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    names = {name.split(".lora_")[0].rpartition("layers.")[2] for name, _ in model_of("nemotron_h", "lora").named_parameters()}
    assert {name for name in names if name.startswith(("0", "1"))} >= {
        "0.mixer.in_proj",
        "1.mixer.up_proj",
        "1.mixer.down_proj",
    }
    assert "leaves out out_proj" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="refuses adapters on out_proj"):
        add_adapter(AutoModelForCausalLM.from_config(CONFIGS["nemotron_h"]), Lora(targets=["out_proj"]), seed=1)
    names = {
        name.split(".lora_")[0].rpartition("layers.")[2] for name, _ in model_of("granitemoehybrid", "lora").named_parameters()
    }
    assert {"0.mamba.in_proj", "0.mamba.out_proj", "0.shared_mlp.input_linear", "1.self_attn.o_proj"} <= names


def test_what_is_refused_says_so() -> None:
    options = SMALL | NEMOTRON
    latent = AutoConfig.for_model("nemotron_h", **options, layers_block_type=["moe"], moe_latent_size=16)
    assert "moe_latent_size" in why_not_fast(latent)
    assert "mamba_hidden_act" in why_not_fast(AutoConfig.for_model("nemotron_h", **options, mamba_hidden_act="relu",
                                                                   layers_block_type=["linear_attention", "mlp"]))  # fmt: skip
    for key in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        assert key in why_not_fast(AutoConfig.for_model("falcon_h1", **SMALL | SIZES | FALCON, **{key: True}))
    normed = AutoConfig.for_model("falcon_h1", **SMALL | SIZES | FALCON, mamba_rms_norm=True)
    assert "mamba_norm_before_gate" in why_not_fast(normed)
    options = SMALL | SIZES | {"layer_types": KINDS[:2], "num_local_experts": 0}
    assert "activation" in why_not_fast(AutoConfig.for_model("granitemoehybrid", **options, hidden_act="gelu_pytorch_tanh"))
