"""Successive halving: all trials run for a short time, the best third three times as long, and so on; what that costs, and who
goes on. Costs are in runs: 1 is all tokens of one trial.

A trial is judged after a decay of its own, a tenth of its steps, which is thrown away: at the same step, a high rate has a
higher loss than a low one that it will beat once both have decayed. Losses are compared row by row (train/run/paired.py).

R = held-out rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pronghorn.train.run.paired import Counts, Floats, Seen, difference

ETA = 3
DECAY = 0.1  # of a rung's steps
FEWEST_STEPS = 10  # of the first rung: in fewer, whichever rate moves the weights most is best (docs/log/2026-11-19-sweeps.md)
FEWEST_WARM_UPS = 2  # that the first rung is long: rates in their warm-up compare nothing
TINY = 1e-9
SPARE = 0.3  # runs that are left for trials that tie: one more through the second rung
OF_GRID = 0.4  # that a sweep may cost, where no budget is given
MOST_LONGER = 0.9 * ETA  # the second last rung ends before the last


@dataclass(frozen=True)
class Rungs:
    shares: tuple[float, ...]  # of all steps, at which trials are judged; the last is 1
    trials: tuple[int, ...]  # planned to be in each
    look: float  # what an evaluation costs

    @classmethod
    def planned(cls, trials: int, cuts: int, look: float, longer: float = 1.0) -> Rungs:
        """`longer`: by how much all rungs but the last."""
        shares = (*(longer * ETA ** -float(cuts - rung) for rung in range(cuts)), 1.0)
        return cls(shares, tuple(math.ceil(trials / ETA**rung) for rung in range(cuts + 1)), look)

    def step(self, rung: int, steps: int) -> int:
        """Where a run of so many steps is judged."""
        return math.ceil(round(self.shares[rung] * steps, 6))

    def stretch(self, rung: int) -> float:
        """What one trial costs from the rung before to its judgement in this one."""
        last = rung == len(self.shares) - 1
        before = self.shares[rung - 1] if rung else 0.0
        return self.shares[rung] - before + (0.0 if last else DECAY * self.shares[rung]) + self.look

    def cost(self, trials: int, rung: int = 0) -> float:
        """From here to the end, if so many trials enter this rung."""
        entering = [trials, *(min(trials, planned) for planned in self.trials[rung + 1 :])]
        return sum(count * self.stretch(rung + i) for i, count in enumerate(entering))

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Rungs:
        """From sweep.json."""
        return cls(tuple(stored["shares"]), tuple(stored["trials"]), stored["look"])


def most_cuts(trials: int, steps: float, warmup: int) -> int:
    """Cuts that leave one trial; fewer, where the first rung would be too short to compare anything."""
    cuts = math.ceil(round(math.log(trials, ETA), 9)) if trials > 1 else 0
    while cuts and steps * float(ETA) ** -cuts < max(FEWEST_STEPS, FEWEST_WARM_UPS * warmup):
        cuts -= 1
    return cuts


def allowed(trials: int, cuts: int, look: float) -> float:
    """Runs, where no budget is given."""
    return max(OF_GRID * trials, Rungs.planned(trials, cuts, look).cost(trials) + SPARE)


def chosen(trials: int, cuts: range, look: float, runs: float) -> Rungs | None:
    """With the fewest of `cuts` that so many runs allow, and then the longest rungs, which compare best. None: even the
    shortest do not fit."""
    for count in cuts:
        plan, double = (Rungs.planned(trials, count, look, longer) for longer in (1.0, 2.0))
        if (cost := plan.cost(trials)) <= runs + TINY:
            slope = double.cost(trials) - cost
            longer = 1.0 + max(0.0, runs - SPARE - cost) / slope if slope > 0 else 1.0
            return Rungs.planned(trials, count, look, min(longer, MOST_LONGER))
    return None


@dataclass(frozen=True)
class Judgement:
    """What a trial is worth at a rung. `why`: it ended before, with no loss."""

    rung: int
    step: int
    tokens: int  # trained until there, without the decay
    seconds: float  # of the decay and the evaluation
    loss: float = math.inf
    error: float = math.inf  # standard error, over rows
    losses: str = ""  # of each row, as in a checkpoint
    why: str = ""

    @classmethod
    def of(cls, losses_R: Floats, counts_R: Counts, **facts: Any) -> Judgement:
        loss, error = difference(losses_R, np.zeros_like(losses_R), counts_R)
        return cls(loss=loss, error=error, losses=Seen.of(0, losses_R).losses, **facts)

    def by_row(self) -> Floats:
        return Seen(0, self.losses).by_row()


def ends(
    judged: Mapping[int, Judgement],
    counts_R: Counts,
    keep: int,
    name: Callable[[int], str],
    fits: Callable[[int], bool] | None = None,
) -> dict[int, str]:
    """Trials that end at this rung, each with the reason. The best `keep` go on, and those within one paired standard error of
    the last of them; fewer, but one at least, where the budget has no room. `fits`: whether so many may go on; None: all have
    had all steps, and only the best is left."""
    reasons = {number: one.why for number, one in judged.items() if one.why}
    order = sorted((number for number in judged if number not in reasons), key=lambda number: (judged[number].loss, number))
    kept = order[:keep]
    while fits and len(kept) > 1 and not fits(len(kept)):
        kept.pop()
    rest, last = order[len(kept) :], kept[-1] if kept else 0
    for number in rest:
        worse, error = difference(judged[number].by_row(), judged[last].by_row(), counts_R)
        tie = ", a tie" if worse <= error else ""
        if tie and fits and fits(len(kept) + 1):
            kept.append(number)
            continue
        room = "; the budget has no room for it" if fits and (tie or len(kept) < keep) else ""
        reasons[number] = f"loss {worse:.4f} ± {error:.4f} above {name(last)}{tie}{room}"
    return reasons
