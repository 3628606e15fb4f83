"""Evaluations of a run: captured on a GPU, where these tests replay them, and the same numbers everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_graphed_step import CAPACITY, DEVICE, graphed, losses, mixed_table, model_of, steps_of
from test_rebuilt_buffers import MODELS, adapters_off, overwrite_freed_memory

from pronghorn.data.pack.loader import evaluation_batches
from pronghorn.train.run.evaluate import Evaluation, evaluate
from pronghorn.train.step.graphed_step import GraphedStep
from pronghorn.train.step.graphed_sums import EAGER_FIRST

GPU = DEVICE.type == "cuda"
HELD_OUT = mixed_table(80)


def evaluated(step: GraphedStep, *, of_the_run: bool = True) -> Evaluation:
    found = evaluate(
        step.model,
        HELD_OUT,
        capacity=CAPACITY,
        device=DEVICE,
        pad_id=0,
        autocast=step.autocast,
        step=step if of_the_run else None,
    )
    overwrite_freed_memory()
    return found


def require_same(one: Evaluation, other: Evaluation, rel: float) -> None:
    assert one.tokens == other.tokens
    assert one.loss == pytest.approx(other.loss, rel=rel)
    assert one.losses_R == pytest.approx(other.losses_R, rel=10 * rel, abs=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_a_runs_evaluations_are_those_of_the_weights_as_they_are(kind: str) -> None:
    """Before the first step, between steps, and after adapters were switched off and on."""
    precision = "bf16" if kind.endswith("fp8") and GPU else "fp32"
    said: list[str] = []
    step = graphed(MODELS[kind](), precision, said)
    batches, seen = steps_of(mixed_table(60), 3 if GPU else 2, packs=1), []
    for batch in batches:
        for _ in range(2):
            seen.append(evaluated(step))
            require_same(seen[-1], evaluated(step, of_the_run=False), 1e-6 if precision == "fp32" else 2e-3)
        assert seen[-1] == seen[-2]
        assert bool(step._evaluated._held) is GPU
        losses(step, [batch])
    with step.autocast():
        adapters_off(step.model, batches[0].batches[0])
    require_same(evaluated(step), evaluated(step, of_the_run=False), 1e-6 if precision == "fp32" else 2e-3)
    assert len({one.loss for one in seen}) == len(batches)
    assert not any("eagerly" in line for line in said)


def test_evaluations_between_steps_change_no_step() -> None:
    batches, model, other = steps_of(mixed_table(100), 4), model_of(), model_of()
    step, found = graphed(model), []
    for batch in batches:
        evaluated(step)
        found += losses(step, [batch])
    assert found == losses(graphed(other), batches)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_packs_of_few_shapes_have_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [{one.shape for one in evaluation_batches(HELD_OUT, CAPACITY, few_shapes=few)} for few in (False, True)]
    assert len(shapes[1]) <= 4 < len(shapes[0])
    step = graphed(model_of())
    exact = evaluated(step, of_the_run=False)
    monkeypatch.setattr(GraphedStep, "captures", True)
    require_same(evaluated(step), exact, 1e-6)


class Failing:
    """Graphs of which no capture gives the sums of an eager run."""

    captures, tries = True, 0

    def __init__(self, error: str, changed: torch.Tensor) -> None:
        self.error, self.changed = error, changed

    def attempt(self, work: Any) -> None:
        work()

    def capture(self, works: Any) -> list[Any]:
        self.tries += 1
        if self.error:
            raise RuntimeError(self.error)
        self.changed.mul_(1.5)
        works[0]()
        return [lambda: None]


@pytest.mark.parametrize(("error", "told"), [("no room", "no room"), ("", "a replay's sums differ")])
def test_a_capture_that_fails_costs_a_sentence(error: str, told: str) -> None:
    said: list[str] = []
    step = graphed(model := model_of(), said=said)
    exact = evaluated(step, of_the_run=False)
    graphs = Failing(error, model.get_base_model().lm_head.weight.data)
    step._graphs = step._evaluated._graphs = graphs  # type: ignore[assignment]
    batches = list(evaluation_batches(HELD_OUT, CAPACITY, few_shapes=True))
    assert len(batches) > EAGER_FIRST + 1
    found = evaluated(step)
    assert graphs.tries == (2 if error else 1)
    assert [told in line for line in said] == [True]
    if error:
        require_same(found, exact, 1e-6)
