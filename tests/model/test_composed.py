"""Layers as separate ops, for DoRA and LoRA dropout: with weights in 4 bits the numbers of the same weights in nn.Linear, in
FP8 those of the dequantized model as far as FP8 allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fp8_gemms import batch_of as fp8_batch_of
from test_fp8_gemms import cosine, engine, fast_loss, own_loss
from test_fp8_gemms import gradients as fp8_gradients
from test_fp8_gemms import model_of as fp8_model_of
from test_linears import LORAS, assert_same, batch_of, loss_of, model_of, step_of, twin_of

from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import dequantize_
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora


@pytest.mark.parametrize("lora", ["dora", "norms"])
def test_without_plain_adapters(lora: str) -> None:
    model, batch = model_of("llama, every bias", LORAS[lora]), batch_of()
    twin = twin_of(model)
    assert not install(model)
    loss, gradients = step_of(model, batch)
    expected, theirs = step_of(twin, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same(gradients, theirs, 1e-5)
    engine = engine_of(model)
    assert all(layer.fused == (lora != "dora") for layer in engine.layers)
    verify(model)


def test_dropout_drops_in_training_only() -> None:
    model, batch = model_of("llama", Lora(r=4, dropout=0.5)), batch_of()
    twin = twin_of(model)
    assert not install(model)
    found = []
    for each in (model, twin):
        torch.manual_seed(3)
        found.append(step_of(each, batch))
    assert_same(found[0][1], found[1][1])
    with torch.no_grad():
        assert float(loss_of(model.eval(), batch)) == pytest.approx(float(loss_of(twin.eval(), batch)), rel=1e-6)
        assert float(found[0][0]) != float(loss_of(model, batch))


@pytest.mark.parametrize("lora", [{"dora": True}, {"dropout": 0.3}], ids=["dora", "dropout"])
def test_what_one_node_does_not_cover_runs_on_the_modules(lora: dict[str, Any]) -> None:
    model, reference, batch = fp8_model_of("llama", **lora), fp8_model_of("llama", fast=False, **lora), fp8_batch_of()
    dequantize_(reference, torch.float32)
    if "dropout" in lora:
        found = fp8_gradients(model, fast_loss(model, batch))[1]
        assert found.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            assert float(fast_loss(model.eval(), batch)) == pytest.approx(float(own_loss(reference.eval(), batch)), rel=0.01)
        return
    loss, ours = fp8_gradients(model, fast_loss(model, batch))
    assert not any(layer.fused for layer in engine(model).layers)
    true_loss, truth = fp8_gradients(reference, own_loss(reference, batch))
    assert loss == pytest.approx(true_loss, rel=0.01)
    assert ours.keys() == truth.keys()
    assert all(cosine(ours[name], truth[name]) > 0.99 for name in truth)
