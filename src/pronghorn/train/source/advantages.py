"""How much better than the others to its prompt an answer is, in float64, as TRL computes it.

    group, batch, none    r - mean of its group, divided by the standard deviation of the group, of all answers, or by nothing
    rloo                  r - mean of the others of its group

A standard deviation is that of a sample (n - 1), and SMALL is added to it. Answers that have no reward are not there. A group
whose answers have one reward has no signal: its advantages are 0, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

SMALL = 1e-4
Floats = npt.NDArray[np.float64]


def advantages(
    groups: Sequence[Sequence[float]], scale: str, total: Callable[..., Sequence[float]] = lambda *numbers: numbers
) -> list[Floats]:
    """`scale`: group, batch, none or rloo. `total`: sums over ranks, each with groups of its own."""
    rewards = [np.array(group, np.float64) for group in groups]
    flat = np.concatenate([np.zeros(0), *rewards])
    spread = 1.0
    if scale == "batch":
        count, added = total(float(len(flat)), math.fsum(flat))
        mean = added / max(1.0, count)
        (squares,) = total(math.fsum((flat - mean) ** 2))
        spread = math.sqrt(squares / max(1.0, count - 1)) + SMALL
    return [_of_group(group, scale, spread) for group in rewards]


def _of_group(group: Floats, scale: str, spread: float) -> Floats:
    if not has_signal(group):
        return np.zeros(len(group))
    above: Floats = group - group.mean()
    if scale == "rloo":
        return above * (len(group) / (len(group) - 1))
    return above / (float(group.std(ddof=1)) + SMALL if scale == "group" else spread)


def has_signal(group: Sequence[float] | Floats) -> bool:
    return len(group) > 1 and any(one != group[0] for one in group)
