"""The search for the levels of all layers: the fastest under the budget, and the smallest there is.

A split says how many layers recompute what; for each split some of each kind offload. There are thousands of splits (91,881 for
80 layers) and thousands of offloadings of each, so a bound comes first, for all splits at once: what has no room on the device
must leave, and takes what does not hide behind the compute of its own kind. Splits are then looked at in the order of their
bounds, every offloading of each, until no bound is left below the best that was found. So nothing faster is missed.

Of one split's offloadings, the kind with the most layers takes none or the least that fits, given those of the others: more
would only take more time (merging two stretches of layers saves a copy) and host.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pronghorn.memory.dry_run import forward_bytes, head_bytes, kept_bytes, static_parts, top_bytes, working_bytes
from pronghorn.memory.job import RECOMPUTES, Recompute
from pronghorn.memory.levels import POOL_SLOTS, Counts, Problem, milliseconds_of

KINDS, AROUND = len(RECOMPUTES), RECOMPUTES.index("around_attention")
MANY = 256  # splits looked at together: a hundred cost little more time than one
EQUAL_MS = 1e-6  # steps that differ by less take the same time


class Found(NamedTuple):
    """Layers that stay and layers that offload, for each of RECOMPUTES; and with what else."""

    problem: Problem
    pieces: int
    staying: tuple[int, ...]
    leaving: tuple[int, ...]


def fastest(problem: Problem) -> Found | None:
    """Under the budget; None if nothing is."""
    limit = problem.usable - problem.aside + 1  # peaks below
    grids = _grids(problem)
    splits = splits_of(problem.job.shape.layers)
    if not worth_its_memory(problem):
        splits = splits[splits[:, AROUND] == 0]
    bounds = [grid.bounds(splits, limit) for grid in grids]
    possible = [np.flatnonzero(np.isfinite(bound)) for bound in bounds]
    of_grid = np.concatenate([np.full(len(rows), number) for number, rows in enumerate(possible)])
    rows = np.concatenate(possible)
    bound = np.concatenate([found[where] for found, where in zip(bounds, possible, strict=True)])
    best: tuple[tuple[float, ...], Found] | None = None
    order, begin, some = np.argsort(bound, kind="stable"), 0, 8
    while begin < len(order) and (best is None or bound[order[begin]] <= best[0][0]):
        next_ones = order[begin : begin + some]
        for number in np.unique(of_grid[next_ones]):
            grid = grids[number]
            table = grid.table(splits[rows[next_ones[of_grid[next_ones] == number]]], limit)
            fits = (table.peak < limit) & (table.host <= grid.problem.host_left)
            found = table.first("ms", "host", "peak", where=fits)
            if found and (best is None or found[0] < best[0]):
                best = found[0], grid.found(*found[1])
        begin, some = begin + some, min(2 * some, MANY)
    return best and best[1]


def smallest(problem: Problem) -> Found:
    """The least peak; of those the fastest. Of at most two kinds of layers: a third adds to what stays or to the work."""
    best: tuple[tuple[float, ...], Found] | None = None
    for grid in _grids(problem):
        table = grid.extremes()
        found = table.first("peak", "ms", "host", where=table.host <= grid.problem.host_left)
        if found and (best is None or found[0] < best[0]):
            best = found[0], grid.found(*found[1])
    assert best is not None  # without any offloading every split is allowed
    return best[1]


def _grids(problem: Problem) -> list[_Grid]:
    return [_Grid(case, pieces) for case in problem.cases() for pieces in problem.pieces]


def worth_its_memory(problem: Problem) -> bool:
    """Whether keeping attention's result alone saves more time a byte than keeping all but gate and up, as it does where
    documents are long: else such layers are not looked at."""

    def time_a_byte(kept: Recompute) -> float:
        saved = problem.costs.recompute["layer"] - problem.costs.recompute[kept]
        return saved / (kept_bytes(problem.job, kept) - kept_bytes(problem.job, "layer"))

    return time_a_byte("around_attention") > time_a_byte("gate_up")


@lru_cache(maxsize=4)
def splits_of(layers: int) -> Counts:
    """All ways to write `layers` as a sum over the kinds: [n, KINDS]"""
    bars = np.array(list(itertools.combinations(range(layers + KINDS - 1), KINDS - 1)), dtype=np.int64)
    edges = np.column_stack([np.full(len(bars), -1), bars, np.full(len(bars), layers + KINDS - 1)])
    return np.diff(edges, axis=1) - 1


@dataclass(frozen=True)
class _Table:
    """Layers that stay and that leave, [n, KINDS] each, and what comes of it."""

    staying: Counts
    leaving: Counts
    peak: Counts
    ms: Counts
    host: Counts
    slot: Counts  # the largest of a layer that offloads

    def first(self, *order: str, where: Counts) -> tuple[tuple[float, ...], tuple[Counts, Counts]] | None:
        """The row that is least by these columns: (their values, its counts)."""
        rows = np.flatnonzero(where)
        if not len(rows):
            return None
        columns = [getattr(self, name)[rows] for name in order]
        at = rows[np.lexsort(columns[::-1])[0]]
        return tuple(float(getattr(self, name)[at]) for name in order), (self.staying[at], self.leaving[at])


class _Grid:
    """What levels.evaluate computes, for many counts at once."""

    def __init__(self, problem: Problem, pieces: int) -> None:
        job, self.problem, self.pieces = problem.job, problem, pieces
        self.layers, costs = job.shape.layers, problem.costs
        self.kept = np.array([kept_bytes(job, r) for r in RECOMPUTES], dtype=np.float64)
        self.working = np.array([working_bytes(job, r, pieces) for r in RECOMPUTES], dtype=np.float64)
        self.slots = np.array([problem.slot(r) for r in RECOMPUTES], dtype=np.float64)
        self.forward = np.array([forward_bytes(job, r, pieces) for r in RECOMPUTES], dtype=np.float64)
        self.top = np.array([top_bytes(job, r, pieces) for r in RECOMPUTES], dtype=np.float64)
        self.static, self.head = sum(static_parts(job).values()), head_bytes(job, pieces)
        self.pieces_ms = np.array([(pieces - 1) * costs.piece if r != "nothing" else 0.0 for r in RECOMPUTES])
        self.back_ms = np.array([costs.backward + costs.recompute[r] for r in RECOMPUTES])

    def found(self, staying: Counts, leaving: Counts) -> Found:
        return Found(self.problem, self.pieces, tuple(map(int, staying)), tuple(map(int, leaving)))

    def bounds(self, splits: Counts, limit: float) -> Counts:
        """No offloading of a split takes less time; infinite where none fits. A hair less than that, since the sums are done
        in another order than in `table`."""
        costs, present = self.problem.costs, splits > 0
        kept = splits @ self.kept
        at_least = np.where(present, self.working, 0).max(axis=1)  # of the lowest layer of the kind that needs most
        end = np.maximum((self.working + self.top)[_uppermost(splits)], self.head)
        end = np.maximum(end, np.where(present, self.forward, 0).max(axis=1))
        below = np.where(present, np.cumsum(splits * self.kept, axis=1) + self.working, 0).max(axis=1)
        stays = self.static + np.maximum(below, kept + end) < limit
        pool = POOL_SLOTS * np.where(present, self.slots, np.inf).min(axis=1)
        room = limit - self.static - pool - end
        leaves = np.where(stays, 0.0, np.maximum(kept - room, 0.0))
        possible = stays | ((room > 0) & (self.static + pool + at_least < limit) & (leaves <= self.problem.host_left))
        # Bytes that leave while their own kind computes, and that come back so.
        hidden = splits @ np.minimum(self.slots, costs.forward * costs.to_host)
        forward = self.layers * costs.forward + np.maximum(leaves - hidden, 0.0) / costs.to_host
        hidden = splits @ np.minimum(self.slots, self.back_ms * costs.from_host)
        back = splits @ self.back_ms + np.maximum(leaves - hidden, 0.0) / costs.from_host
        return np.where(possible, self.problem.rest_ms + forward + back + splits @ self.pieces_ms - EQUAL_MS, np.inf)

    def table(self, splits: Counts, limit: float) -> _Table:
        """The offloadings of some splits that are worth trying."""
        if not self.problem.host_left:
            return self._evaluated(splits, np.zeros_like(splits))
        most = np.argmax(splits, axis=1)
        of_each = [_of_the_others(tuple(map(int, split)), int(kind)) for split, kind in zip(splits, most, strict=True)]
        none, lengths = np.concatenate(of_each), [len(rows) for rows in of_each]
        few = none @ self.slots <= self.problem.host_left
        layers, most, none = np.repeat(splits, lengths, axis=0)[few], np.repeat(most, lengths)[few], none[few]
        before = self._evaluated(layers, none)
        more_pool = POOL_SLOTS * (np.maximum(before.slot, self.slots[most]) - before.slot)
        least = np.ceil((before.peak + more_pool - limit) / self.kept[most])
        some, each = none.copy(), np.arange(len(none))
        some[each, most] = least.clip(1, layers[each, most])
        return self._evaluated(np.concatenate([layers, layers]), np.concatenate([none, some]))

    def extremes(self) -> _Table:
        """Layers of one kind or two. Of a kind none offload, all but one, which then need not wait for its copy at the top, or
        all; as far as the host has room, for either kind first."""
        one = np.arange(self.layers + 1)
        rows = []
        for pair in itertools.permutations(range(KINDS), 2):
            split = np.zeros((len(one), KINDS), dtype=np.int64)
            split[:, pair[0]], split[:, pair[1]] = one, self.layers - one
            for stay in itertools.product((self.layers, 1, 0), repeat=2) if self.problem.host_left else [(self.layers,) * 2]:
                leaving, room = np.zeros_like(split), np.full(len(one), float(self.problem.host_left))
                for kind, staying in zip(pair, stay, strict=True):
                    leaving[:, kind] = np.minimum(np.maximum(split[:, kind] - staying, 0), room // self.slots[kind])
                    room -= leaving[:, kind] * self.slots[kind]
                rows.append((split, leaving))
        return self._evaluated(np.concatenate([split for split, _ in rows]), np.concatenate([leaving for _, leaving in rows]))

    def _evaluated(self, layers: Counts, leaving: Counts) -> _Table:
        """`layers` by kind, and how many of them leave."""
        staying = layers - leaving
        below = np.cumsum(staying * self.kept, axis=1)  # kept by the layers up to the last of each kind
        largest = np.where(layers > 0, below + self.working, 0).max(axis=1)
        slot = np.where(leaving > 0, self.slots, 0).max(axis=1)
        top = _uppermost(layers)
        own = np.where(staying[np.arange(len(staying)), top] == 0, self.slots[top], 0)
        last = np.maximum((self.working + self.top)[top], self.head)
        last = below[:, -1] + np.maximum(last, own + np.where(layers > 0, self.forward, 0).max(axis=1))
        peak = self.static + POOL_SLOTS * slot + np.maximum(largest, last)
        ms = self.problem.rest_ms + layers @ self.pieces_ms
        for kind, recompute in enumerate(RECOMPUTES):
            ms = ms + milliseconds_of(self.problem.costs, recompute, self.slots[kind], layers[:, kind], leaving[:, kind])
        ms = np.round(ms / EQUAL_MS) * EQUAL_MS  # copies that hide change the last bit of a sum, and must not win by it
        return _Table(staying, leaving, peak, ms, leaving @ self.slots, slot)


@lru_cache(maxsize=4096)
def _of_the_others(split: tuple[int, ...], most: int) -> Counts:
    """Every number of each kind that can leave, and none of the kind with the most layers."""
    choices = [np.arange(1 if kind == most else n + 1) for kind, n in enumerate(split)]
    return np.stack([axis.ravel() for axis in np.meshgrid(*choices, indexing="ij")], axis=1)


def _uppermost(layers: Counts) -> Counts:
    """Of the kinds that are there, the one that stands at the top."""
    above: Counts = np.argmax(layers[:, ::-1] > 0, axis=1)
    return KINDS - 1 - above
