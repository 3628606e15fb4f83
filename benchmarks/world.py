"""What the seam for several ranks costs a run on one GPU: steps with the `World` of one beside steps with one rank of its own.

    python -m benchmarks.world [--workload llama-1b] [--steps 20] [--blocks 6] [--out FILE]
    python -m benchmarks.world --workload llama-1b-full --shard

One process, a model and a captured step for each; blocks of steps alternate between the two, so that clocks and temperature
are the same for both. Ranks of size 1 go through NCCL (on a CPU: gloo) as several would: the flat buffer of adapters' gradients
is summed, by NCCL within the update's graph, and the host asks for signals once a step. With --shard, of a workload that trains
all weights, FSDP2 shards them over that one rank, and no step is a CUDA graph. At one rank FSDP2 copies in place of gathers and
reductions (`ranks`); a third model calls them, as several ranks do (`collectives`). Prints one JSON line and, with --out,
writes a results file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.bench.workloads import WORKLOADS
from benchmarks.record import record, write
from pronghorn.process import set_defaults

WHAT = "A step through the seam for several ranks, at one rank, beside a step without it"
LIMIT, SHARDED_LIMIT = 0.005, 0.02  # of a step


class _Several(int):
    """One rank, where a comparison asks whether it is one."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return True


class _Group:
    def __init__(self, group: Any) -> None:
        self._group = group

    def size(self) -> int:
        return _Several(1)

    def rank(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def collectives() -> Iterator[None]:
    """FSDP2 gathers and reduces at one rank, too. For measurements and tests: it replaces two properties of torch's."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    names = ("_all_gather_process_group", "_reduce_scatter_process_group")
    before = {name: getattr(FSDPParamGroup, name) for name in names}

    def of(found: property) -> property:
        get: Callable[[Any], Any] = found.fget  # type: ignore[assignment]
        return property(lambda group: _Group(get(group)))

    try:
        for name, found in before.items():
            setattr(FSDPParamGroup, name, of(found))
        yield
    finally:
        for name, found in before.items():
            setattr(FSDPParamGroup, name, found)


def _be_one_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def measure(workload: str, *, warmup: int, steps: int, blocks: int, shard: bool = False) -> dict[str, Any]:
    import torch

    from benchmarks.bench.meter import Meter
    from benchmarks.bench.ours import Ours
    from benchmarks.bench.weights import make_model_folder
    from pronghorn.train.dist.ranks import join
    from pronghorn.train.dist.world import World

    make_model_folder(WORKLOADS[workload].model)

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def ours_with(world: World) -> Ours:
        """The world is there before the first step, whose capture depends on it."""
        meter = Meter(began=time.time(), warmup=warmup, steps=blocks * (steps + 1))
        over = ranks if shard and world is ranks else None
        ours = Ours(WORKLOADS[workload], meter, graph="off" if shard else "auto", ranks=over)
        ours.step.world = world
        return ours

    def run(name: str, count: int) -> float:
        """Milliseconds a step, as the loop takes them: begun ahead of being read."""
        ours, begun, results = arms[name], deque[None](), []
        wait()
        began = time.perf_counter()
        for _ in range(count):
            ours.step.begin(next(ours.batches))
            begun.append(None)
            if len(begun) > ours.step.depth:
                begun.popleft()
                results.append(ours.step.finish())
            ours.step.world.largest(0)
        results += [ours.step.finish() for _ in begun]
        wait()
        took = 1000 * (time.perf_counter() - began) / count
        assert all(math.isfinite(one.loss) and one.grad_norm > 0 for one in results), "a step trained nothing"
        losses[name] += [one.loss for one in results]
        return took

    def run_as(name: str, count: int) -> float:
        with collectives() if name == "collectives" else nullcontext():
            return run(name, count)

    _be_one_rank()
    with join() as ranks:
        worlds = {"alone": World(), "ranks": ranks} | ({"collectives": ranks} if shard else {})
        arms = {name: ours_with(world) for name, world in worlds.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        losses: dict[str, list[float]] = {name: [] for name in arms}
        for name in arms:
            run_as(name, warmup)
        for _ in range(blocks):
            for name, found in times.items():
                run_as(name, 1)
                found.append(run_as(name, steps))
        backend = ranks.backend
    apart = max(abs(one - losses["alone"][0]) / losses["alone"][0] for one, *_ in losses.values())
    assert apart < 0.01, f"first losses differ by {apart:.2%}"
    limit = SHARDED_LIMIT if shard else LIMIT
    ms = {name: median(found) for name, found in times.items()}
    alone, through = ms["alone"], ms["ranks"]
    return {
        "workload": workload,
        "backend": backend,
        "sharded": shard,
        "steps": steps * blocks,
        "ms_per_step": round(alone, 4),
        "ms_per_step_through_ranks": round(through, 4),
        "cost_of_the_seam": round(through / alone - 1, 5),
        "within": through / alone - 1 < limit,
        **({"cost_with_collectives": round(ms["collectives"] / alone - 1, 5)} if shard else {}),
        "blocks_ms": {name: [round(one, 4) for one in found] for name, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=WHAT)
    parser.add_argument("--workload", default="llama-1b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.shard and WORKLOADS[options.workload].method != "full":
        parser.error("--shard needs a workload that trains all weights: llama-1b-full")
    set_defaults()
    how = {"warmup": options.warmup, "steps": options.steps, "blocks": options.blocks, "shard": options.shard}
    row = measure(options.workload, **how)
    print(json.dumps(row))
    if options.out is not None:
        command = f"python -m benchmarks.world --workload {options.workload} --steps {options.steps} --blocks {options.blocks}"
        command += " --shard" * options.shard
        write(options.out, record(WHAT, command, [row]))


if __name__ == "__main__":
    main()
