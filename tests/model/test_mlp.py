"""The dense MLP in chunks: the same loss and gradients as in one piece, at every level and with what waits elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_saved import FAMILIES, MIXED, batch_of, close, gradients, model_of

from pronghorn.memory.offload import OffloadPool
from pronghorn.model.causal_lm import FastCausalLM
from pronghorn.model.layers.saved import Level
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.train.objectives import Supervised
from tables import first_of


# Sums and whole weights are added to by the same code whatever the norms are.
@pytest.mark.parametrize(
    ("family", "lora", "summed"),
    first_of(
        [
            ("qwen3", True, True),
            ("gemma2", True, True),
            ("olmo2", False, False),
            ("llama", False, False),
            *((family, True, False) for family in FAMILIES),
        ],
        3,
    ),
)
def test_the_mlp_in_pieces_gives_the_same_gradients(family: str, lora: bool, summed: bool) -> None:
    """Loss and gradients over pieces: rows go through the same operations; sums over pieces are in another order."""
    model, engine = model_of(family, lora)
    loss, expected = gradients(model)
    for pieces, levels in ((2, ["gate_up"] * 4), (3, ["layer"] * 4), (8, ["layer", "gate_up", "nothing", "layer"]), (3, MIXED)):
        for layer, level in zip(engine.layers, levels, strict=True):
            layer.level, layer.mlp_chunks = level, pieces  # type: ignore[assignment]
        again, found = summed_gradients(model, engine) if summed else gradients(model)
        assert again == pytest.approx(loss, rel=1e-6)
        assert close(found, expected), (pieces, levels)


def summed_gradients(model: Any, engine: FastCausalLM) -> tuple[float, dict[str, torch.Tensor]]:
    """As the graphed step has them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    sums = LoraGradBuffer(engine, torch.float32)
    loss = Supervised().loss_sum(model, batch_of())
    loss.backward()
    sums.collect()
    sums.release()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


@pytest.mark.parametrize("level", first_of(["around_attention", "gate_up", "layer"]))
def test_evaluation_in_pieces_and_what_waits_elsewhere(level: Level) -> None:
    model, engine = model_of("llama", lora=True)
    batch = batch_of()
    with torch.no_grad():
        expected = float(Supervised().loss_sum(model, batch))
    _, without = gradients(model)
    pool = OffloadPool(4, 4_000_000, torch.device("cpu"))
    for layer in engine.layers:
        layer.level, layer.mlp_chunks, layer.offload = level, 3, pool
    with torch.no_grad():
        assert float(Supervised().loss_sum(model, batch)) == pytest.approx(expected, rel=1e-6)
    _, found = gradients(model)
    pool.finish()
    assert close(found, without)
