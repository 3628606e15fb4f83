"""The planner: which layers keep everything, which compute what again, and whose tensors wait in host memory.

A level is what backward computes again (nothing; gate and up; the whole layer from its input), and whether what is kept leaves
for pinned host memory in between. Layers are alike, so a plan is a count for each level. All counts are tried, which is exact:

- Memory. Going down in backward, a layer's tensors are given back before the next one works. So the layers with the largest
  working set stand at the bottom (recomputing layers, first in forward) and those that keep everything at the top. No other
  order has a smaller peak: exchanging two neighbours shows it, and a test tries all orders.
- Pieces. Where gate and up are computed again, the MLP's rows can be done in several turns, the same number in all layers.
- Embeddings. Frozen ones that no head shares can wait in host memory; the GPU reads the few rows it needs over the link.
- Time. Layers that offload are spread evenly among those that recompute the same, and one copy may run while the layers up to
  the next one that offloads compute: that stretch takes max(copy, compute), forward and backward.

Under the budget the shortest step wins; among equals the one that uses less of the host, then of the device.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pronghorn.errors import EnvironmentFault, RecipeError
from pronghorn.memory.costs import LayerCosts
from pronghorn.memory.sizes import (
    RECOMPUTES,
    Job,
    Recompute,
    device_bytes,
    host_moments,
    kept_bytes,
    peak_within,
    static_parts,
)
from pronghorn.memory.working import forward_bytes, head_bytes, top_bytes, working_bytes

POOL_SLOTS = 3  # layers' worth of device memory that offloading takes: two buffers for the way back, one layer on its way out
SLOT_PADDING = 16 * 256  # bytes: what aligning a layer's tensors costs at most; one with experts has twice as many
EQUAL_MS = 1e-6  # steps that differ by less take the same time
NOTCH = 0.94  # after an allocation failed, the next plan uses no more than this of what the failed one expected
UNITS = {"GB": 10**9, "MB": 10**6, "GiB": 2**30, "MiB": 2**20}
SHARE_OF_FREE = 0.97  # `auto`
SHARE_OF_HOST = 0.6  # of the host's free memory may be pinned: the system and the loader live on the rest,
LEFT_TO_HOST = 24 * 10**9  # of which, on a large machine, they need no more than this


@dataclass(frozen=True)
class Level:
    recompute: Recompute
    offload: bool = False

    @property
    def name(self) -> str:
        return {"nothing": "keep", "gate_up": "gate/up again", "layer": "all again"}[self.recompute] + (
            ", offloaded" if self.offload else "")

    def __str__(self) -> str:
        return self.name


LEVELS = tuple(Level(recompute, offload) for recompute in reversed(RECOMPUTES) for offload in (False, True))
KEEP = Level("nothing")


@dataclass(frozen=True)
class Problem:
    """All that a plan is made from."""

    job: Job
    costs: LayerCosts
    budget: int  # bytes that tensors may take on the device; what the driver takes and what lies in fragments comes on top
    host: int = 0  # bytes of host memory that may be pinned; 0: nothing is offloaded. The optimizer's come first
    pieces: tuple[int, ...] = (1,)  # turns in which layers can do their MLP
    embeddings: tuple[bool, ...] = (False,)  # whether they may wait on the host, must not, or both: job.host_embeddings
    margin: float = 0.0  # share of the budget for what a prediction does not know: what is measured stays under it
    aside: int = 0  # bytes of the budget that the step leaves free: what works between steps, beside a captured one's memory

    @property
    def usable(self) -> int:
        """What a plan may foretell."""
        return int(self.budget * (1 - self.margin))

    def budget_for(self, needed: int) -> int:
        """The least of which so much is usable."""
        about = int(needed / (1 - self.margin))
        return next(least for least in range(about - 2, about + 3) if replace(self, budget=least).usable >= needed)

    @property
    def host_left(self) -> int:
        """For layers, beside moments and embeddings that are in host memory."""
        return max(0, self.host - host_moments(self.job) - self.host_embeddings)

    @property
    def host_embeddings(self) -> int:
        """Bytes of the embeddings, where they wait on the host."""
        return self.job.host_embeddings * self.job.shape.vocabulary * self.job.shape.width * self.job.element

    def cases(self) -> list[Problem]:
        """One for each place where the embeddings can be; where the host has no room for them, that is not one."""
        cases = [replace(self, job=replace(self.job, host_embeddings=on_host)) for on_host in self.embeddings]
        return [case for case in cases if case.host >= case.host_embeddings] or [self]

    @property
    def rest_ms(self) -> float:
        """Of a micro-batch, outside the layers."""
        rows = self.job.capacity * self.job.shape.width * self.job.element
        return self.costs.rest + (rows / self.costs.from_host if self.job.host_embeddings else 0.0)

    def slot(self, recompute: Recompute) -> int:
        return kept_bytes(self.job, recompute) + SLOT_PADDING * (2 if self.job.shape.mixture else 1)


@dataclass(frozen=True)
class Outcome:
    peak: int  # of the allocator
    ms: float  # of a micro-batch
    host: int
    kept: int  # by layers, at the moment of the peak
    work: int  # at that moment
    moment: str


@dataclass(frozen=True)
class Plan:
    levels: tuple[Level, ...]  # of each layer, the first layer first
    pieces: int
    peak_bytes: int  # of the allocator, predicted
    ms: float  # of a micro-batch, predicted
    host_bytes: int  # pinned
    slot_bytes: int  # of the largest layer that offloads
    reasons: tuple[str, ...]
    problem: Problem = field(repr=False, compare=False)

    @property
    def needed_bytes(self) -> int:
        """What stays under the budget."""
        return self.peak_bytes + self.problem.aside

    @property
    def device_bytes(self) -> int:
        """With what the driver takes and what lies in fragments."""
        return device_bytes(self.needed_bytes)

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Numbers of the layers that offload."""
        return tuple(i for i, level in enumerate(self.levels) if level.offload)

    def counts(self) -> dict[Level, int]:
        found = Counter(self.levels)
        return {level: found[level] for level in LEVELS if found[level]}

    def step_ms(self, micro_batches: int = 1) -> float:
        return micro_batches * self.ms + self.problem.costs.optimizer

    def one_notch_lower(self) -> Plan:
        """The plan to go on with after an allocation failed: the fastest that expects to take clearly less than this one."""
        limit = int(self.needed_bytes * NOTCH)
        stay = (True,) if self.problem.job.host_embeddings else self.problem.embeddings  # what left does not come back
        best, smallest = _search(replace(self.problem, budget=min(limit, self.problem.budget), embeddings=stay))
        if best is None and smallest.peak_bytes >= self.peak_bytes:
            raise EnvironmentFault(
                what=f"out of memory, and no plan takes less than this one ({_gb(self.needed_bytes)})",
                why="every layer keeps as little as it can already", fix=_ways_out(self.problem))
        chosen = best or smallest
        return replace(chosen, reasons=(*chosen.reasons, f"one notch below a plan of {_gb(self.peak_bytes)} that did not fit"))

    def as_dict(self) -> dict[str, Any]:
        return {"levels": [level.name for level in self.levels], "pieces": self.pieces,
                "host_embeddings": self.problem.job.host_embeddings, "peak_bytes": self.peak_bytes,
                "device_bytes": self.device_bytes, "ms": round(self.ms, 3), "host_bytes": self.host_bytes,
                "budget": self.problem.budget, "measured_costs": self.problem.costs.measured, "reasons": list(self.reasons)}


