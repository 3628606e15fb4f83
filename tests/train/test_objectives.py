"""Objectives get log-probabilities: supervised loss made of them is the fused one, and a preference objective trains through
the same steps."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from pairs import Pairs, pair_table

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import BatchLoader, StepBatch, StepPacking
from pronghorn.data.pack.packing import pack, pack_in_order
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.objectives import Objective
from pronghorn.train.objectives.objective import outputs_of
from pronghorn.train.run.evaluate import evaluate
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import GraphedStep
from pronghorn.train.step.health import offending_rows
from pronghorn.train.step.step import EagerStep, Step
from samples import make_model, random_table

CPU = torch.device("cpu")


def small_model() -> Any:
    model = add_adapter(make_model(), Lora(r=4), seed=1)
    assert install(model) == ""
    return model.train()


def test_padding_has_a_log_probability_of_zero_and_no_gradient() -> None:
    model, rows = small_model(), random_table(6)
    packs = pack_in_order(rows.lengths, 512)
    batch = build_batch(rows, packs[0], 512, shapes=Shapes.planned(rows, packs, 512))
    found = outputs_of(model, batch).values_N
    real = batch.labels_T[batch.loss_rows] != -100
    assert 0 < int(real.sum()) == batch.loss_tokens < len(found)
    assert not found[~real].any()
    assert (found[real] < 0).all()
    assert not torch.autograd.grad((found * ~real).sum(), next(p for p in model.parameters() if p.requires_grad))[0].any()


# ---- a preference objective, written in tests/train/pairs.py -------------------------------------------------------


def steps_of(pairs: Any, objective: Objective, capacity: int, packs: int, count: int) -> list[StepBatch]:
    first = pack(groups_of(pairs, 2), capacity, seed=1, epoch=0)
    loader = BatchLoader(
        pairs,
        StepPacking(capacity, complete=objective.complete, shapes=Shapes.planned(pairs, first, capacity)),
        packs_per_step=packs,
        seed=1,
        workers=0,
        together=2,
    )
    return list(islice(loader, count))


def step_for(kind: type[Step], model: Any, objective: Objective, lr: float = 1e-2) -> Step:
    optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    options: dict[str, Any] = {"device": CPU, "precision": "fp32", "clip": 1e9, "objective": objective}
    return GraphedStep(model, optimizer, say=print, **options) if kind is GraphedStep else kind(model, optimizer, **options)


def taken(step: Step, batches: list[StepBatch]) -> list[tuple[float, float]]:
    results = []
    for batch in batches:
        step.begin(batch)
        result = step.finish()
        results.append((result.loss, result.grad_norm))
    return results


@pytest.mark.parametrize("kind", [EagerStep, GraphedStep])
def test_a_preference_objective_trains_through_the_same_step(kind: type[Step]) -> None:
    model, pairs, objective = small_model(), pair_table(20), Pairs()
    objective.prepare(model, pairs, CPU, nullcontext)
    results = taken(step_for(kind, model, objective), steps_of(pairs, objective, 512, 2, 8))
    assert results[0][0] == pytest.approx(math.log(2), rel=1e-6)  # the adapter is zero: the model is its own reference
    assert results[-1][0] < 0.5
    assert all(norm > 0 for _, norm in results)


def test_its_loss_does_not_depend_on_batching() -> None:
    """One step over all pairs: in one pack, in several, and each pair alone."""
    pairs, found = pair_table(12), []
    for capacity, packs in ((1024, 1), (256, 9), (128, 30)):
        model, objective = small_model(), Pairs()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # away from the reference
                torch.nn.init.normal_(parameter, std=0.3)
        objective.prepare(model, pairs, CPU, nullcontext)
        (batch,) = steps_of(pairs, objective, capacity, packs, 1)
        assert sum(len(micro.documents) for micro in batch.batches) == 24
        assert all(
            np.diff(np.array(micro.documents).reshape(-1, 2)).ravel().tolist() == [1] * (len(micro.documents) // 2)
            for micro in batch.batches
        )
        found.append((len(batch.batches), *taken(step_for(EagerStep, model, objective), [batch])[0]))
        held_out = evaluate(
            small_model(), pairs, capacity=capacity, device=CPU, pad_id=0, autocast=nullcontext, objective=Pairs()
        )
        assert held_out.loss == pytest.approx(math.log(2), rel=1e-6)
        assert held_out.tokens == int(pairs.loss_counts.sum())
    assert len({micro for micro, _, _ in found}) == 3
    for _, loss, norm in found[1:]:
        assert loss == pytest.approx(found[0][1], rel=1e-5)
        assert norm == pytest.approx(found[0][2], rel=1e-4)
    assert abs(found[0][1] - math.log(2)) > 1e-3


def test_rows_that_break_a_step_are_found_with_their_partners() -> None:
    model, pairs, objective = small_model(), pair_table(4), Pairs()
    objective.prepare(model, pairs, CPU, nullcontext)
    (batch,) = steps_of(pairs, objective, 512, 1, 1)
    objective.references[id(pairs)][5][:] = math.nan  # of the third pair
    found = offending_rows(model, batch, CPU, nullcontext, objective)
    assert sorted(found.rows) == ["row 4", "row 5"]
    assert sorted(found.of) == [f"row {row}" for row in range(8)]
