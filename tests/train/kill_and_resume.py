"""Kills a 60-step run with kill -9 at random instants, resumes each, and compares the final weights bit for bit.

    python tests/train/kill_and_resume.py --kills 20 --workers 2 MODEL SCRATCH

`--workers 0,2` takes turns: whoever loads, the weights are those of the first run. `--objective dpo` trains on pairs, with a
reference whose log-probabilities come out of the cache from the first resume on; every kill but the first removes it before, so
that kills also hit its making. `--objective grpo` answers prompts most of the time. Each run is a fork of
this process, which has done the slow imports already, so that 20 kills take a minute. An instant is a step and a moment after
it, not a time since the start: where the machine is busy with something else, a run of 3 seconds may need 10, and all kills
came before its steps.
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
import traceback
from bisect import bisect
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from making import BestAnswers

import pronghorn.train.source as sources
from cpu_products import quicken_products
from imported_python import forks_have_threads
from pronghorn.recipe import Recipe
from pronghorn.report.display import JsonDisplay
from pronghorn.report.run_log import FILE_NAME, read_log
from pronghorn.report.stages import Stages
from pronghorn.train.checkpoint import resume
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint, verify_checkpoint
from pronghorn.train.loop import train
from pronghorn.train.setup.check import check_run
from samples import chat_rows, pair_rows, write_rows

ROLLOUTS = {"prompts": 2, "answers": 4, "max_new_tokens": 12}


def start(recipe: Recipe) -> int:
    """The process id of a fork that trains."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        train(recipe, display=JsonDisplay(), stages=Stages())
        code = 0
    except BaseException:  # noqa: BLE001  (what follows would hide it)
        traceback.print_exc()
    finally:
        os._exit(code)


def finish(child: int) -> None:
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, f"the run failed: {status}"


def step_times(run: Path) -> list[float]:
    """When each step was logged."""
    return [event["time"] for event in read_log(run) if event["event"] == "step"] if (run / FILE_NAME).exists() else []


def kill(child: int, run: Path, after: int, moment: float) -> None:
    """kill -9, `moment` seconds after that many steps."""
    while len(step_times(run)) < after:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:  # where a core is busy with others' work, a whole run may pass between two looks
            assert status == 0, f"the run failed before its step {after}: {status}"
            return
        time.sleep(0.002)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def weights(run: Path, steps: int) -> bytes:
    newest = latest_checkpoint(run)
    verify_checkpoint(newest)
    assert newest.name == f"checkpoint-{steps}"
    files = [newest / "adapter_model.safetensors", newest / "training_state.safetensors", run / "rows.jsonl"]
    return b"".join(file.read_bytes() for file in files if file.exists())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=lambda words: [int(word) for word in words.split(",")], default=[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--objective", default="supervised")
    parser.add_argument("--stops", action="store_true")  # the second evaluation begins the decay: at the end of 8 of 9 steps
    parser.add_argument("--source", default="table", choices=["table", "made"])  # made: the model makes its rows (making.py)
    arguments = parser.parse_args()
    if arguments.source == "made":
        sources.kind_of = resume.kind_of = lambda recipe: BestAnswers
    torch.set_num_threads(1)  # a fork may not inherit a pool of threads
    forks_have_threads()
    quicken_products()
    os.environ["PRONGHORN_CACHE"] = str(arguments.scratch / "cache")
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    rolls = arguments.objective == "grpo"
    rows = chat_rows(60) if rolls or arguments.objective == "supervised" else pair_rows(60)
    data, answers = write_rows(arguments.scratch / "train.jsonl", rows), arguments.objective != "reward"

    decays = {"schedule": "wsd", "average": 0.5} if arguments.stops else {}
    stops = {"stop": {"patience": 1, "min_delta": 9.0}} if arguments.stops else {}

    def recipe(name: str, workers: int) -> Recipe:
        return Recipe.model_validate(
            {
                "model": arguments.model,
                "objective": arguments.objective,
                "precision": "fp32",
                "lora": {"r": 4, "dropout": 0.0 if rolls else 0.1},
                **({"rollouts": ROLLOUTS, "rewards": [{"metric": "regex", "regex": "[a-zA-Z]"}]} if rolls else {}),
                "data": {"train": [str(data)], "eval": 0.1, "max_length": 128, "workers": workers},
                "train": {
                    "steps": arguments.steps,
                    "batch_tokens": 65536 if rolls else 512,
                    "capacity": 256,
                    "lr": 1e-2,
                    **decays,
                },
                "checkpoint": {"every": max(1, arguments.steps // 6), "keep": 2},
                "eval": {"every": max(1, arguments.steps // 3), "generations": int(answers), "max_new_tokens": 3, **stops},
                "output": str(arguments.scratch / name),
            }
        )

    check_run(recipe("whole", 0), report=lambda *_: None)  # what it imports and tokenizes, each fork would: 0.7 of 2 s
    began = time.time()
    finish(start(recipe("whole", arguments.workers[0])))
    times = [began, *step_times(arguments.scratch / "whole"), time.time()]
    duration = times[-1] - began
    steps = len(times) - 2
    assert (steps < arguments.steps) == arguments.stops
    expected = weights(arguments.scratch / "whole", steps)
    chance = random.Random(arguments.seed)
    landed = []
    for number in range(arguments.kills):
        run = arguments.scratch / "killed"
        shutil.rmtree(run, ignore_errors=True)
        killed = recipe("killed", arguments.workers[number % len(arguments.workers)])
        if number:
            shutil.rmtree(arguments.scratch / "cache" / "references", ignore_errors=True)
        instant = began + (number + chance.random()) / arguments.kills * duration  # spread over the run
        after = bisect(times, instant) - 1
        kill(start(killed), run, after, instant - times[after])
        newest = latest_checkpoint(run)
        landed.append(int(newest.name.split("-")[1]) if newest else 0)
        finish(start(killed))
        assert weights(run, steps) == expected, f"other weights after a kill near step {landed[-1]}"
    print(json.dumps({"kills": len(landed), "resumed_from": landed, "seconds_of_a_run": round(duration, 2)}))


if __name__ == "__main__":
    main()