def make_plan(problem: Problem) -> Plan:
    """The shortest step under the budget; an error with the smallest budget that works, if none does."""
    everything = plan_of(problem.cases()[0], (KEEP,) * problem.job.shape.layers, 1)
    if everything.needed_bytes <= problem.usable:
        return everything  # nothing can be faster
    best, smallest = _search(problem)
    if best is None:
        needed = problem.budget_for(smallest.needed_bytes)
        parts = ", ".join(f"{name} {_gb(amount)}" for name, amount in static_parts(smallest.problem.job).items())
        raise RecipeError(
            what=f"memory.budget: {_gb(problem.budget)} is too little; the smallest that works is {_gb_up(needed)}",
            why=f"at all times there are: {parts}; the rest is one layer's work on {problem.job.capacity:,} tokens",
            fix=f"set memory.budget: {_gb_up(needed).replace(' ', '')}, or {_ways_out(problem)}")
    return best


def smallest_budget(problem: Problem) -> int:
    return problem.budget_for(_search(problem)[1].needed_bytes)


def _ways_out(problem: Problem) -> str:
    """Changes that make the same run smaller, with what each needs."""
    job, ways, now = problem.job, [], smallest_budget(problem)
    half = job.capacity // 2
    if half >= 512:
        ways.append(f"train.capacity: {half} ({_gb_up(smallest_budget(replace(problem, job=job.with_capacity(half))))})")
    for optimizer in ("adamw_8bit", "paged_adamw_8bit") if job.method == "full" else ():
        smaller = smallest_budget(replace(problem, job=replace(job, optimizer=optimizer)))
        if smaller < now:
            ways.append(f"train.optimizer: {optimizer} ({_gb_up(smaller)})")
    if job.method in ("lora", "full"):
        smaller = smallest_budget(replace(problem, job=replace(job, method="qlora")))
        if smaller < now:
            ways.append(f"method: qlora ({_gb_up(smaller)})")
    return " or ".join(ways) or "use a smaller model"


