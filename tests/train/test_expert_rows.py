"""A layer whose experts get their rows from ranks: here from one, which is the same process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_graphed_step import DEVICE, mixed_table, steps_of
from test_moe_steps import model_of

from pronghorn.model.causal_lm import engine_of
from pronghorn.model.families import num_experts
from pronghorn.train.dist.expert_shards import ExpertRows
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Supervised
from tables import first_of


@pytest.mark.parametrize(("family", "bits"), [("qwen2_moe", None), ("gpt_oss", None), ("mixtral", 8)])
@pytest.mark.parametrize("level", first_of(["layer", "nothing", "gate_up"]))
def test_rows_that_are_sent_to_oneself(family: str, bits: int | None, level: Any) -> None:
    """One rank, whose rows go through everything, on a GPU with CUDA's kernels: the same loss and gradients, whatever is
    recomputed."""
    (batch,) = steps_of(mixed_table(12), 1, packs=1)[0].batches
    found = []
    for sends in (False, True):
        dtype = torch.bfloat16 if bits and DEVICE.type == "cuda" else torch.float32  # FP8 products give bf16 there
        model = model_of(family, "experts", dtype, bits=bits)
        engine = engine_of(model)
        for layer in engine.layers:
            layer.level = level
            layer.mlp.spread = ExpertRows(World(), num_experts(engine.config)) if sends else None  # type: ignore[union-attr]
        for step in range(2):  # B is zero before the first update, and with it A's gradients
            loss = Supervised().sums(model, batch.to(DEVICE)).loss
            loss.backward()
            trains = [p for p in model.parameters() if p.requires_grad]
            if not step:
                for p in trains:
                    p.data -= 1e-2 * p.grad.sign()
                    p.grad = None
        found.append((float(loss.detach()), torch.cat([p.grad.flatten() for p in trains])))
    (loss, gradients), (loss_sent, gradients_sent) = found
    assert loss_sent == pytest.approx(loss, rel=1e-2 if bits else 1e-5)
    assert float((gradients_sent - gradients).norm() / gradients.norm()) < (1e-2 if bits else 1e-5)
