"""Losses that stand out, and what the recipe does about them (`health.spike`): warn, skip, or rewind.

A step's loss is a spike if it is above the limit that the last 64 losses set (16 at least):

    limit = max(2 m, m + 0.5, m * exp(6 * 1.4826 * MAD))     m: their median, MAD: the median distance of their logarithms to it

Medians, because a spike must not hide the next one: one loss of 12.6 among 63 of 0.3 lifts mean and deviation to 0.49 and 1.53,
and six deviations to 9.7; the median stays at 0.3 and the limit at 0.8. Logarithms, because losses vary by a share of
themselves; 1.4826 MAD are one standard deviation of normal noise, which passes six of them once in 10^9 steps. Where noise is
small, twice the median and half a nat more are still no spike: that happens with a few hard rows, and does no harm.

    warn    the update is made, and the run says so
    skip    the update is left out, and the run goes on; it gives up after 10 in a row, which is no spike but a new level
    rewind  the run goes back to its last checkpoint and leaves the step's rows out; it gives up after 3 for one checkpoint

The limit of step n looks at losses up to step n - 2. A GPU is one step ahead of what the host has read, so that is what is
known there when the step begins, and the device itself refuses the update (graphed_step.py); a CPU follows the same rule, and
so does a resumed run: the losses are part of the checkpoint.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from pronghorn.data.pack.loader import State
from pronghorn.errors import HealthStop
from pronghorn.report.run_log import FILE_NAME, read_log
from pronghorn.train.step.health import lower_lr

Policy = Literal["warn", "skip", "rewind"]
WINDOW, LEAST = 64, 16
DEVIATIONS = 6 * 1.4826  # of the logarithms, in MAD
RATIO, RISE = 2.0, 0.5
LAG = 2  # steps between a loss and the first limit that knows it
SMALLEST_LOSS = 1e-12  # has a logarithm
MOST_IN_A_ROW, MOST_REWINDS = 10, 3


class GaveUp(HealthStop):
    """A policy that did not help. What is in memory is nothing to go on from; the last checkpoint is."""


class Rewind(Exception):
    """Raised to set up the run again from its last checkpoint."""


def losses_of(values: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, loss) pairs of a checkpoint."""
    return [(int(step), float(loss)) for step, loss in values["losses"]]


class Spikes:
    def __init__(self, policy: Policy = "warn", losses: Iterable[tuple[int, float]] = ()) -> None:
        """`losses`: (step, loss), as a checkpoint has them."""
        self.policy = policy
        self._losses = deque(losses, maxlen=WINDOW + LAG)
        self._in_a_row = 0

    @property
    def losses(self) -> list[list[float]]:
        """For the checkpoint."""
        return [list(pair) for pair in self._losses]

    def limit(self, step: int) -> float:
        """Rounded to float32, in which the device compares."""
        known = [max(loss, SMALLEST_LOSS) for number, loss in self._losses if number <= step - LAG][-WINDOW:]
        if len(known) < LEAST:
            return math.inf
        logs = [math.log(loss) for loss in known]
        middle = median(logs)
        spread = median(abs(log - middle) for log in logs)
        m = math.exp(middle)
        return float(np.float32(max(RATIO * m, m + RISE, m * math.exp(min(DEVIATIONS * spread, 80.0)))))

    def add(self, step: int, loss: float, limit: float, folder: str) -> bool:
        """Counts a sound step's loss; whether it is a spike. Spikes count, too: a level that stays is no spike for long."""
        self._losses.append((step, loss))
        spiked = loss > limit
        self._in_a_row = self._in_a_row + 1 if spiked else 0
        if self._in_a_row > MOST_IN_A_ROW and self.policy == "skip":
            raise GaveUp(
                what=f"step {step}: the loss stays at {loss:.4g}, above the limit of {limit:.4g}; {MOST_IN_A_ROW} steps were "
                "skipped",
                where=folder,
                why="so many in a row are not a spike: the data or the weights changed",
                fix="inspect the rows named in the log; change health.spike (--allow-change health.spike) or lower train.lr "
                "(--allow-change train.lr)",
            )
        return spiked


@dataclass(frozen=True)
class LeftOut:
    """What earlier rewinds of this run decided, out of its log: the same after a kill, whatever checkpoint comes next."""

    steps: tuple[State, ...]  # where the source stands after each step that is left out
    rewinds: tuple[int, ...]  # the steps of the checkpoints that they went back to

    @classmethod
    def of(cls, run: Path) -> LeftOut:
        events: list[dict[str, Any]] = read_log(run) if (run / FILE_NAME).exists() else []
        found = [event for event in events if event["event"] == "rewind"]
        return cls(tuple(event["after"] for event in found), tuple(event["to"] for event in found))

    def require_one_more(self, to: int, step: int, loss: float, folder: str) -> None:
        if self.rewinds.count(to) >= MOST_REWINDS:
            where = f"checkpoint-{to}" if to else "the start"
            raise GaveUp(
                what=f"step {step}: the loss spiked to {loss:.4g} again after {MOST_REWINDS} rewinds to {where}",
                where=folder,
                why="skipping rows does not help, so the rows are not the cause",
                fix=f"{lower_lr()}; or inspect the rows named in the log",
            )
