"""Held-out loss is one number whatever the packing, and the decision to stop is remembered exactly."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora, Stop
from pronghorn.train.run.evaluate import Evaluation, Progress, evaluate
from samples import ListTable, make_model, random_table
from tables import table

CPU = torch.device("cpu")


def loss_of(model: Any, table: ListTable, capacity: int, pad_id: int = 0) -> Evaluation:
    return evaluate(model, table, capacity=capacity, device=CPU, pad_id=pad_id, autocast=nullcontext)


def test_the_loss_is_the_mean_over_all_trained_tokens() -> None:
    """Against each document alone, in float64, with torch's own cross-entropy."""
    model, table = make_model(), random_table(20)
    double = make_model().double()
    losses = []
    for i in range(len(table)):
        ids = torch.tensor(table.ids(i).astype("int64"))
        logits = double(input_ids=ids[None]).logits[0, :-1]
        each = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        losses.append(each[torch.tensor(table.loss(i)[1:])].detach())
    truth = torch.cat(losses)
    result = loss_of(model, table, 256)
    assert result.tokens == len(truth) == int(table.loss_counts.sum())
    assert result.loss == pytest.approx(float(truth.mean()), rel=1e-6)
    by_row = loss_of(model, table, 256)
    assert by_row.losses_R == pytest.approx([float(each.sum()) for each in losses], rel=1e-5)
    assert by_row == result
    assert result.perplexity == pytest.approx(math.exp(float(truth.mean())), rel=1e-5)


def test_the_loss_does_not_depend_on_capacity_or_padding() -> None:
    model, table = make_model(), random_table(30)
    reference = loss_of(model, table, 4096)
    for capacity, pad_id in ((60, 0), (64, 7), (100, 258), (333, 0), (2048, 3)):
        other = loss_of(model, table, capacity, pad_id)
        assert other.tokens == reference.tokens
        assert other.loss == pytest.approx(reference.loss, rel=1e-6)


def test_dropout_is_off_and_the_mode_is_put_back() -> None:
    model = add_adapter(make_model(), Lora(r=4, dropout=0.9), seed=1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    for training in (True, False):
        model.train(training)
        assert loss_of(model, random_table(5), 128) == loss_of(model, random_table(5), 128)
        assert model.training is training
    assert all(p.grad is None for p in model.parameters())


# Progress ---------------------------------------------------------------------------------------------------------------


def after(losses: list[float], stop: Stop | None) -> Progress:
    progress = Progress()
    for step, loss in enumerate(losses, start=1):
        progress = progress.after(loss, step, stop)
    return progress


STOP = Stop(patience=2, min_delta=0.1)


@table(
    ("losses", "best", "without_gain"),
    [
        ([3.0], (3.0, 1), 0),
        ([3.0, 2.0], (2.0, 2), 0),
        ([3.0, 2.95], (2.95, 2), 1),  # the best checkpoint is the best, even if it gained too little
        ([3.0, 3.5], (3.0, 1), 1),
        ([3.0, 2.95, 2.91], (2.91, 3), 2),  # small gains are measured from where patience began: 0.09 in two evaluations
        ([3.0, 2.95, 2.85], (2.85, 3), 0),  # together they are enough
        ([3.0, 3.5, 2.0, 2.5], (2.0, 3), 1),
    ],
)
def test_patience_counts_evaluations_that_gain_too_little(
    losses: list[float], best: tuple[float, int], without_gain: int
) -> None:
    progress = after(losses, STOP)
    assert (progress.best, progress.best_step) == best
    assert progress.without_gain == without_gain


def test_the_verdict_comes_when_patience_is_used_up_and_gives_its_reason() -> None:
    assert after([3.0, 3.1], STOP).verdict(STOP) == ""
    said = after([3.0, 2.95, 3.1], STOP).verdict(STOP)
    assert said == "held-out loss improved by less than 0.1 in 2 evaluations in a row; best 2.9500 at step 2"
    assert after([3.0, 3.0], Stop(patience=1, min_delta=0.0)).verdict(Stop(patience=1, min_delta=0.0))  # no gain at all


def test_a_loss_that_is_not_a_number_is_no_gain_and_never_the_best() -> None:
    progress = after([3.0, math.nan], STOP)
    assert (progress.best, progress.best_step, progress.without_gain) == (3.0, 1, 1)
    assert after([math.nan], STOP).best_step is None


@table("losses", [[], [3.0], [3.0, 2.95, 3.1]])
def test_progress_survives_json(losses: list[float]) -> None:
    progress = after(losses, STOP)
    stored = json.loads(json.dumps(progress.as_dict(), allow_nan=False))
    assert Progress.of(stored) == progress
    assert Progress.of(stored).after(2.0, 9, STOP) == progress.after(2.0, 9, STOP)


def test_a_metric_of_answers_is_better_when_it_is_higher() -> None:
    progress = Progress("exact_match")
    for step, value in enumerate([0.2, 0.5, 0.5, 0.45, math.nan], start=1):
        progress = progress.after(value, step, STOP)
    assert (progress.best, progress.best_step, progress.without_gain) == (0.5, 2, 3)
    said = progress.verdict(STOP)
    assert said == "held-out exact_match improved by less than 0.1 in 3 evaluations in a row; best 0.5000 at step 2"
    assert Progress("mine").after(0.0, 1, STOP).best_step == 1


def test_another_metric_begins_anew() -> None:
    progress = after([3.0, 2.0], STOP)
    assert progress.by("loss") is progress
    assert progress.by("rouge_l") == Progress("rouge_l")
