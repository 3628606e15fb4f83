"""Layers with experts in FP8 against the same model with its weights dequantized, in float32 and on transformers' own layers.

As test_fp8_gemms.py: with FP8 replaced by float32 nothing may differ; with it, no more than e4m3 rounds. A rounded router
input may choose another expert for a token whose choice was close, so a gradient may differ by more than in a dense layer.
"""

from __future__ import annotations

import copy
import itertools
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_decoder_layer import apart, fast_loss, gradients, packed_batch, single_batch
from test_experts import own_loss
from test_fp8_gemms import cosine
from test_quantized_experts import CONFIGS, SIZES, TARGETS, quantized_model
from transformers import Qwen3MoeConfig

from pronghorn.errors import EnvironmentFault
from pronghorn.kernels.lora import fp8, fp8_lora, shared_buffers
from pronghorn.kernels.lora.fp8 import fp8_linear as fp8_linear_of
from pronghorn.kernels.mlp import fp8_gated
from pronghorn.kernels.moe import grouped_fp8
from pronghorn.kernels.moe.grouped_fp8 import Fp8ExpertGroup, fp8_grouped_supported
from pronghorn.kernels.moe.grouped_quantized import QuantizedExpertGroup
from pronghorn.kernels.quant import fp8_cast, fp8_norm
from pronghorn.model import experts
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats import table
from pronghorn.model.formats.experts import StoredExperts
from pronghorn.model.formats.store import dequantize_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers import fp8_gemms
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora
from tables import first_of, gpu_rows


