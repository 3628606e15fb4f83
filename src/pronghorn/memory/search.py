"""The search for the choices of all layers: the fastest under the budget, and the smallest there is.

Layers of a kind are alike, so a plan is a number of layers for each kind and choice: [kinds, choices]. A move gives some layers
of a kind (1, 2, 4, ...) another choice. From everything kept, the moves that cost the fewest milliseconds for each byte of the
peak are made until the plan fits; from there, moves and pairs of moves, one that frees memory and one that uses it, are made as
long as the step gets faster. Every plan is judged by its exact peak and milliseconds (levels.py).

What moves alone do not find is tried as a case of its own: pieces, embeddings, and which levels may be used and offloaded,
since the pool is as large as the largest layer that offloads. Tests compare with all choices of small models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np

from pronghorn.memory.job import LEVELS
from pronghorn.memory.levels import Choice, Numbers, Outcomes, Problem, Tables

CHOSEN = tuple(Choice(level, offload) for level in LEVELS for offload in (False, True))  # columns of a plan's numbers
BEST, FEW = 10, (1, 2, 3, 4, 5, 6, 8)  # moves of each sort that are tried in pairs, and layers of each
EACH = 2  # rough plans for each largest level that is offloaded
LIKELY, THOROUGH = 20, 6  # plans, the fastest, that are improved by moves, and by pairs of them,
MANY = 360  # unless there are more moves than this: then as many times fewer. 32 layers of a kind have 336


class SearchResult(NamedTuple):
    problem: Problem
    pieces: int
    choices: tuple[Choice, ...]


def fastest(problem: Problem) -> SearchResult | None:
    """Under the budget; None if nothing is."""
    limit = problem.usable - problem.aside
    tried = [(case, plan) for case in _cases(problem) for plan in case.likely(limit)]
    if not tried:
        case, plan = _smallest(problem)
        tried = [(case, plan)] if case.fits(plan, limit) else []
    for most, pairs in ((LIKELY, False), (THOROUGH, True)):
        some = -(-most // (1 + len(tried and tried[0][0].moves) // MANY))
        tried = [(case, case.improved(plan, limit, pairs=pairs)) for case, plan in _first(tried)[:some]]
    return next((case.found(plan) for case, plan in _first(tried)), None)


def smallest(problem: Problem) -> SearchResult:
    """The least peak; of those the fastest."""
    case, plan = _smallest(problem)
    return case.found(plan)


def _first(tried: Sequence[tuple[_Case, Numbers]]) -> list[tuple[_Case, Numbers]]:
    """The fastest first."""
    return [tried[number] for _, number in sorted((case.key(plan), number) for number, (case, plan) in enumerate(tried))]


def _smallest(problem: Problem) -> tuple[_Case, Numbers]:
    found = [(case, case.smallest()) for case in _cases(problem)]
    keys = [case.key(plan) for case, plan in found]
    return found[min(range(len(found)), key=lambda i: (keys[i][2], keys[i][0], keys[i][1]))]


def _cases(problem: Problem) -> list[_Case]:
    return [_Case(Tables(case, pieces)) for case in problem.cases() for pieces in problem.pieces]


class _Case:
    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.sizes = np.bincount(tables.kinds)  # layers of each kind
        self.host = tables.problem.host_left
        self.allowed = tuple(i for i, choice in enumerate(CHOSEN) if self.host or not choice.offload)
        self.moves = _moves(tuple(map(int, self.sizes)), self.allowed)

    def uniform(self, choice: Choice) -> Numbers:
        plan = np.zeros((len(self.sizes), len(CHOSEN)), dtype=np.int64)
        plan[:, CHOSEN.index(choice)] = self.sizes
        return plan

    def layers(self, plans: Numbers) -> tuple[Numbers, Numbers]:
        """Levels and offloading of each layer. Of a kind, the largest working set is at the bottom; layers that offload are
        spread evenly among those of their level, the first of them first: the last layer, which backward needs at once, is the
        last to be chosen."""
        levels = np.zeros((len(plans), len(self.tables.kinds)), dtype=np.int64)
        leaves = np.zeros(levels.shape, dtype=bool)
        for kind, size in enumerate(self.sizes):
            of_level = plans[:, kind].reshape(len(plans), len(LEVELS), 2)
            counts = of_level.sum(axis=2)
            ends, number = np.cumsum(counts, axis=1), np.arange(size)
            level = (number[None, :, None] >= ends[:, None, :]).sum(axis=2)
            inside = number - np.take_along_axis(ends - counts, level, axis=1)
            leaving, count = (np.take_along_axis(x, level, axis=1) for x in (of_level[:, :, 1], counts))
            at = self.tables.kinds == kind
            levels[:, at], leaves[:, at] = level, (-inside * leaving) % count < leaving
        return levels, leaves

    def outcomes(self, plans: Numbers) -> Outcomes:
        return self.tables.outcomes(*self.layers(plans))

    def found(self, plan: Numbers) -> SearchResult:
        levels, leaves = self.layers(plan[None])
        choices = tuple(Choice(LEVELS[level], bool(leaf)) for level, leaf in zip(levels[0], leaves[0], strict=True))
        return SearchResult(self.tables.problem, self.tables.pieces, choices)

    def key(self, plan: Numbers) -> tuple[float, float, float]:
        found = self.outcomes(plan[None])
        return float(found.ms[0]), float(found.host[0]), float(found.peak[0])

    def fits(self, plan: Numbers, limit: float) -> bool:
        _, host, peak = self.key(plan)
        return peak <= limit and host <= self.host

    def likely(self, limit: float) -> list[Numbers]:
        """The fastest of the rough plans that fit, for each largest level that is offloaded."""
        plans = _rough(tuple(map(int, self.sizes)), self.allowed)
        found = self.outcomes(plans)
        order = np.lexsort([found.peak, found.host, found.ms])
        order = order[((found.peak <= limit) & (found.host <= self.host))[order]]
        largest = (plans[:, :, 1::2].sum(axis=1) > 0) @ (1 << np.arange(len(LEVELS)))
        largest = np.array([int(bits).bit_length() for bits in largest])
        return [plans[i] for level in range(len(LEVELS) + 1) for i in order[largest[order] == level][:EACH]]

    def smallest(self) -> Numbers:
        """The least peak."""

        def order(found: Outcomes) -> list[Numbers]:
            return [found.peak, found.ms, found.host]

        starts = [plan for choice in CHOSEN if self.key(plan := self.uniform(choice))[1] <= self.host]
        ends = np.array([self._descended(start, order) for start in starts])
        best: Numbers = ends[np.lexsort(order(self.outcomes(ends))[::-1])[0]]
        return best

    def improved(self, plan: Numbers, limit: float, *, pairs: bool) -> Numbers:
        """As fast as moves, and pairs of them, can make it within `limit`."""

        def order(found: Outcomes) -> list[Numbers]:
            return [np.maximum(found.peak, limit), found.ms, found.host, found.peak]

        return self._descended(plan, order, pairs=pairs)

    def _descended(self, plan: Numbers, order: Callable[[Outcomes], list[Numbers]], *, pairs: bool = False) -> Numbers:
        """The best of all moves, made as long as one is better in this order; then of pairs of them."""
        while True:
            plans = np.concatenate([plan[None], plan + self.moves])
            plans = plans[(plans >= 0).all(axis=(1, 2))]
            better = self._best(plans, self.outcomes(plans), order)
            if better is None and pairs:
                plans = np.concatenate([plan[None], self._pairs(plan)])
                better = self._best(plans, self.outcomes(plans), order)
            if better is None:
                return plan
            plan = better

    def _best(self, plans: Numbers, found: Outcomes, order: Callable[[Outcomes], list[Numbers]]) -> Numbers | None:
        """None: it is the first one."""
        allowed = np.flatnonzero(found.host <= self.host)
        columns = [column[allowed] for column in order(found)]
        first = np.lexsort(columns[::-1])[0]
        if all(column[first] == column[0] for column in columns):
            return None
        best: Numbers = plans[allowed[first]]
        return best

    def _pairs(self, plan: Numbers) -> Numbers:
        """Two moves away: some that make it faster, and some that free memory of the device or of the host, a few layers of
        each. Those come first that save the most milliseconds for a byte, or that cost the fewest."""
        moves = self.moves[np.abs(self.moves).max(axis=(1, 2)) == 1]
        moves = moves[(plan + moves >= 0).all(axis=(1, 2))]
        ms, peak, host = (column[1:] - column[0] for column in self.outcomes(np.concatenate([plan[None], plan + moves]))[:3])
        gains, frees = np.flatnonzero(ms < 0), np.flatnonzero((peak < 0) | (host < 0))
        gains = gains[np.argsort(ms[gains] / np.maximum(peak[gains], 1.0), kind="stable")[:BEST]]
        frees = frees[np.argsort(ms[frees] / np.maximum(-peak[frees], 1.0), kind="stable")[:BEST]]
        some = np.array(FEW)[:, None, None, None]
        gained, freed = ((some * moves[which]).reshape(-1, *plan.shape) for which in (gains, frees))
        both = (plan + gained[:, None] + freed[None]).reshape(-1, *plan.shape)
        found: Numbers = both[(both >= 0).all(axis=(1, 2))]
        return found


@lru_cache(maxsize=16)
def _rough(sizes: tuple[int, ...], allowed: tuple[int, ...]) -> Numbers:
    """Plans of at most three choices, in eighths of each kind's layers, or sixteenths: [n, kinds, choices]."""
    all_of_it = 16 if sum(sizes) <= 20 else 8
    shares = [(a, b, all_of_it - a - b) for a in range(all_of_it + 1) for b in range(all_of_it + 1 - a)]
    plans = np.zeros((len(shares), len(list(combinations(allowed, 3))), len(sizes), len(CHOSEN)), dtype=np.int64)
    for i, chosen in enumerate(combinations(allowed, 3)):
        for j, parts in enumerate(shares):
            ends = np.cumsum([0, *parts])[:, None] * np.array(sizes) // all_of_it
            plans[j, i][:, chosen] = np.diff(ends, axis=0).T
    found: Numbers = np.unique(plans.reshape(-1, len(sizes), len(CHOSEN)), axis=0)
    return found


@lru_cache(maxsize=64)
def _moves(sizes: tuple[int, ...], allowed: tuple[int, ...]) -> Numbers:
    """[n, kinds, choices]: some layers of a kind leave a choice for another one."""
    moves = []
    for kind, size in enumerate(sizes):
        for count, a, b in ((2**power, a, b) for power in range(size.bit_length()) for a in allowed for b in allowed if a != b):
            move = np.zeros((len(sizes), len(CHOSEN)), dtype=np.int64)
            move[kind, a], move[kind, b] = -count, count
            moves.append(move)
    return np.array(moves)
