"""Kills one rank of a run with kill -9 at random instants, resumes, and compares all losses with those of a run without a kill.

    python tests/train/kill_ranks.py MODEL SCRATCH --ranks 2 --instants 20 method=lora world.shard=base

What follows the options are keys of the recipe. The rank is drawn, and so is the instant: a step and a moment after it. Every
rank that is left must end with exit code 3, and no partial checkpoint may be there. Losses must be the same to the bit; after
`--resume-on` another number of ranks, within 1e-6. Ranks are forks of this process, joined over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from bisect import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from rank_processes import in_ranks
from watching import Silent, losses_of

from cpu_products import quicken_products
from imported_python import forks_have_threads
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.report.run_log import FILE_NAME, read_log
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint, verify_checkpoint
from pronghorn.train.dist import heartbeat
from pronghorn.train.dist import ranks as of_ranks
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.setup.check import check_run
from samples import chat_rows, write_rows


def step_times(run: Path) -> list[float]:
    """When each step was logged."""
    return [event["time"] for event in read_log(run) if event["event"] == "step"] if (run / FILE_NAME).exists() else []


def kill_later(run: Path, after: int, moment: float) -> None:
    """kill -9 of this process, `moment` seconds after that many steps or at the next one, by a fork of it that ends with it."""
    victim = os.getpid()
    if os.fork():
        return
    while os.getppid() == victim and len(step_times(run)) < after:
        time.sleep(0.002)
    until = time.monotonic() + moment
    while os.getppid() == victim and time.monotonic() < until and len(step_times(run)) <= after:
        time.sleep(0.002)
    if os.getppid() == victim:
        os.kill(victim, signal.SIGKILL)
    os._exit(0)


def recipe_of(arguments: argparse.Namespace, name: str) -> Recipe:
    steps = arguments.steps
    content: dict[str, Any] = {
        "model": arguments.model,
        "precision": "fp32",
        "lora": {"r": 4},
        "data": {"train": [str(arguments.scratch / "train.jsonl")], "eval": 0.1, "max_length": 128, "workers": 0},
        "train": {"steps": steps, "batch_tokens": 256 * (arguments.ranks + 1), "capacity": 256, "lr": 1e-2},
        "checkpoint": {"every": max(1, steps // 6), "keep": 2},
        "eval": {"every": max(1, steps // 3), "generations": 0},
        "output": str(arguments.scratch / name),
    }
    return parse_recipe(json.dumps(content), arguments.keys)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resume-on", type=int, help="ranks (default: as many)")
    parser.add_argument("--instants", type=int, default=20)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("keys", nargs="*")
    arguments = parser.parse_intermixed_args()
    torch.set_num_threads(1)  # a fork may not inherit a pool of threads
    forks_have_threads()
    quicken_products()
    heartbeat.BEAT, of_ranks.ALSO = 0.2, 1.0  # seconds: who is gone is known sooner
    scratch = arguments.scratch
    os.environ["PRONGHORN_CACHE"] = str(scratch / "cache")
    scratch.mkdir(parents=True, exist_ok=True)
    write_rows(scratch / "train.jsonl", chat_rows(60))

    def ranks(work: Callable[[World], Any], size: int) -> list[tuple[int, str] | None]:
        shutil.rmtree(scratch / "ranks", ignore_errors=True)
        return in_ranks(work, scratch / "ranks", size, private=True)

    whole, killed = recipe_of(arguments, "whole"), recipe_of(arguments, "killed")
    check_run(whole, report=lambda *_: None)  # what it imports and tokenizes, each rank would
    began = time.time()
    assert ranks(lambda world: train(whole, display=Silent(), world=world).step, arguments.ranks)[0] == (
        0,
        str(arguments.steps),
    )
    times = [began, *step_times(Path(whole.output)), time.time()]
    expected, chance, run = losses_of(whole.output), random.Random(arguments.seed), Path(killed.output)
    found: dict[str, list[Any]] = {"killed": [], "resumed_from": [], "apart": []}
    for number in range(arguments.instants):
        shutil.rmtree(run, ignore_errors=True)
        instant = began + (number + chance.random()) / arguments.instants * (times[-1] - began)  # spread over the run
        after, victim = bisect(times, instant) - 1, chance.randrange(arguments.ranks)
        ended = ranks(_until_killed(killed, victim, after, instant - times[after]), arguments.ranks)
        survived = ended[victim] is not None  # the run was over before
        codes = {one[0] for rank, one in enumerate(ended) if rank != victim and one is not None}
        assert codes == {0} if survived else codes <= {0, 3}, ended  # 0: killed after it had left
        newest = latest_checkpoint(run)
        if newest is not None:
            verify_checkpoint(newest)
        found["killed"].append(-1 if survived else victim)
        found["resumed_from"].append(int(newest.name.split("-")[1]) if newest else 0)
        size = arguments.resume_on or arguments.ranks
        again = ranks(lambda world: train(killed, display=Silent(), world=world).step, size)
        assert again == [(0, str(arguments.steps))] * size, again
        losses = losses_of(run)
        found["apart"].append(max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)))
    allowed = 0.0 if (arguments.resume_on or arguments.ranks) == arguments.ranks else 1e-6
    print(json.dumps({**found, "seconds_of_a_run": round(times[-1] - began, 2)}))
    assert max(found["apart"]) <= allowed, found


def _until_killed(recipe: Recipe, victim: int, after: int, moment: float) -> Callable[[World], Any]:
    def work(world: World) -> int:
        if world.rank == victim:
            kill_later(Path(recipe.output), after, moment)
        return train(recipe, display=Silent(), world=world).step

    return work


if __name__ == "__main__":
    main()
