"""LFM2 and its mixture against transformers, document by document: loss and all gradients, for every way of training.

Stock transformers lets the convolutions of a pack see other documents, so each document is its own batch there."""

from __future__ import annotations

import copy
import itertools
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_decoder_layer import whole_float64
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.errors import ModelError
from pronghorn.model.causal_lm import FastCausalLM, engine_of, install
from pronghorn.model.families import why_not_fast
from pronghorn.model.formats.store import dequantize_, store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.verify import verify
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.recipe_parts import Lora
from samples import small
from tables import first_of

LENGTHS = (1, 2, 3, 17, 40)
SMALL = small(num_hidden_layers=4, initializer_range=0.15, layer_types=["conv", "full_attention", "conv", "conv"])
CONFIGS = {
    "lfm2": AutoConfig.for_model("lfm2", **SMALL, block_multiple_of=16, conv_L_cache=3),
    "lfm2_moe": AutoConfig.for_model(
        "lfm2_moe", **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1
    ),
}
# Published keys of LFM2-1.2B that no transformers class reads.
CARRIED = {
    "block_dim": 2048,
    "block_mlp_init_scale": 1.0,
    "block_norm_eps": 1e-5,
    "block_use_swiglu": True,
    "conv_dim": 2048,
    "conv_use_xavier_init": True,
    "use_pos_enc": True,
    "num_heads": 32,
}


