"""What a run may still gain: its last evaluations compared row by row, and their trend carried on to the end of the run.

All held-out rows rise and fall together, so a loss of 96 rows has a standard error of 0.025, and the difference of two of the
same rows 0.010. Losses are ratios: summed loss over summed tokens. Rows are drawn anew, never tokens, which depend on each
other. At a constant rate the loss falls about linearly in log(tokens); under a rate that decays it does not, so nothing is
predicted there.

Metrics of answers are compared question by question, too: questions that one of two evaluations answers better are as likely
the one's as the other's, where nothing changed (a sign test; McNemar's, exact, for a metric that is 0 or 1).

R = held-out rows, E = evaluations, Q = questions.
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
FEWEST_QUESTIONS = 200  # by which answers may stop a run: of 100, 10 more right ones than before may be chance one time in 40


class Seen(NamedTuple):
    """An evaluation, as checkpoints keep it: plain JSON."""

    tokens: int  # that were trained before it
    losses: str  # float32, each row's sum

    @classmethod
    def of(cls, tokens: int, losses_R: Floats) -> Seen:
        return cls(tokens, as_text(losses_R))

    def by_row(self) -> Floats:
        return of_text(self.losses)


def as_text(values: Floats) -> str:
    """Numbers for a checkpoint's JSON, in float32."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def of_text(text: str) -> Floats:
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float64)


class Compared(NamedTuple):
    """An evaluation's answers beside those of another, question by question."""

    better: int
    worse: int
    chance: float  # that so many are better, or more, where nothing changed


def compared(now_Q: Floats, before_Q: Floats) -> Compared:
    """A higher score is better; questions of equal scores, or without one, say nothing."""
    better, worse = int((now_Q > before_Q).sum()), int((now_Q < before_Q).sum())
    ways = total = math.comb(better + worse, better)
    for right in range(better, better + worse):
        ways = ways * (better + worse - right) // (right + 1)
        total += ways
    return Compared(better, worse, total / 2 ** (better + worse))


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