# ---- the step's memory and time under given levels ---------------------------------------------------------------------------


def evaluate(problem: Problem, levels: Sequence[Level], pieces: int = 1) -> Outcome:
    """Of any levels in any order; layers that offload count as evenly spread among their kind."""
    job, costs = problem.job, problem.costs
    slots = [problem.slot(level.recompute) for level in levels if level.offload]
    fixed = sum(static_parts(job).values()) + POOL_SLOTS * max(slots, default=0)
    kept, moments = 0, []
    for number, level in enumerate(levels):
        kept += 0 if level.offload else kept_bytes(job, level.recompute)
        moments.append((kept, working_bytes(job, level.recompute, pieces), f"layer {number} backward"))
    more = top_bytes(job, levels[-1].recompute, pieces)
    moments.append((kept, moments[-1][1] + more, "the last layer backward"))
    top = [level for level in levels if level.recompute == _uppermost(levels)]
    own = problem.slot(top[0].recompute) if all(level.offload for level in top) else 0  # the last layer leaves, but not yet
    forward = max(forward_bytes(job, level.recompute, pieces) for level in set(levels))
    moments += [(kept, own + forward, "a layer forward"), (kept, head_bytes(job, pieces), "the head")]
    peak = max(moments, key=lambda moment: moment[0] + moment[1])
    again = sum(level.recompute != "nothing" for level in levels)
    ms = problem.rest_ms + again * (pieces - 1) * costs.piece
    for recompute in RECOMPUTES:
        alike = [level for level in levels if level.recompute == recompute]
        leaving = np.array(sum(level.offload for level in alike))
        ms += float(_ms(costs, recompute, problem.slot(recompute), np.array(len(alike)), leaving))
    return Outcome(fixed + peak[0] + peak[1], ms, sum(slots), *peak)


def _uppermost(levels: Sequence[Level]) -> Recompute:
    """Of the kinds that are there, the one that stands at the top."""
    return max((level.recompute for level in levels), key=RECOMPUTES.index)


Counts = npt.NDArray[Any]


def _ms(costs: LayerCosts, recompute: Recompute, slot: float, count: Counts, leaving: Counts) -> Counts:
    """Of `count` layers that recompute the same, `leaving` of them offloaded: both ways, without the rest of the step."""
    gap, longer = np.divmod(count, np.maximum(leaving, 1))  # `longer` of the stretches have one layer more

    def way(compute: float, copy: float) -> Counts:
        spread = longer * np.maximum((gap + 1) * compute, copy) + (leaving - longer) * np.maximum(gap * compute, copy)
        return np.where(leaving > 0, spread, count * compute)

    return way(costs.forward, slot / costs.to_host) + way(costs.backward + costs.again(recompute), slot / costs.from_host)


