"""What a plan is made of: a choice for each layer, the problem, and what given choices take and cost.

A choice is what backward computes again (model/layers/saved.py: nothing; gate and up; all but attention; the whole layer from
its input), and whether what is kept leaves for pinned host memory in between.

- Memory. Going down in backward, a layer's tensors are given back before the next one works. So among the layers of a kind
  those with the largest working set stand at the bottom (recomputing layers, first in forward) and those that keep everything
  at the top. Where all layers are alike no other order has a smaller peak: exchanging two neighbours shows it, and a test tries
  all orders.
- Pieces. Where gate and up are computed again, the MLP's rows can be done in several turns, the same number in all layers.
- Embeddings. Frozen ones that no head shares can wait in host memory; the GPU reads the few rows it needs over the link.
- Time. One copy may run while the layers up to the next one that offloads compute: that stretch takes max(copy, compute),
  forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pronghorn.memory.costs import Costs
from pronghorn.memory.dry_run import forward_bytes, head_bytes, host_moments, kept_bytes, static_parts, top_bytes, working_bytes
from pronghorn.memory.job import LEVELS, Job
from pronghorn.model.layers.saved import Level

POOL_SLOTS = 3  # layers' worth of device memory that offloading takes: two buffers for the way back, one layer on its way out
SLOT_PADDING = 16 * 256  # bytes: what aligning a layer's tensors costs at most; one with experts has twice as many


class LevelNames(NamedTuple):
    """How a level is called in a plan's table, and its block and legend in a plan's picture."""

    name: str
    block: str
    legend: str


WORDS: dict[Level, LevelNames] = {
    "nothing": LevelNames("keep", "█", "keeps all"),
    "gate_up": LevelNames("recompute gate/up", "▓", "recomputes gate and up"),
    "around_attention": LevelNames("keep attention", "▒", "keeps attention only"),
    "layer": LevelNames("recompute all", "░", "recomputes all"),
}


class Choice(NamedTuple):
    level: Level
    offload: bool = False

    @property
    def name(self) -> str:
        return WORDS[self.level].name + (", offloaded" if self.offload else "")


CHOICES = tuple(Choice(level, offload) for level in reversed(LEVELS) for offload in (False, True))
KEEP = Choice("nothing")


@dataclass(frozen=True)
class Problem:
    """All that a plan is made from."""

    job: Job
    costs: Costs
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
        return max(0, self.host - host_moments(self.job) - self.job.host_bytes)

    def cases(self) -> list[Problem]:
        """One for each place where the embeddings can be; where the host has no room for them, that is not one."""
        cases = [replace(self, job=replace(self.job, host_embeddings=on_host)) for on_host in self.embeddings]
        return [case for case in cases if case.host >= case.job.host_bytes] or [self]

    @property
    def rest_ms(self) -> float:
        """Milliseconds of a micro-batch, outside the layers."""
        rows = self.job.capacity * sum(columns for _, columns in self.job.host_tables) * self.job.element
        return self.costs.rest + (rows / self.costs.from_host if self.job.host_embeddings else 0.0)

    def slot(self, level: Level, kind: int = 0) -> int:
        return kept_bytes(self.job, level, kind) + SLOT_PADDING * (2 if self.job.shape.experts else 1)


@dataclass(frozen=True)
class Outcome:
    peak: int  # of the allocator
    ms: float  # of a micro-batch
    host: int
    kept: int  # by layers, at the moment of the peak
    work: int  # at that moment
    moment: str


Numbers = npt.NDArray[Any]
EQUAL_MS = 1e-6  # steps that differ by less take the same time


class Outcomes(NamedTuple):
    """Bytes and milliseconds of n plans."""

    peak: Numbers
    ms: Numbers
    host: Numbers
    kept: Numbers  # [n, moments]: by the layers in the backward of each, in the forward of each, and `TOP`
    work: Numbers  # [n, moments]


TOP = ("backward of the last layer", "the head")


@lru_cache(maxsize=64)
class Tables:
    """Bytes and milliseconds of each kind at each level, [kinds, levels], for a problem with its MLP in so many pieces."""

    def __init__(self, problem: Problem, pieces: int) -> None:
        job, costs = problem.job, problem.costs
        self.problem, self.pieces, self.kinds = problem, pieces, np.array(job.shape.kinds)
        known = range(max(job.shape.kinds) + 1)

        def table(size: Any) -> Numbers:
            return np.array([[size(kind, level) for level in LEVELS] for kind in known], dtype=np.float64)

        self.kept = table(lambda kind, level: kept_bytes(job, level, kind))
        self.slots = table(lambda kind, level: problem.slot(level, kind))
        self.working = table(lambda kind, level: working_bytes(job, level, pieces, kind))
        self.forward = table(lambda kind, level: forward_bytes(job, level, pieces, kind))
        last = job.shape.kinds[-1]
        self.top = np.array([top_bytes(job, level, pieces, last) for level in LEVELS], dtype=np.float64)
        self.static, self.head = sum(static_parts(job).values()), head_bytes(job, pieces)
        self.forward_ms = np.array([costs.kinds[kind].forward for kind in job.shape.kinds])

        def back(kind: int, level: Level) -> float:
            one = costs.kinds[kind]
            return one.backward + one.recompute[level] + (pieces - 1) * one.piece * (level != "nothing")

        self.back_ms = table(back)

    def outcomes(self, levels: Numbers, leaves: Numbers) -> Outcomes:
        """`levels`: numbers of LEVELS, [n, layers]; `leaves`: whether a layer offloads."""
        kinds, costs = self.kinds, self.problem.costs
        kept = np.cumsum(np.where(leaves, 0.0, self.kept[kinds, levels]), axis=1)
        slots = np.where(leaves, self.slots[kinds, levels], 0.0)
        work = self.working[kinds, levels]
        top = work[:, -1:] + self.top[levels[:, -1:]]
        forward = slots + self.forward[kinds, levels]  # what leaves is still there
        kept = np.concatenate([kept, kept, kept[:, -1:], kept[:, -1:]], axis=1)
        work = np.concatenate([work, forward, top, np.full(top.shape, self.head)], axis=1)
        peak = self.static + POOL_SLOTS * slots.max(axis=1) + (kept + work).max(axis=1)
        back = self.back_ms[kinds, levels]
        ms = self.problem.rest_ms + self.forward_ms.sum() + back.sum(axis=1)
        if leaves.any():
            ms = ms + _waits(np.broadcast_to(self.forward_ms, back.shape), slots / costs.to_host, leaves)
            ms = ms + _waits(back, slots / costs.from_host, leaves)
        return Outcomes(peak, np.round(ms / EQUAL_MS) * EQUAL_MS, slots.sum(axis=1), kept, work)


def _waits(compute: Numbers, copies: Numbers, leaves: Numbers) -> Numbers:
    """Milliseconds by which copies take longer than the layers up to the next one that offloads."""
    layers = compute.shape[1]
    until = np.concatenate([np.zeros((len(compute), 1)), np.cumsum(compute, axis=1)], axis=1)
    following = np.minimum.accumulate(np.where(leaves, np.arange(layers), layers)[:, ::-1], axis=1)[:, ::-1]
    following = np.concatenate([following[:, 1:], np.full((len(compute), 1), layers)], axis=1)
    stretch = np.take_along_axis(until, following, axis=1) - until[:, :-1]
    waits: Numbers = np.where(leaves, np.maximum(copies - stretch, 0.0), 0.0).sum(axis=1)
    return waits


def evaluate(problem: Problem, choices: Sequence[Choice], pieces: int = 1) -> Outcome:
    """Bytes and milliseconds of a choice for each layer, in any order."""
    levels = np.array([[LEVELS.index(choice.level) for choice in choices]])
    found = Tables(problem, pieces).outcomes(levels, np.array([[choice.offload for choice in choices]]))
    at = int(np.argmax(found.kept + found.work))
    way, layer = divmod(at, len(choices))
    moment = TOP[layer] if way > 1 else f"{('backward', 'forward')[way]} of layer {layer}"
    kept, work = int(found.kept[0, at]), int(found.work[0, at])
    return Outcome(int(found.peak[0]), float(found.ms[0]), int(found.host[0]), kept, work, moment)
