"""What the seam for several ranks costs a run on one GPU: steps with the `World` of one beside steps with one rank of its own.

    python -m benchmarks.world [--workload llama-1b] [--steps 20] [--blocks 6] [--out FILE]
    python -m benchmarks.world --workload llama-1b-full --shard

One process, a model and a captured step for each; blocks of steps alternate between the two, so that clocks and temperature
are the same for both. Ranks of size 1 go through NCCL (on a CPU: gloo) as several would: the flat buffer of adapters' gradients
is summed, by NCCL within the update's graph, and the host asks for signals once a step. With --shard, FSDP2 shards all weights
over that one rank, as `world.shard: full` does over several, and both steps run without CUDA graphs. Prints one JSON line and,
with --out, writes a results file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import record, write
from pronghorn.process import set_defaults

WHAT = "A step through the seam for several ranks, at one rank, beside a step without it"
LIMIT, SHARDED_LIMIT = 0.005, 0.02  # of a step


def measure(workload: str, *, warmup: int, steps: int, blocks: int, shard: bool = False) -> dict[str, Any]:
    import torch

    from benchmarks.bench.meter import Meter
    from benchmarks.bench.ours import Ours
    from benchmarks.bench.weights import make_model_folder
    from benchmarks.bench.workloads import WORKLOADS
    from pronghorn.train.dist.ranks import join
    from pronghorn.train.dist.world import World

    make_model_folder(WORKLOADS[workload].model)

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def ours_with(world: World) -> Ours:
        """The world is there before the first step, whose capture depends on it."""
        meter = Meter(began=time.time(), warmup=warmup, steps=blocks * (steps + 1))
        ours = Ours(
            WORKLOADS[workload], meter, graph="off" if shard else "auto", ranks=ranks if shard and world is ranks else None
        )
        ours.step.world = world
        return ours

    def run(ours: Ours, count: int) -> float:
        """Milliseconds a step, as the loop takes them: begun ahead of being read."""
        begun, losses = deque[None](), []
        wait()
        began = time.perf_counter()
        for _ in range(count):
            ours.step.begin(next(ours.batches))
            begun.append(None)
            if len(begun) > ours.step.depth:
                begun.popleft()
                losses.append(ours.step.finish().loss)
            ours.step.world.largest(0)
        losses += [ours.step.finish().loss for _ in begun]
        wait()
        assert all(math.isfinite(loss) for loss in losses), "a loss is not a number"
        return 1000 * (time.perf_counter() - began) / count

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with join() as ranks:
        both = {"alone": ours_with(World()), "ranks": ours_with(ranks)}
        for ours in both.values():
            run(ours, warmup)
        times: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(blocks):
            for name, ours in both.items():
                run(ours, 1)
                times[name].append(run(ours, steps))
        backend = ranks.backend
    limit = SHARDED_LIMIT if shard else LIMIT
    alone, through = (median(times[name]) for name in ("alone", "ranks"))
    return {
        "workload": workload,
        "backend": backend,
        "sharded": shard,
        "steps": steps * blocks,
        "ms_per_step": round(alone, 4),
        "ms_per_step_through_ranks": round(through, 4),
        "cost_of_the_seam": round(through / alone - 1, 5),
        "within": through / alone - 1 < limit,
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