# ---- the search --------------------------------------------------------------------------------------------------------------


def _search(problem: Problem) -> tuple[Plan | None, Plan]:
    """(the fastest under the budget, the smallest of all)

    First every split of the layers among what they recompute, with none or all of a kind offloaded: more offloading of a kind
    never takes more memory, so this finds the least that each split needs. Then the splits that can fit, fastest first, with
    every offloading worth trying, until no split that is left could be faster even if all its copies were free."""
    grids = [_Grid(case, pieces) for case in problem.cases() for pieces in problem.pieces]
    limit = problem.usable - problem.aside + 1  # peaks below
    smallest: tuple[tuple[float, ...], _Grid, Counts] | None = None
    open_splits: list[tuple[float, int, Split]] = []
    for number, grid in enumerate(grids):
        splits, table = grid.extremes()
        least = table.peak.reshape(len(splits), -1).min(axis=1)
        open_splits += [(grid.fastest(split), number, split) for split, peak in zip(splits, least, strict=True) if peak < limit]
        found = table.first("peak", "ms", "host", where=table.host <= grid.problem.host_left)
        if found and (smallest is None or found[0] < smallest[0]):
            smallest = (found[0], grid, found[1])
    best: tuple[tuple[float, ...], _Grid, Counts] | None = None
    for lower_bound, number, split in sorted(open_splits):
        if best is not None and lower_bound > best[0][0]:
            break
        grid = grids[number]
        table = grid.table(split, limit)
        found = table.first("ms", "host", "peak", where=(table.peak < limit) & (table.host <= grid.problem.host_left))
        if found and (best is None or found[0] < best[0]):
            best = (found[0], grid, found[1])
    assert smallest is not None  # without any offloading every split is allowed
    return best and best[1].plan(best[2]), smallest[1].plan(smallest[2])


Split = tuple[int, int, int]  # layers by what they recompute, in the order of RECOMPUTES


@dataclass(frozen=True)
class _Table:
    """Offloadings of one split."""

    counts: Counts  # [n, 6]: for each of RECOMPUTES, layers that stay and layers that offload
    peak: Counts
    ms: Counts
    host: Counts
    slot: Counts  # the largest of a layer that offloads

    def first(self, *order: str, where: Counts) -> tuple[tuple[float, ...], Counts] | None:
        """The row that is least by these columns: (their values, its counts)."""
        rows = np.flatnonzero(where)
        if not len(rows):
            return None
        columns = [getattr(self, name)[rows] for name in order]
        at = np.lexsort(columns[::-1])[0]
        return tuple(float(column[at]) for column in columns), self.counts[rows[at]]


