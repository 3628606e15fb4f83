"""Steps over weights in 4 bits: replayed as graphs where there is a GPU, with looks at the model in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_graphed_step import DEVICE, SMALL, eager, graphed, mixed_table, steps_of
from transformers import AutoModelForCausalLM, Qwen3Config

from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from pronghorn.train.objectives import Supervised

TARGETS: dict[str, Any] = {"all": Lora(r=4), "some": Lora(r=4, targets=("q_proj", "down_proj"))}


def model_of(targets: str, recompute: bool) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL)).to(DEVICE)
    store_linears_(model, FORMATS["nf4"])
    model = add_adapter(model, TARGETS[targets], seed=1).to(DEVICE)
    assert install(model) == ""
    engine = engine_of(model)
    for layer in engine.layers:
        layer.recompute = recompute
    return model.train()


@pytest.mark.parametrize(("targets", "recompute"), [("all", True), ("some", False)])
def test_graphed_steps_with_evaluations_between_equal_eager_ones(targets: str, recompute: bool) -> None:
    batches = steps_of(mixed_table(300), 30 if DEVICE.type == "cuda" else 4)
    assert len({batch.shape for step in batches for batch in step.batches}) > 1  # several graphs
    held_out = steps_of(mixed_table(40), 1)[0].batches[0].to(DEVICE)
    curves = []
    for make in (graphed, eager):
        model = model_of(targets, recompute)
        step, losses = make(model), []
        for batch in batches:
            step.begin(batch)
            result = step.finish()
            with torch.no_grad():
                losses.append((result.loss, float(Supervised().loss_sum(model.eval(), held_out))))
            model.train()
        curves.append(losses)
    for ours, theirs in zip(*curves, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert curves[0][-1][0] < curves[0][0][0]
    assert len({held_out_loss for _, held_out_loss in curves[0]}) == len(batches)  # each update reaches the next look


def test_the_bytes_never_change() -> None:
    model = model_of("all", False)
    before = {name: module.weight.clone() for name, module in model.named_modules() if isinstance(module, StoredLinear)}
    assert len(before) == 14
    step = graphed(model)
    for batch in steps_of(mixed_table(100), 3):
        step.begin(batch)
        step.finish()
    assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in before.items())
