"""The real command on real data, end to end: how busy the GPU is, what the host spends, what checkpoints cost.

    python -m benchmarks.pipeline recipe.yaml [--model FOLDER] [key=value ...] [--out FILE]

Runs the recipe three times, each time in a fresh process and folder: `pronghorn profile`, then a hundred steps plainly, and
with a checkpoint every ten steps. The first run also fills the caches of data and compiled kernels, so the time to the first
step of the second one is that of a command given again. Without evaluation. Prints one JSON line; what needs a GPU is null
without one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.profiled import of_recipe
from benchmarks.record import record, write
from pronghorn.process import set_defaults
from pronghorn.report.stages import process_age

WHAT = "`pronghorn train` on real data: how busy the GPU is, what the host spends, what checkpoints cost"
BEGAN = time.time() - process_age()
FIRST, LAST = 20, 100  # measured from the end of the one to the end of the other
AFTER = 5  # steps after the last one, so that the end of the run is not in it
RUNS = ("plain", "checkpoints")
PROFILED = 80  # steps
CHECKPOINT_EVERY = 10


class Watch:
    """The run's display: looks at clocks at two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.first_step: float | None = None  # seconds from the start of the process
        self.tokens = 0
        self.at: dict[int, tuple[float, float, float]] = {}  # wall, this thread's CPU time, the whole process's
        self.losses: list[float] = []
        self.notices: list[str] = []

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == "notice":
            self.notices.append(event["text"])
        if event["event"] != "step":
            return
        step = event["step"]
        self.losses.append(event["loss"])
        if self.first_step is None:
            self.first_step = time.time() - BEGAN
        if self.first < step <= self.last:
            self.tokens += event["tokens"]
        if step in (self.first, self.last):
            self.at[step] = (time.perf_counter(), time.thread_time(), time.process_time())

    def progress(self, label: str, done: int, total: int) -> None:
        """Not needed here."""

    def figures(self) -> dict[str, Any]:
        wall, main, process = (b - a for a, b in zip(self.at[self.first], self.at[self.last], strict=True))
        return {
            "seconds_to_first_step": self.first_step,
            "seconds": wall,
            "tokens_per_second": self.tokens / wall,
            "main_thread_share": main / wall,
            "process_share": process / wall,
            "loss_first": self.losses[0],
            "loss_last": self.losses[-1],
            "notices": self.notices,
        }


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """In this process, as `pronghorn train` does it."""
    set_defaults()
    import torch

    from pronghorn.recipe_file import load_recipe
    from pronghorn.train.loop import train

    recipe = load_recipe(options.recipe, options.overrides)
    every = CHECKPOINT_EVERY if options.only == "checkpoints" else options.last + 2 * AFTER
    watch = Watch(options.first, options.last)
    with tempfile.TemporaryDirectory(prefix="pronghorn-pipeline-") as folder:
        train(
            recipe.model_copy(
                update={
                    "output": str(Path(folder) / "run"),
                    "data": recipe.data.model_copy(update={"eval": None}),
                    "eval": recipe.eval.model_copy(update={"stop": None}),
                    "train": recipe.train.model_copy(update={"steps": options.last + AFTER}),
                    "checkpoint": recipe.checkpoint.model_copy(update={"every": every}),
                }
            ),
            display=watch,
        )
        figures = watch.figures()
    if torch.cuda.is_available():
        figures["hardware"] = torch.cuda.get_device_name()
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def all_runs(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pronghorn-pipeline-") as folder:
        profiled = of_recipe(options.recipe, options.overrides, PROFILED, Path(folder))
    runs = {}
    for name in RUNS:
        words = [
            sys.executable,
            "-m",
            "benchmarks.pipeline",
            options.recipe,
            *options.overrides,
            "--only",
            name,
            "--first",
            str(options.first),
            "--last",
            str(options.last),
        ]
        print(f"{name} ...", file=sys.stderr, flush=True)
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not told:
            raise SystemExit(f"the {name} run failed (exit code {done.returncode}); what it said is above")
        runs[name] = json.loads(told[-1].removeprefix("RESULT "))
    plain, saving = runs["plain"], runs["checkpoints"]
    figures = {
        "steps": [options.first, options.last],
        "gpu_busy_share": 1 - profiled["idle_share"] if profiled["gpu"] else None,
        "main_thread_share": plain["main_thread_share"],
        "process_share": plain["process_share"],
        "seconds_to_first_step": plain["seconds_to_first_step"],
        "tokens_per_second": plain["tokens_per_second"],
        "checkpoint_every": CHECKPOINT_EVERY,
        "tokens_per_second_with_checkpoints": saving["tokens_per_second"],
        "checkpoint_cost": 1 - saving["tokens_per_second"] / plain["tokens_per_second"],
    }
    return record(
        WHAT,
        "python -m benchmarks.pipeline " + " ".join(sys.argv[1:]),
        [{"run": name, **run} for name, run in runs.items()],
        figures=figures,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--model", help="a model folder, instead of the recipe's")
    parser.add_argument("--out", type=Path, help="where the JSON goes, too")
    parser.add_argument("--first", type=int, default=FIRST)
    parser.add_argument("--last", type=int, default=LAST)
    parser.add_argument("--only", choices=RUNS, help="one run, in this process")
    options = parser.parse_intermixed_args()
    if options.model:
        options.overrides = [*options.overrides, f"model={options.model}"]
    result = one_run(options) if options.only else all_runs(options)
    print("RESULT " + json.dumps(result), flush=True)
    if options.out:
        write(options.out, result)


if __name__ == "__main__":
    main()