class _Grid:
    """What `evaluate` computes, for many counts at once."""

    def __init__(self, problem: Problem, pieces: int) -> None:
        job, self.problem, self.pieces = problem.job, problem, pieces
        self.layers = job.shape.layers
        self.kept = np.array([kept_bytes(job, r) for r in RECOMPUTES], dtype=np.float64)
        self.working = np.array([working_bytes(job, r, pieces) for r in RECOMPUTES], dtype=np.float64)
        self.slots = np.array([problem.slot(r) for r in RECOMPUTES], dtype=np.float64)
        self.forward = np.array([forward_bytes(job, r, pieces) for r in RECOMPUTES], dtype=np.float64)
        self.top = np.array([top_bytes(job, r, pieces) for r in RECOMPUTES], dtype=np.float64)
        self.static, self.head = sum(static_parts(job).values()), head_bytes(job, pieces)
        self.rest = problem.rest_ms
        self.pieces_ms = [(pieces - 1) * problem.costs.piece if r != "nothing" else 0.0 for r in RECOMPUTES]
        self.compute = [problem.costs.forward + problem.costs.backward + problem.costs.again(r) + more
                        for r, more in zip(RECOMPUTES, self.pieces_ms, strict=True)]

    def plan(self, counts: Counts) -> Plan:
        return _plan(self.problem, counts, self.pieces)

    def extremes(self) -> tuple[list[Split], _Table]:
        """Every split, and as many rows for each: with none of a kind offloaded, all but one, which then need not wait for its
        copy at the top, or all."""
        splits = [(all_again, gate_up, self.layers - all_again - gate_up) for all_again in range(self.layers + 1)
                  for gate_up in range(self.layers - all_again + 1)]
        layers = np.repeat(np.array(splits), 27 if self.problem.host_left else 1, axis=0)
        kinds = np.array(list(itertools.product((0, 1, 2), repeat=3)) if self.problem.host_left else [(0, 0, 0)])
        kind = np.tile(kinds, (len(splits), 1))
        leaving = np.where(kind == 0, 0, np.maximum(layers - (kind == 1), 0))
        return splits, self._evaluated(layers, leaving)

    def fastest(self, split: Split) -> float:
        """If copies were free. A hair less, since the sums are done in another order than in `table`."""
        return self.rest + sum(n * ms for n, ms in zip(split, self.compute, strict=True)) - EQUAL_MS

    def table(self, split: Split, limit: float) -> _Table:
        """With every number of the upper two kinds offloaded, and none or the least that fits of the lowest: more would only
        take more time (merging two stretches of layers saves a copy) and host."""
        host = bool(self.problem.host_left)
        choices = [np.arange(n + 1) if host else np.zeros(1, dtype=np.int64) for n in split[1:]]
        upper = np.stack([axis.ravel() for axis in np.meshgrid(*choices, indexing="ij")], axis=1)
        lowest = [np.zeros(len(upper), dtype=np.int64)]
        if split[0] and host:
            lowest.append(self._least(split, upper, limit))
        return self._evaluated(np.array(split), np.concatenate([np.column_stack([first, upper]) for first in lowest]))

    def _least(self, split: Split, upper: Counts, limit: float) -> Counts:
        """How many of the lowest kind must leave, at least one."""
        none = self._evaluated(np.array(split), np.column_stack([np.zeros(len(upper), dtype=np.int64), upper]))
        pool = POOL_SLOTS * (np.maximum(none.slot, self.slots[0]) - none.slot)
        least: Counts = np.ceil((none.peak + pool - limit) / self.kept[0])
        return least.clip(1, split[0]).astype(np.int64)

    def _evaluated(self, layers: Counts, leaving: Counts) -> _Table:
        """`layers` by kind, [n, 3] or the same for all rows of `leaving` [n, 3]."""
        layers = np.broadcast_to(layers, leaving.shape)
        staying = layers - leaving
        below = np.cumsum(staying * self.kept, axis=1)  # kept by the layers up to the last of each kind
        largest = np.where(layers > 0, below + self.working, 0).max(axis=1)
        slot = np.where(leaving > 0, self.slots, 0).max(axis=1)
        uppermost = 2 - np.argmax(layers[:, ::-1] > 0, axis=1)
        own = np.where(staying[np.arange(len(staying)), uppermost] == 0, self.slots[uppermost], 0)
        last = np.maximum((self.working + self.top)[uppermost], self.head)
        last = below[:, -1] + np.maximum(last, own + np.where(layers > 0, self.forward, 0).max(axis=1))
        peak = self.static + POOL_SLOTS * slot + np.maximum(largest, last)
        ms = self.rest + sum(_ms(self.problem.costs, r, self.slots[i], layers[:, i], leaving[:, i])
                             + layers[:, i] * self.pieces_ms[i] for i, r in enumerate(RECOMPUTES))
        ms = np.round(ms / EQUAL_MS) * EQUAL_MS  # copies that hide change the last bit of a sum, and must not win by it
        counts = np.stack([staying, leaving], axis=2).reshape(len(leaving), 6)
        return _Table(counts, peak, ms, leaving @ self.slots, slot)


