"""Held-out loss, and the decision to go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from pronghorn.data.pack.loader import evaluation_batches
from pronghorn.data.pack.packing import TokenRows
from pronghorn.data.pack.parts import part_of
from pronghorn.errors import counted
from pronghorn.hf_types import HFModel
from pronghorn.recipe_parts import Stop
from pronghorn.train.dist.context import deal_of
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective, Supervised
from pronghorn.train.objectives.objective import loss_borders, losses_between
from pronghorn.train.run.paired import (
    FEWEST_QUESTIONS,
    Compared,
    Counts,
    Floats,
    Seen,
    as_text,
    compared,
    difference,
    expected_gain,
    kept,
    mean_error,
    of_text,
)
from pronghorn.train.step.step import Step


@dataclass(frozen=True)
class Evaluation:
    loss: float  # not a number where answers are measured, and no loss
    tokens: int  # held-out tokens that carry loss
    figures: dict[str, float] = field(default_factory=dict)  # what else the objective shows
    samples: int = 0  # held-out prompts that were answered for the figures
    losses_R: Floats | None = field(default=None, compare=False)  # summed loss of each row, where there is one
    error: float | None = field(default=None, compare=False)  # standard error of the loss, over these rows

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # e**710 is beyond a float


@torch.no_grad()
def evaluate(
    model: HFModel,
    table: TokenRows,
    *,
    capacity: int,
    device: torch.device,
    pad_id: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    progress: Callable[[str, int, int], None] | None = None,
    objective: Objective | None = None,
    world: World | None = None,
    step: Step | None = None,
) -> Evaluation:
    """Mean over all held-out tokens with loss, or over what the objective counts: the same number for any capacity. `step`: of
    the run in which this happens, with the same objective; it may have captured the forward."""
    objective, world = objective or Supervised(), world or World()
    was_training = model.training
    model.eval()
    objective.prepare(model, table, device, autocast)
    total, counts = (torch.zeros(objective.terms, dtype=torch.float64) for _ in range(2))
    watched = torch.zeros(len(objective.watched), dtype=torch.float64)
    total, watched, tokens, seen = total.to(device), watched.to(device), 0, 0
    rows: list[tuple[list[int], Counts, torch.Tensor]] = []  # of each batch: documents, borders, losses. Not the batch itself
    if progress:
        progress("evaluating", 0, len(table))  # the first batch alone may take many seconds on a CPU
    deal, few_shapes = deal_of(model, world), step is not None and step.captures
    for whole in evaluation_batches(table, capacity, pad_id, objective.together, deal, few_shapes):
        batch = part_of(objective.complete(whole, table), deal.part)
        if step is not None:
            sums = step.sums(batch)
        else:
            with autocast():
                sums = objective.sums(model, batch.to(device))
        total += sums.loss.double()
        if sums.rows_N is not None:
            rows.append((list(batch.documents), loss_borders(batch), sums.rows_N))
        watched += 0.0 if sums.watched is None else sums.watched.double()
        counts += objective.count(batch)
        tokens += batch.loss_tokens
        seen += len(batch.documents)
        if progress:
            progress("evaluating", seen, len(table))
    model.train(was_training)
    found = world.total(*total.tolist(), *counts.tolist(), tokens, *watched.tolist())
    loss = sum(found[i] / found[objective.terms + i] for i in range(objective.terms))
    figures = objective.figures(found[2 * objective.terms + 1 :])
    losses_R = _losses(table, rows, world) if objective.has_rows else None
    error = None if losses_R is None else mean_error(losses_R, table.loss_counts)
    return Evaluation(loss, int(found[2 * objective.terms]), figures, losses_R=losses_R, error=error)


def _losses(table: TokenRows, batches: Sequence[tuple[list[int], Counts, torch.Tensor]], world: World) -> Floats:
    """Summed loss of each row, the same on all ranks."""
    losses_R = np.zeros(len(table))
    for documents, borders, rows_N in batches:
        losses_R[documents] = losses_between(borders, rows_N)
    return np.array(world.total(*losses_R.tolist()))


@dataclass(frozen=True)
class QuestionScores:
    """What the answers of an evaluation score by the metric that decides."""

    key: str  # by which the questions are known
    scores_Q: Floats


LOWER_IS_BETTER = ("loss",)  # every metric of answers is better when it is higher


@dataclass(frozen=True)
class Progress:
    """How far the held-out loss, or the metric of eval.best, has come: saved in checkpoints, so that patience survives a
    resume."""

    metric: str = "loss"
    best: float | None = None
    best_step: int | None = None
    without_gain: int = 0  # evaluations in a row that gained less than min_delta over `reference`
    reference: float | None = None
    answered: tuple[str, str] | None = None  # of a metric of answers, at `reference`: key and score of each question
    decay_from: int | None = None  # of schedule wsd: the step after which the decay began before its time
    why: str = ""  # it did
    seen: list[Seen] = field(default_factory=list)  # evaluations that eval.stop.gain looks at
    expected: tuple[float, float] | None = None  # by its trend: the gain of the rest of the run, and what it will not exceed

    def after(self, value: float, step: int, stop: Stop | None, answers: QuestionScores | None = None) -> Progress:
        """`answers`: of a metric of answers. Then a gain is one that the paired test shows, too."""
        better = replace(self, best=value, best_step=step) if self._beyond(value, self.best, 0.0) else self
        against = None if answers is None else self.against(answers)
        other = answers is not None and against is None  # other questions than before, or the first
        gains = other or self._beyond(value, self.reference, stop.least if stop else 0.0)
        if gains and math.isfinite(value) and (against is None or stop is None or against.chance <= 1 - stop.confidence):
            answered = None if answers is None else (answers.key, as_text(answers.scores_Q))
            return replace(better, reference=value, without_gain=0, answered=answered)
        return replace(better, without_gain=self.without_gain + 1)

    def against(self, answers: QuestionScores) -> Compared | None:
        """These answers beside those of the last evaluation that gained, to the same questions."""
        if self.answered is None or self.answered[0] != answers.key:
            return None
        return compared(of_text(as_text(answers.scores_Q)), of_text(self.answered[1]))

    def _beyond(self, value: float, before: float | None, by: float) -> bool:
        if before is None:
            return math.isfinite(value)
        return value < before - by if self.metric in LOWER_IS_BETTER else value > before + by

    def verdict(self, stop: Stop | None) -> str:
        """Why the run should end, or nothing."""
        if stop is not None and stop.gain is not None and self.expected is not None and self.expected[1] < stop.gain:
            gain, most = self.expected
            return (
                f"held-out loss is expected to fall by {gain:.4f} in the rest of the run, and with a probability of "
                f"{stop.confidence:g} by less than {most:.4f}"
            )
        if stop is None or self.without_gain < stop.evaluations:
            return ""
        evaluations = counted(self.without_gain, "evaluation")
        by = ""
        if self.answered is not None:
            if (questions := len(of_text(self.answered[1]))) < FEWEST_QUESTIONS:
                return ""
            by = f" (or by chance, in a paired test of {questions:,} questions at a confidence of {stop.confidence:g})"
        best = "" if self.best is None else f"; best {self.best:.4f} at step {self.best_step}"
        return f"held-out {self.metric} improved by less than {stop.least}{by} in {evaluations} in a row{best}"

    def by(self, metric: str) -> Progress:
        """Itself, or from the beginning where another metric decides now."""
        return self if metric == self.metric else Progress(metric, decay_from=self.decay_from, why=self.why)

    def compared(
        self, losses_R: Floats, counts_R: Counts, tokens: int, end: float, stop: Stop
    ) -> tuple[Progress, dict[str, float]]:
        """After an evaluation `tokens` into a run whose rate is constant until `end`, and what the log says of it. `counts_R`:
        tokens of each row."""
        latest = Seen.of(tokens, losses_R)
        seen, said = kept(self.seen, latest), {}
        if self.seen:
            change, error = difference(latest.by_row(), self.seen[-1].by_row(), counts_R)
            said = {"change": change, "change_error": error}
        expected = expected_gain(seen, counts_R, end, stop.confidence)
        if expected is not None:
            said |= {"expected_gain": expected[0], "most_gain": expected[1]}
        return replace(self, seen=seen, expected=expected), said

    def as_dict(self) -> dict[str, Any]:
        lists = {name: None if (pair := getattr(self, name)) is None else list(pair) for name in ("expected", "answered")}
        return asdict(self) | {"seen": [list(one) for one in self.seen], **lists}

    @classmethod
    def of(cls, stored: dict[str, Any]) -> Progress:
        """From a checkpoint's JSON."""
        expected, answered = stored.get("expected"), stored.get("answered")
        seen = [Seen(int(tokens), str(losses)) for tokens, losses in stored.get("seen", [])]
        pairs = {
            "expected": expected and (float(expected[0]), float(expected[1])),
            "answered": answered and (str(answered[0]), str(answered[1])),
        }
        return cls(**stored | {"seen": seen, **pairs})
