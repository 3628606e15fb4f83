"""What a run may still gain: its last evaluations compared row by row, and their trend carried on to the end of the run.

All held-out rows rise and fall together, so a loss of 96 rows has a standard error of 0.025, and the difference of two of the
same rows 0.010. Losses are ratios: summed loss over summed tokens. Rows are drawn anew, never tokens, which depend on each
other. At a constant rate the loss falls about linearly in log(tokens); under a rate that decays it does not, so nothing is
predicted there.

R = held-out rows, E = evaluations.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Counts = npt.NDArray[np.integer]

FEWEST, MOST = 4, 16  # evaluations that a trend is fitted to; they are as old as half of the run so far, if there are enough
DRAWS, SEED = 1000, 3407


class Seen(NamedTuple):
    """An evaluation, as checkpoints keep it: plain JSON."""

    tokens: int  # that were trained before it
    losses: str  # float32, each row's sum

    @classmethod
    def of(cls, tokens: int, losses_R: Floats) -> Seen:
        return cls(tokens, base64.b64encode(losses_R.astype("<f4").tobytes()).decode())

    def by_row(self) -> Floats:
        return np.frombuffer(base64.b64decode(self.losses), "<f4").astype(np.float64)


def kept(seen: Sequence[Seen], latest: Seen) -> list[Seen]:
    """Those that the next trend is fitted to: of too many, every second."""
    recent = [one for one in seen if 2 * one.tokens >= latest.tokens] + [latest]
    if len(recent) < FEWEST:
        recent = [*seen, latest][-FEWEST:]
    return recent if len(recent) <= MOST else recent[::-2][::-1]


def difference(now_R: Floats, before_R: Floats, counts_R: Counts) -> tuple[float, float]:
    """By how much the loss rose, and its standard error."""
    changes_R, tokens, rows = now_R - before_R, counts_R.sum(), len(counts_R)
    mean = changes_R.sum() / tokens
    if rows < 2:
        return float(mean), math.inf
    spread = np.square(changes_R - mean * counts_R).sum() * rows / (rows - 1)
    return float(mean), float(math.sqrt(spread) / tokens)


def mean_error(losses_R: Floats, counts_R: Counts) -> float:
    """The standard error of a loss: how far another draw of such rows may lie."""
    return difference(losses_R, np.zeros(len(counts_R)), counts_R)[1]


def expected_gain(seen: Sequence[Seen], counts_R: Counts, end: float, confidence: float) -> tuple[float, float] | None:
    """By how much the loss will fall until `end` tokens, and what it will not exceed. None: too few evaluations.

    A fitted line is linear in the losses, so each row has a gain of its own, and a draw of rows needs two sums."""
    if len(seen) < FEWEST:
        return None
    x_E = np.log([one.tokens for one in seen])
    centred_E = x_E - x_E.mean()
    factors_E = -centred_E / np.square(centred_E).sum() * (math.log(end) - x_E[-1])
    gains_R = sum(factor * one.by_row() for factor, one in zip(factors_E, seen, strict=True))
    chance = np.random.default_rng(SEED)
    drawn = []
    for _ in range(DRAWS):
        rows = chance.integers(len(counts_R), size=len(counts_R))
        drawn.append(gains_R[rows].sum() / counts_R[rows].sum())
    return float(gains_R.sum() / counts_R.sum()), float(np.quantile(drawn, confidence))