def model_of(kind: str, method: str) -> Any:
    """Norms, and the bias of the experts' choice, are drawn: at their initial values mistakes in them would not show."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[kind])
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or "expert_bias" in name:
            torch.nn.init.normal_(tensor, mean=float("norm" in name), std=0.2)
    if method == "full":
        return model.train()
    if method in ("nf4", "fp8"):
        store_linears_(model, FORMATS[method], skip=("lm_head",))
        store_experts_(model, FORMATS[method])
    model.requires_grad_(False)
    model = add_adapter(model, Lora(r=4, dora=method == "dora"), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def engine(model: Any) -> FastCausalLM:
    found = engine_of(model)
    assert found is not None
    return found


def batch(lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor, Tensor]:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    ids = torch.randint(0, 259, (int(bounds[-1]),), generator=torch.Generator().manual_seed(5))
    return ids, torch.cat([torch.arange(length) for length in lengths]), bounds


def fast(model: Any, lengths: tuple[int, ...] = LENGTHS) -> tuple[float, dict[str, Tensor]]:
    ids, positions, bounds = batch(lengths)
    labels = torch.cat([ids[1:], ids[:1]])
    labels[bounds[1:].long() - 1] = IGNORED
    pack = PackedBatch(
        ids_T=ids,
        labels_T=labels,
        positions_T=positions,
        cu_seqlens=bounds,
        loss_rows=(labels != IGNORED).nonzero()[:, 0],
        longest=max(lengths),
        tokens=len(ids),
        loss_tokens=int((labels != IGNORED).sum()),
        documents=tuple(range(len(lengths))),
    )
    return gradients(model, engine(model).packed_loss(pack)[0])


def own(model: Any, lengths: tuple[int, ...] = LENGTHS) -> tuple[float, dict[str, Tensor]]:
    ids, _, bounds = batch(lengths)
    parts = [_document(model, ids[start:stop]) for start, stop in pairwise(bounds.tolist()) if stop - start > 1]
    return gradients(model, torch.stack(parts).sum())


def _document(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")


def gradients(model: Any, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


Result = tuple[float, dict[str, Tensor]]


def away(found: Result, expected: Result) -> dict[str, float]:
    """The largest difference of each gradient, by its largest number."""
    assert found[1].keys() == expected[1].keys()
    largest = max(float(truth.abs().max()) for truth in expected[1].values())
    return {  # queries with one key have no gradient, but noise
        name: float((found[1][name] - truth).abs().max() / truth.abs().max().clamp(min=1e-3 * largest))
        for name, truth in expected[1].items()
    }


def assert_same(found: Result, expected: Result, tolerance: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for name, distance in away(found, expected).items():
        assert distance <= tolerance, (name, distance)


def assert_float32_is_as_exact(model: Any, packs: tuple[tuple[int, ...], ...]) -> None:
    """In float32 all gradients are within 1e-5 of float64's, or at most twice as far as transformers' own in float32: of all
    of them, since single ones are draws (docs/log/2026-11-19-float32-of-states.md)."""
    wide = copy.deepcopy(model).double()
    with whole_float64(wide):
        truths = [own(wide, lengths) for lengths in packs]
    theirs = [away(own(model, lengths), truth) for lengths, truth in zip(packs, truths, strict=True)]
    assert install(model) == ""
    for lengths, truth, other in zip(packs, truths, theirs, strict=True):
        found = fast(model, lengths)
        assert found[0] == pytest.approx(truth[0], rel=1e-6)
        errors = away(found, truth)
        assert max(errors.values()) <= 1e-5 or math.hypot(*errors.values()) <= 2 * math.hypot(*other.values()), (
            lengths,
            max(errors.values()),
            max(other.values()),
        )


@pytest.mark.parametrize(
    ("kind", "method"), [*itertools.product(CONFIGS, ["lora", "full"]), *first_of([("lfm2", "dora"), ("lfm2_moe", "dora")])]
)
def test_all_gradients_are_those_of_transformers(kind: str, method: str) -> None:
    model = model_of(kind, method)
    expected = own(model)
    assert install(model) == ""
    assert_same(fast(model), expected, 1e-5)
    assert all(layer.fused == (method != "dora") for layer in engine(model).layers)
    for length in (3, 40):  # a document by itself
        assert_same(fast(model, (length,)), own(model, (length,)), 1e-5)
    if method == "full":
        assert "model.layers.0.conv.conv.weight" in expected[1]
    assert min(gradient.cosine for gradient in verify(model).gradients) > 0.99999


def assert_as_dequantized(model: Any, twin: Any, stored: str) -> None:
    """With NF4 the numbers of the dequantized model; FP8 products are as near as FP8 is."""
    dequantize_(twin, torch.float32)
    assert install(model) == ""
    found, expected = fast(model), own(twin)
    assert all(layer.fused for layer in engine(model).layers)
    if stored == "nf4":
        assert_same(found, expected, 2e-5)
        return
    assert found[0] == pytest.approx(expected[0], rel=0.02)
    for name, truth in expected[1].items():
        cosine = torch.nn.functional.cosine_similarity(found[1][name].flatten(), truth.flatten(), dim=0)
        assert float(cosine) > 0.95, name


@pytest.mark.parametrize("stored", ["nf4", "fp8"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_frozen_weights_in_few_bits(kind: str, stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In FP8, B C x multiplies three errors."""
    if stored == "fp8":
        monkeypatch.setattr(CONFIGS[kind], "initializer_range", 0.08)
    model, twin = model_of(kind, stored), model_of(kind, stored)
    assert_as_dequantized(model, twin, stored)


@pytest.mark.parametrize("kind", CONFIGS)
def test_documents_do_not_see_each_other(kind: str) -> None:
    model = model_of(kind, "lora")
    assert install(model) == ""
    require_isolated_documents(model, torch.device("cpu"), 259)
    stock = model_of(kind, "full")
    with pytest.raises(ModelError, match="attend to each other"):
        require_isolated_documents(stock, torch.device("cpu"), 259)


def test_what_is_refused_says_so() -> None:
    published = AutoConfig.for_model("lfm2", **CARRIED, num_hidden_layers=16, full_attn_idxs=[2, 5, 8, 10, 12, 14])
    assert why_not_fast(published) == ""
    assert "conv_bias" in why_not_fast(AutoConfig.for_model("lfm2", **SMALL, conv_bias=True))
    other = AutoConfig.for_model("lfm2", **(SMALL | {"layer_types": ["linear_attention"] * 4}))
    assert "linear_attention" in why_not_fast(other)
