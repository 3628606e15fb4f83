"""One workload under several memory budgets: is each kept, is the plan's peak the measured one, and is more memory faster?

    python -m benchmarks.budgets [--workload llama-8b] [--budgets 18GB,20GB,24GB,40GB,80GB] [--steps 8] [--warmup 3]

One process a budget. Every result is in the file as soon as it is there; the same command goes on with what is missing. A GB is
10^9 bytes, memory is the allocator's peak from the first step on, captured graphs included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.bench.side_by_side import OFFLINE, last_error
from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import WORKLOADS
from benchmarks.record import record, write

ROOT = Path(__file__).parent.parent
BUDGETS = "18GB,20GB,24GB,40GB,80GB"
TIME_LIMIT = 240.0  # seconds a process
WITHIN = 0.05  # of the planned peak
Row = dict[str, Any]


def measure(workload: str, budget: str, *, warmup: int, steps: int) -> Row:
    words = [sys.executable, "-m", "benchmarks.bench.worker", "--system", "pronghorn", "--workload", workload]
    words += ["--budget", budget, "--warmup", str(warmup), "--steps", str(steps)]
    try:
        done = subprocess.run(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
            env={**os.environ, **OFFLINE},
        )
    except subprocess.TimeoutExpired:
        return {"budget_asked": budget, "status": "timed out", "why": f"not done after {TIME_LIMIT:.0f} s"}
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if not line.startswith("RESULT ")), flush=True)
    told = [line for line in lines if line.startswith("RESULT ")]
    if not told:
        return {"budget_asked": budget, "status": "failed", "why": last_error(lines, done.returncode)}
    result: Row = json.loads(told[-1].removeprefix("RESULT "))
    return {"budget_asked": budget} | result | {"judged": judge(result)}


def judge(result: Row) -> Row:
    """What the plan promised, held against what was measured; without a GPU there is no peak to look at."""
    memory = result["memory"]
    peak = memory.get("peak_bytes")
    planned = memory["planned_step_seconds"]
    return {
        "under_budget": None if peak is None else peak <= result["budget"],
        "peak_over_plan": None if peak is None else round(peak / memory["planned_peak_bytes"], 4),
        "peak_within_5_percent": None if peak is None else abs(peak / memory["planned_peak_bytes"] - 1) <= WITHIN,
        "time_over_plan": round(memory["step_seconds"] / planned, 4) if planned else None,
    }


def table(rows: list[Row]) -> str:
    lines = [
        ("budget", "layers", "pieces", "embeddings", "peak planned", "peak measured", "ms planned", "ms measured", "tokens/s")
    ]
    for row in rows:
        if row["status"] != "measured":
            lines.append((row["budget_asked"], f"{row['status']}: {row['why']}"[:90], *[""] * 7))
            continue
        memory, levels = row["memory"], row["plan"]["levels"]
        kinds = ", ".join(f"{levels.count(name)} {name}" for name in dict.fromkeys(levels))
        peak, seconds = memory.get("peak_bytes"), memory["planned_step_seconds"]
        embeddings = "host" if row["plan"]["host_embeddings"] else "GPU"
        lines.append(
            (
                row["budget_asked"],
                kinds,
                str(row["plan"]["pieces"]),
                embeddings,
                f"{memory['planned_peak_bytes'] / 1e9:.2f} GB",
                "" if peak is None else f"{peak / 1e9:.2f} GB",
                "" if seconds is None else f"{1000 * seconds:.0f}",
                f"{row['ms_per_step']:.0f}",
                f"{row['tokens_per_second']:,.0f}",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ("---",) * len(lines[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-8b")
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--again", action="store_true", help="measure what is in the file already, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or ROOT / "benchmarks" / "results" / f"budgets-{options.workload}.json"
    make_model_folder(WORKLOADS[options.workload].model)
    found: list[Row] = json.loads(out.read_text(encoding="utf-8"))["results"] if out.exists() else []
    rows = {row["budget_asked"]: row for row in found if row["status"] == "measured"}
    wanted = [budget.strip() for budget in options.budgets.split(",")]
    for budget in wanted:
        if budget in rows and not options.again:
            continue
        rows[budget] = measure(options.workload, budget, warmup=options.warmup, steps=options.steps)
        ordered = sorted(rows.values(), key=lambda row: float(row["budget_asked"].rstrip("GMiB ")))
        speeds = [row["tokens_per_second"] for row in ordered if row["status"] == "measured"]
        sizes = f"--workload {options.workload} --steps {options.steps} --warmup {options.warmup}"
        write(
            out,
            record(
                "One workload under several memory budgets, one process per budget. Bytes are the allocator's, "
                "captured graphs included",
                f"python -m benchmarks.budgets {sizes}",
                ordered,
                speed_rises_with_each=speeds == sorted(set(speeds)),
            ),
        )
    print(table([rows[budget] for budget in wanted]))


if __name__ == "__main__":
    main()
