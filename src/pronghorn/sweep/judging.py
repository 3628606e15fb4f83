"""What a trial is worth where it stands, and when it has failed.

Both decay and speed are found with steps on the weights in memory, which no checkpoint ever has: whatever trains next starts
from a checkpoint of its own (train/setup/kept.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pronghorn.report.display import STOPPING
from pronghorn.report.run_log import as_number, history, read_log
from pronghorn.report.stages import Stages
from pronghorn.sweep.halving import DECAY, Judgement
from pronghorn.train.run.answers import measure
from pronghorn.train.run.steps import Display, Pause
from pronghorn.train.setup.setup import Session
from pronghorn.train.step.optim import lr_scale, set_lr

FEWEST_DECAYED = 2  # steps
TIMED = 3  # steps; the first one compiles and captures
RECENT, FIRST = 4, 4  # steps whose median loss is looked at
FAR, FAR_FACTOR = 1.0, 1.5  # above the first steps' loss: no batch is so much harder, and nothing is left to wait for


def judged(
    session: Session, rung: int, *, decays: bool, stages: Stages, progress: Callable[[str, int, int], None]
) -> Judgement:
    """By held-out rows, after a decay of the rate to zero from what it is here, as 1 - sqrt."""
    began, step, tokens = time.perf_counter(), session.step, session.seen_tokens
    steps = max(FEWEST_DECAYED, math.ceil(round(DECAY * step, 6))) if decays else 0
    train, total = session.recipe.train, session.source.total
    here = lr_scale(step, total, train, session.progress.decay_from) if steps else 0.0
    for number in range(steps):
        loss, norm = _step(session, here * (1 - math.sqrt((number + 1) / (steps + 1))), stages)
        if not math.isfinite(loss + norm):
            why = f"diverged in the decay from step {step} on: its loss or gradient is not finite"
            return Judgement(rung, step, tokens, time.perf_counter() - began, why=why)
    with stages("evaluate"):
        found = measure(session, progress)
    seconds = time.perf_counter() - began
    if not math.isfinite(found.loss):
        return Judgement(rung, step, tokens, seconds, why=f"diverged before step {step}: its held-out loss is not finite")
    assert found.losses_R is not None
    assert session.source.held_out is not None
    return Judgement.of(
        found.losses_R, session.source.held_out.loss_counts, rung=rung, step=step, tokens=tokens, seconds=seconds
    )


def seconds_of_a_step(session: Session, stages: Stages) -> float:
    """Measured here; what these steps learn is thrown away."""
    times = []
    for _ in range(TIMED):
        began = time.perf_counter()
        _step(session, 0.0, stages)
        times.append(time.perf_counter() - began)
    return min(times)


def _step(session: Session, scale: float, stages: Stages) -> tuple[float, float]:
    """(loss, gradient norm)"""
    set_lr(session.optimizer, scale)
    session.take_step.loss_limit = math.inf
    session.take_step.begin(session.source.next(session.model), stages)
    result = session.take_step.finish(stages)
    return result.loss, 0.0 if result.skipped else result.grad_norm


def far_off(losses: Sequence[float]) -> str:
    """Why a run with these losses, one a step, has diverged; or nothing."""
    if len(losses) < FIRST + RECENT:
        return ""
    first, now = median(losses[:FIRST]), median(losses[-RECENT:])
    if now <= max(first + FAR, first * FAR_FACTOR):
        return ""
    return f"diverged at step {len(losses)}: the loss rose to {now:.4g}, from {first:.4g} in the first steps"


class Watch:
    """The display of a trial: it shows the sweep's progress in place of the run's, and ends a run that has diverged."""

    def __init__(self, shown: Display, folder: Path, pause: Pause, label: str, before: int, total: int) -> None:
        """`before`: tokens that the sweep has trained by now, of `total`."""
        self._shown, self._folder, self._pause, self._label = shown, folder, pause, label
        self._done, self._total = before, total
        self._losses: list[float] = []

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == STOPPING:
            self._shown.handle(event)
        elif event["event"] == "start":
            self._losses = [as_number(one["loss"]) for one in history(read_log(self._folder)) if one["event"] == "step"]
            self._look()
        elif event["event"] == "step":
            self._done += event["tokens"]
            self._losses.append(as_number(event["loss"]))
            self.progress(self._label, min(self._done, self._total - 1), self._total)
            self._look()

    def progress(self, label: str, done: int, total: int) -> None:
        self._shown.progress(label, done, total)

    def _look(self) -> None:
        self._pause.why = self._pause.why or far_off(self._losses)