def model_of(family: str, targets: str, *, fast: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    def before(model: Any) -> None:
        store_linears_(model, FORMATS["fp8"])

    model = quantized_model(family, "fp8", targets, before=before, dtype=dtype)
    assert not fast or install(model, fp8=True) == ""
    return model


def dequantized(family: str, targets: str) -> Any:
    model = model_of(family, targets, fast=False)
    assert dequantize_(model, torch.float32)
    return model


def result_of(model: Any, batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = fast_loss(model, batch)
    engine = engine_of(model)
    assert all(layer.fused for layer in engine.layers)
    assert any(layer.fp8 for layer in engine.layers)
    found = gradients(model, loss)
    assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    return float(loss.detach()), found


@pytest.mark.parametrize(
    ("family", "targets"),
    first_of([*zip(CONFIGS, itertools.cycle(TARGETS)), *zip(CONFIGS, itertools.cycle([*TARGETS][::-1]))], len(CONFIGS)),
)
def test_without_the_rounding_nothing_differs(family: str, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 in the place of e4m3 everywhere: of weights, rows and gradients. Measured: 5e-6 at most."""
    modules = (fp8, fp8_cast, fp8_gated, fp8_lora, fp8_norm, fp8_gemms, grouped_fp8, shared_buffers)
    for module in modules:
        if hasattr(module, "E4M3"):
            monkeypatch.setattr(module, "E4M3", torch.float32)

    def transpose(q: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return q.T.contiguous() if out is None else out.copy_(q.T)

    for module in (fp8, grouped_fp8):
        monkeypatch.setattr(module, "fp8_transpose", transpose)
    model, reference = model_of(family, targets), dequantized(family, targets)
    for batch in (packed_batch(), single_batch()):
        ours, loss = result_of(model, batch), own_loss(reference, batch)
        truth = gradients(reference, loss)
        assert ours[0] == pytest.approx(float(loss.detach()), rel=1e-6)
        assert ours[1].keys() == truth.keys()
        for name in truth:
            assert apart(ours[1][name], truth[name]) < 1e-5, name


class RoundedExperts(StoredExperts):
    """The modules' own products in FP8, one expert after the other under autograd: they share no code with the layer but the
    casts."""

    def _mm(self, name: str, x_SD: torch.Tensor, offsets_E1: torch.Tensor) -> torch.Tensor:
        stack, added = self.stacks[name], self._usual(getattr(self, name))
        each = [
            fp8_linear_of(x_SD[start:stop], stack.stored.values[e], stack.stored.scales[e]) + x_SD[start:stop] @ added[e].T
            for e, (start, stop) in enumerate(pairwise(offsets_E1.tolist()))
            if stop > start
        ]
        return torch.cat(each)


def rounded(family: str, targets: str) -> Any:
    model = model_of(family, targets, fast=False)
    for module in model.modules():
        if isinstance(module, StoredExperts):
            module.__class__ = RoundedExperts
    return model


def choose_all(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token goes to all experts."""
    config = copy.deepcopy(CONFIGS[family])
    setattr(config, "top_k_experts" if hasattr(config, "top_k_experts") else "num_experts_per_tok", 4)
    monkeypatch.setitem(CONFIGS, family, config)


@pytest.mark.parametrize("family", first_of(CONFIGS, 2))
def test_loss_and_every_gradient_follow_the_dequantized_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token goes to all experts, so that rounding cannot choose others. Measured: cosine of the whole gradient 0.975 to
    0.998, of the modules' own products 0.985 to 0.999; errors 0.9 to 1.2 times theirs."""
    choose_all(family, monkeypatch)
    ratios = []
    for targets, batch in (("attention", single_batch()), ("experts", packed_batch(documents=20, capacity=1024))):
        ours = result_of(model_of(family, targets), batch)
        reference, modules = dequantized(family, targets), rounded(family, targets)
        loss = own_loss(reference, batch)
        truth, theirs = gradients(reference, loss), gradients(modules, own_loss(modules, batch))
        assert ours[0] == pytest.approx(float(loss.detach()), rel=2e-3)
        assert ours[0] != float(loss.detach())  # else nothing was rounded
        assert cosine(*(torch.cat([found[name].flatten() for name in truth]) for found in (ours[1], truth))) > 0.97
        for name in truth:
            assert cosine(ours[1][name], truth[name]) > 0.95, name
            ratios.append(apart(ours[1][name], truth[name]) / apart(theirs[name], truth[name]))
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.3


def test_a_dense_layer_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=4, mlp_only_layers=[1])
    monkeypatch.setitem(CONFIGS, "mixed", config)
    batch, reference = packed_batch(), dequantized("mixed", "experts")
    ours, truth = result_of(model_of("mixed", "experts"), batch), gradients(reference, own_loss(reference, batch))
    assert ours[1].keys() == truth.keys()
    assert all(cosine(ours[1][name], truth[name]) > 0.95 for name in truth)


def test_a_chip_without_grouped_fp8_products_multiplies_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(experts, "fp8_grouped_supported", lambda device: "only linears are")
    model, batch = model_of("qwen3_moe", "experts"), packed_batch()
    result_of(model, batch)
    engine = engine_of(model)
    assert all(isinstance(layer.mlp.expert_down.group, QuantizedExpertGroup) for layer in engine.layers)  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("multiplied in 16 bits: only linears are") == 1  # not in every layer
    monkeypatch.setattr(table, "fp8_supported", lambda device: "this test's chip has none")
    with pytest.raises(EnvironmentFault, match="cannot train in FP8"):
        fast_loss(model_of("qwen3_moe", "experts"), batch)


def test_what_one_node_does_not_cover_runs_on_the_modules() -> None:
    batch, found = packed_batch(), []
    for make in (model_of, dequantized):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("test_quantized_experts.Lora", lambda **options: Lora(**{**options, "dora": True}))
            model = make("qwen2_moe", "attention")
        install(model)
        found.append(gradients(model, fast_loss(model, batch)))
        assert not any(layer.fused for layer in engine_of(model).layers)  # type: ignore[union-attr]
    assert all(cosine(found[0][name], found[1][name]) > 0.9 for name in found[1])


# ---- on a GPU --------------------------------------------------------------------------------------------------------------

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@on_a_gpu
@pytest.mark.parametrize(("family", "targets"), gpu_rows(itertools.product(CONFIGS, TARGETS)))
def test_on_a_gpu(family: str, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_all(family, monkeypatch)
    batch = packed_batch(documents=20, capacity=1024)
    reference = dequantized(family, targets)
    truth = gradients(reference, own_loss(reference, batch))
    model = model_of(family, targets, dtype=torch.bfloat16).cuda()
    ours = result_of(model, batch.map(lambda tensor: tensor.cuda()))
    engine = engine_of(model)
    here = fp8_grouped_supported("cuda") is None
    assert all(isinstance(layer.mlp.expert_down.group, Fp8ExpertGroup) == here for layer in engine.layers)  # type: ignore[attr-defined]
    assert cosine(*(torch.cat([found[name].cpu().flatten() for name in truth]) for found in (ours[1], truth))) > 0.95
    verify(model)
