"""`pronghorn profile` of a workload of the training benchmark: random weights of the real architecture, rows of random text.

    python -m benchmarks.profiled [--workload llama-1b] [--steps 20] [--folder FOLDER] [--out FILE]

The rows have the lengths of the benchmark's documents, a byte a token. Beside the profile it is checked whether its times add
up to the step as it is without the profiler, and whether the trace is one that Perfetto reads: by what its importer of JSON
needs, as its own program is no part of the package on the index, but fetched when it is used first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, record, write

WHAT = "`pronghorn profile`: groups of kernels, idle time and waits of whole training steps"
STEPS_OF_DATA = 80  # all of them in the first epoch, whose last step is a shorter one
NEEDED = {"X": ("name", "dur", "pid", "tid"), "M": ("name", "args"), "s": ("id",), "t": ("id",), "f": ("id",)}  # by phase
ROUNDED = 0.002  # microseconds: a trace's times have three digits behind the point, and are large


def problems_of(trace: Mapping[str, Any]) -> list[str]:
    """What Perfetto's importer of Chrome's JSON format would refuse, or count as an error; a few of them."""
    found = []
    for event in trace.get("traceEvents", ["there are no traceEvents"]):
        phase = event.get("ph") if isinstance(event, dict) else None
        if not isinstance(phase, str) or len(phase) != 1:
            found.append(f"no phase: {event}")
            continue
        needed = (*NEEDED.get(phase, ()), *(() if phase == "M" else ("ts",)))
        found += [f"no {key}: {event}" for key in needed if key not in event]
        times = [event[key] for key in ("ts", "dur") if key in event]
        if any(not isinstance(time, int | float) or time < 0 for time in times):
            found.append(f"no time: {event}")
        if any(not isinstance(event.get(key, 0), int | str) for key in ("pid", "tid")):
            found.append(f"no number or name of a track: {event}")
    return (found or overlapping(trace["traceEvents"]))[:5]


def overlapping(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Slices that begin within another one of their track and end after it: they are dropped."""
    found, open_until = [], dict[tuple[Any, Any], list[float]]()
    slices = (event for event in events if event["ph"] == "X")
    for event in sorted(slices, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        outer, end = open_until.setdefault((event["pid"], event["tid"]), []), event["ts"] + event["dur"]
        while outer and outer[-1] <= event["ts"] + ROUNDED:
            outer.pop()
        if outer and end > outer[-1] + ROUNDED:
            found.append(f"overlaps another one of its track: {event}")
        outer.append(end)
    return found


def profiled(workload: str, steps: int, folder: Path) -> dict[str, Any]:
    from benchmarks.bench.ours import bench_recipe
    from benchmarks.bench.workloads import WORKLOADS, documents

    work = WORKLOADS[workload]
    subprocess.run([sys.executable, "-m", "benchmarks.bench.weights", "--model", work.model], check=True)
    letters = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for row in documents(work, STEPS_OF_DATA):
            text = "".join(letters.choices("abcdefghijklmnopqrstuvwxyz ", k=max(8, len(row) - 2)))
            file.write(json.dumps({"text": text}) + "\n")
    recipe = bench_recipe(work).model_dump(mode="json")
    recipe["data"]["train"] = [str(folder / "rows.jsonl")]
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    return of_recipe(folder / "recipe.yaml", [], steps, folder)


def of_recipe(recipe: Path | str, overrides: list[str], steps: int, folder: Path) -> dict[str, Any]:
    """What the command says, in a process of its own."""
    words = ["profile", str(recipe), *overrides, "--steps", str(steps), "-o", str(folder), "--json"]
    done = subprocess.run([sys.executable, "-m", "pronghorn.cli", *words], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pronghorn {' '.join(words)} failed (exit code {done.returncode}): {done.stdout}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def result(workload: str, steps: int, folder: Path) -> dict[str, Any]:
    facts = profiled(workload, steps, folder)
    file = folder / "trace.json.gz"
    trace = json.loads(gzip.decompress(file.read_bytes()))
    summed = sum(one["ms"] for one in facts["groups"]) + facts["idle_ms"]
    figures = {
        "workload": workload,
        "summed_ms": summed,
        "summed_against_step": summed / facts["step_ms_without_profiler"] - 1,
        "trace_bytes": file.stat().st_size,
        "trace_events": len(trace["traceEvents"]),
        "trace_problems": problems_of(trace),
    }
    rows = facts.pop("groups")
    command = f"python -m benchmarks.profiled --workload {workload} --steps {steps}"
    return record(WHAT, command, rows, figures=figures | {key: facts[key] for key in facts if key not in ("model", "trace")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="llama-1b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="keep rows, recipe and trace here")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/profile-WORKLOAD.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        content = result(options.workload, options.steps, options.folder or Path(place))
    write(options.out or RESULTS / f"profile-{options.workload}.json", content)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
