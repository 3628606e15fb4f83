"""Calibration: what a layer of each kind, the rest of a step and the link to the host take on this machine, in milliseconds.

The callers give the work as functions that can be run again and again; what is timed is a layer's forward, its backward, and
what each level computes again. On a GPU the time is the device's own, between two events; on the CPU it is the clock's. The
result is plain data for the planner.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pronghorn.memory.costs import Costs, LayerCosts
from pronghorn.model.layers.saved import Level

Work = Callable[[], Any]
WARM_UP = 2  # runs that compile kernels and fill caches
REPEATS = 5
COPY_BYTES = 64 << 20  # 1.2 ms at 55 GB/s: long enough for the link's rate, and room for it in any budget
LEAST_MS = 1e-6  # a clock may not see shorter work
LEAST_PIECE_MS = 0.01  # five launches: without a need for memory, one turn is better than two


@dataclass(frozen=True)
class LayerWork:
    """What is timed of a layer."""

    forward: Work
    gate_up_and_backward: Work  # gate and up once more, then backward
    recompute: Mapping[Level, Work]  # of each level but "nothing"
    pieces: tuple[Work, Work, int] | None = None  # a whole layer with its MLP at once, and in so many turns


def measure_costs(
    kinds: Iterable[LayerWork],
    device: torch.device,
    *,
    rest: Work | None = None,
    repeats: int = REPEATS,
    copy_bytes: int = COPY_BYTES,
    rates: tuple[float, float] | None = None,
    piece: float = 0.0,
    warm_up: int = WARM_UP,
) -> Costs:
    """`rest`: embeddings, head and loss, both ways. `rates`: of the copies, where they are known already. `piece`: where there
    is nothing to time it with. The optimizer's time is left out: an update cannot be tried without changing the weights."""
    to_host, from_host = rates or copy_rates(device, copy_bytes, repeats=repeats)

    def timed(one: Work | None) -> float:
        return milliseconds(one, device, repeats=repeats, warm_up=warm_up) if one else 0.0

    def layer(work: LayerWork) -> LayerCosts:
        further = piece
        if work.pieces is not None:
            at_once, in_turns, count = work.pieces
            further = max((timed(in_turns) - timed(at_once)) / (count - 1), LEAST_PIECE_MS)
        recompute: dict[Level, float] = {"nothing": 0.0, **{level: timed(one) for level, one in work.recompute.items()}}
        backward = max(timed(work.gate_up_and_backward) - recompute["gate_up"], LEAST_MS)
        return LayerCosts(timed(work.forward), backward, recompute, further)

    return Costs(tuple(map(layer, kinds)), timed(rest), 0.0, to_host, from_host, measured=True)


def milliseconds(work: Work, device: torch.device, *, repeats: int = REPEATS, warm_up: int = WARM_UP) -> float:
    """Median of `repeats` runs. All of them are queued before the first is looked at: the host stays ahead of the device."""
    for _ in range(warm_up):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
        return max(statistics.median(times), LEAST_MS)
    torch.cuda.synchronize(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    marks[-1].synchronize()
    times = [float(marks[i].elapsed_time(marks[i + 1])) for i in range(repeats)]
    return max(statistics.median(times), LEAST_MS)


def copy_rates(device: torch.device, size: int = COPY_BYTES, *, repeats: int = REPEATS) -> tuple[float, float]:
    """(to the host, from the host) in bytes a millisecond, through pinned memory."""
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = milliseconds(lambda: there.copy_(here, non_blocking=True), device, repeats=repeats)
    back = milliseconds(lambda: here.copy_(there, non_blocking=True), device, repeats=repeats)
    return size / out, size / back