def _plan(problem: Problem, counts: Counts, pieces: int) -> Plan:
    levels: list[Level] = []
    for i, recompute in enumerate(RECOMPUTES):
        staying, leaving = int(counts[2 * i]), int(counts[2 * i + 1])
        count = staying + leaving
        # evenly spread, the first of them first: the last layer, which backward needs at once, is the last to be chosen
        starts = {number * count // leaving for number in range(leaving)} if leaving else set()
        levels += [Level(recompute, number in starts) for number in range(count)]
    return plan_of(problem, levels, pieces)


def plan_of(problem: Problem, levels: Sequence[Level], pieces: int) -> Plan:
    """What these levels would take and cost, whether they fit or not."""
    outcome = evaluate(problem, levels, pieces)
    slot = max((problem.slot(level.recompute) for level in levels if level.offload), default=0)
    plan = Plan(tuple(levels), pieces, outcome.peak, outcome.ms, outcome.host, slot, (), problem)
    return replace(plan, reasons=_reasons(plan))


def _reasons(plan: Plan) -> tuple[str, ...]:
    problem, layers = plan.problem, len(plan.levels)
    said = []
    if plan.counts() == {KEEP: layers}:
        said.append("everything fits: nothing is computed twice")
    else:
        everything = evaluate(replace(problem, job=replace(problem.job, host_embeddings=False)), [KEEP] * layers)
        saved = plan.ms - everything.ms
        said.append(f"to keep everything on the GPU would take {_gb_up(everything.peak + problem.aside)} and "
                    + (f"save {saved:.1f} of {plan.ms:.1f} ms" if saved > 0.05 else "be no faster"))
    if plan.offloaded:
        stalled = plan.ms - evaluate(replace(problem, costs=replace(problem.costs, to_host=1e18, from_host=1e18)),
                                     plan.levels, plan.pieces).ms
        said.append(f"{len(plan.offloaded)} layers leave for {_gb(plan.host_bytes)} of pinned host memory; "
                    + (f"the copies cost {stalled:.1f} ms" if stalled > 0.05 else "their copies hide behind the compute"))
    if plan.pieces > 1:
        said.append(f"the MLP's rows are done in {plan.pieces} turns, so that less is held at once")
    if problem.job.host_embeddings:
        said.append(f"the embeddings wait in {_gb(problem.host_embeddings)} of pinned host memory and are read over the link")
    return tuple(said)


# ---- budgets -----------------------------------------------------------------------------------------------------------------


def parse_budget(text: str, total: int, free: int | None = None) -> int:
    """`auto`, `24GB` or `80%` (recipe.Memory) as bytes for tensors, on a device with `total` bytes, `free` of them now. An
    amount is just that; a share of the device is less what the driver takes and what lies in fragments."""
    free = total if free is None else free
    if text == "auto":
        return peak_within(int(free * SHARE_OF_FREE))
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GB|GiB|MB|MiB|%)", text)
    if not found:
        raise RecipeError(what=f"memory.budget: {text!r} is not a budget", fix="write auto, 24GB or 80%")
    amount, unit = float(found[1]), found[2]
    asked = int(total * amount / 100) if unit == "%" else int(amount * UNITS[unit])
    if asked > total:
        raise RecipeError(what=f"memory.budget: {text} is more than the GPU has", why=f"it has {_gb(total)}",
                          fix="set memory.budget: auto, or a smaller amount")
    return peak_within(asked) if unit == "%" else asked


def host_room(root: Path = Path("/")) -> int:
    """Bytes of this machine's memory that a pool may pin; 0 where the system does not tell."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    available = min(available, _container_room(root / "sys/fs/cgroup", available))
    return max(int(available * SHARE_OF_HOST), available - LEFT_TO_HOST)


def _container_room(folder: Path, otherwise: int) -> int:
    """What a container has left of its limit: pages of files count as free, since they can be read again."""
    try:
        limit, used, told = ((folder / f"memory.{name}").read_text("ascii").strip() for name in ("max", "current", "stat"))
        files = dict(line.split() for line in told.splitlines()).get("file", "0")
    except (OSError, ValueError):
        return otherwise
    return otherwise if limit == "max" else max(0, int(limit) - int(used) + int(files))


def _gb(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB"


def _gb_up(amount: float) -> str:
    """Rounded up: a budget that is said to work does."""
    return f"{-(-int(amount) // 10**8) / 10:.1f} GB"
