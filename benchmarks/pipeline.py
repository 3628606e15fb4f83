"""The real command on real data, end to end: how busy the GPU is, what the host spends, what checkpoints cost.

    python -m benchmarks.pipeline recipe.yaml [--model FOLDER] [key=value ...] [--trace FILE.json.gz] [--out FILE]

Trains the recipe three times for a hundred steps, each time in a fresh process and folder: under torch.profiler (device
activities only), plainly, and with a checkpoint every ten steps. The first run also fills the caches of data and compiled
kernels, so the time to the first step of the second one is that of a command given again. Without evaluation. Prints one JSON
line; what needs a GPU is null without one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.record import record, write
from pronghorn.process import set_defaults
from pronghorn.report.stages import process_age

WHAT = "`pronghorn train` on real data: how busy the GPU is, what the host spends, what checkpoints cost"
BEGAN = time.time() - process_age()
FIRST, LAST = 20, 100  # measured from the end of the one to the end of the other
AFTER = 5  # steps after the last one, so that the end of the run is not in it
RUNS = ("profiled", "plain", "checkpoints")
CHECKPOINT_EVERY = 10


class Watch:
    """The run's display: looks at clocks at two steps, and switches the profiler on and off."""

    def __init__(self, first: int, last: int, profiler: Any) -> None:
        self.first, self.last, self.profiler = first, last, profiler
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
        if step == self.last:
            self._look(step)
        if self.profiler is not None and step == self.first:
            self.profiler.start()
        if self.profiler is not None and step == self.last:
            self.profiler.stop()
        if step == self.first:
            self._look(step)

    def _look(self, step: int) -> None:
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
    if options.only == "profiled":
        # The profiler's library stays loaded from before the first capture on: unloaded and loaded again, it does not get on
        # with CUDA graphs (torch sets the same for its own graphs).
        os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    import torch

    from pronghorn.recipe_file import load_recipe
    from pronghorn.train.loop import train

    recipe = load_recipe(options.recipe, options.overrides)
    every = CHECKPOINT_EVERY if options.only == "checkpoints" else options.last + 2 * AFTER
    profiler = None
    if options.only == "profiled" and torch.cuda.is_available():
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]):  # the first start takes seconds: here, not between two steps
            torch.zeros(1, device="cuda")
        profiler = profile(activities=[ProfilerActivity.CUDA])
    watch = Watch(options.first, options.last, profiler)
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
        if profiler is not None:
            trace = options.trace or Path(folder) / "trace.json.gz"
            profiler.export_chrome_trace(str(trace))
            figures |= busy(trace)
    if torch.cuda.is_available():
        figures["hardware"] = torch.cuda.get_device_name()
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def busy(trace: Path) -> dict[str, Any]:
    """Share of the time between the first kernel and the last in which some kernel ran (and: in which anything ran)."""
    content = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    events = [e for e in json.loads(content)["traceEvents"] if e.get("ph") == "X"]
    kernels = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e.get("cat") == "kernel"]
    copies = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if str(e.get("cat")).startswith("gpu_mem")]
    if not kernels:
        return {"gpu_busy_share": None, "why": "the trace has no kernels"}
    window = max(end for _, end in kernels) - min(start for start, _ in kernels)
    return {
        "gpu_busy_share": union(kernels) / window,
        "gpu_busy_share_with_copies": union([*kernels, *copies]) / window,
        "window_seconds": window / 1e6,
        "kernels": len(kernels),
    }


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length covered by at least one interval."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered


def all_runs(options: argparse.Namespace) -> dict[str, Any]:
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
        words += ["--trace", str(options.trace)] if options.trace else []
        print(f"{name} ...", file=sys.stderr, flush=True)
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
        told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if done.returncode or not told:
            raise SystemExit(f"the {name} run failed (exit code {done.returncode}); what it said is above")
        runs[name] = json.loads(told[-1].removeprefix("RESULT "))
    plain, saving = runs["plain"], runs["checkpoints"]
    figures = {
        "steps": [options.first, options.last],
        "gpu_busy_share": runs["profiled"].get("gpu_busy_share"),
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
    parser.add_argument("--trace", type=Path, help="keep the profiler's trace here (.json.gz)")
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
