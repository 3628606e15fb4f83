"""What a plan is made of: levels for layers, the problem, and what given levels take and cost.

A level is what backward computes again (nothing; gate and up; all but attention; the whole layer from its input), and whether
what is kept leaves for pinned host memory in between.

- Memory. Going down in backward, a layer's tensors are given back before the next one works. So the layers with the largest
  working set stand at the bottom (recomputing layers, first in forward) and those that keep everything at the top. No other
  order has a smaller peak: exchanging two neighbours shows it, and a test tries all orders.
- Pieces. Where gate and up are computed again, the MLP's rows can be done in several turns, the same number in all layers.
- Embeddings. Frozen ones that no head shares can wait in host memory; the GPU reads the few rows it needs over the link.
- Time. Layers that offload are spread evenly among those that recompute the same, and one copy may run while the layers up to
  the next one that offloads compute: that stretch takes max(copy, compute), forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pronghorn.memory.costs import LayerCosts
from pronghorn.memory.dry_run import forward_bytes, head_bytes, host_moments, kept_bytes, static_parts, top_bytes, working_bytes
from pronghorn.memory.job import RECOMPUTES, Job, Recompute

POOL_SLOTS = 3  # layers' worth of device memory that offloading takes: two buffers for the way back, one layer on its way out
SLOT_PADDING = 16 * 256  # bytes: what aligning a layer's tensors costs at most; one with experts has twice as many


class Words(NamedTuple):
    """How a level is called in a plan's table, and its block and legend in a plan's picture."""

    name: str
    block: str
    legend: str


WORDS: dict[Recompute, Words] = {
    "nothing": Words("keep", "█", "keeps all"),
    "gate_up": Words("recompute gate/up", "▓", "recomputes gate and up"),
    "around_attention": Words("keep attention", "▒", "keeps attention only"),
    "layer": Words("recompute all", "░", "recomputes all"),
}


@dataclass(frozen=True)
class Level:
    recompute: Recompute
    offload: bool = False

    @property
    def name(self) -> str:
        return WORDS[self.recompute].name + (", offloaded" if self.offload else "")

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


def evaluate(problem: Problem, levels: Sequence[Level], pieces: int = 1) -> Outcome:
    """Of any levels in any order; layers that offload count as evenly spread among their kind."""
    job, costs = problem.job, problem.costs
    slots = [problem.slot(level.recompute) for level in levels if level.offload]
    fixed = sum(static_parts(job).values()) + POOL_SLOTS * max(slots, default=0)
    kept, moments = 0, []
    for number, level in enumerate(levels):
        kept += 0 if level.offload else kept_bytes(job, level.recompute)
        moments.append((kept, working_bytes(job, level.recompute, pieces), f"backward of layer {number}"))
    more = top_bytes(job, levels[-1].recompute, pieces)
    moments.append((kept, moments[-1][1] + more, "backward of the last layer"))
    top = [level for level in levels if level.recompute == uppermost(levels)]
    own = problem.slot(top[0].recompute) if all(level.offload for level in top) else 0  # the last layer leaves, but not yet
    forward = max(forward_bytes(job, level.recompute, pieces) for level in set(levels))
    moments += [(kept, own + forward, "forward of a layer"), (kept, head_bytes(job, pieces), "the head")]
    peak = max(moments, key=lambda moment: moment[0] + moment[1])
    again = sum(level.recompute != "nothing" for level in levels)
    ms = problem.rest_ms + again * (pieces - 1) * costs.piece
    for recompute in RECOMPUTES:
        alike = [level for level in levels if level.recompute == recompute]
        leaving = np.array(sum(level.offload for level in alike))
        ms += float(milliseconds_of(costs, recompute, problem.slot(recompute), np.array(len(alike)), leaving))
    return Outcome(fixed + peak[0] + peak[1], ms, sum(slots), *peak)


def uppermost(levels: Sequence[Level]) -> Recompute:
    """Of the kinds that are there, the one that stands at the top."""
    return max((level.recompute for level in levels), key=RECOMPUTES.index)


Counts = npt.NDArray[Any]


def milliseconds_of(costs: LayerCosts, recompute: Recompute, slot: float, count: Counts, leaving: Counts) -> Counts:
    """Of `count` layers that recompute the same, `leaving` of them offloaded: both ways, without the rest of the step."""
    gap, longer = np.divmod(count, np.maximum(leaving, 1))  # `longer` of the stretches have one layer more

    def way(compute: float, copy: float) -> Counts:
        spread = longer * np.maximum((gap + 1) * compute, copy) + (leaving - longer) * np.maximum(gap * compute, copy)
        return np.where(leaving > 0, spread, count * compute)

    return way(costs.forward, slot / costs.to_host) + way(costs.backward + costs.recompute[recompute], slot / costs.from_host)
