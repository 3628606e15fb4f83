"""Our side of the side-by-side alone, with the knobs one turns while working on the step.

    python -m benchmarks.train --workload llama-1b [--layers fast|own] [--graph auto|on|off] [--products ours|torch] [--profile]
    python -m benchmarks.train --workload llama-8b --tokens 8192 --document 2048

Prints where a step's time goes (--profile) and the same RESULT line as `python -m benchmarks.bench.worker`.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.bench.meter import Meter, machine
from benchmarks.bench.ours import Ours
from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import WORKLOADS
from pronghorn.kernels.gemm import mm
from pronghorn.report.stages import process_age

PROFILED_STEPS = 3


def profile_steps(ours: Ours) -> None:
    """Where a step's time goes, on the device and on the host. A replayed graph shows its kernels, too."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        for _ in range(PROFILED_STEPS):
            ours.step.begin(next(ours.batches))
            ours.step.finish()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = seen.key_averages()
    rows = [(e.self_device_time_total / PROFILED_STEPS, e.count / PROFILED_STEPS, e.key) for e in events]
    rows = [row for row in rows if row[0]]
    print(f"a step: device {sum(row[0] for row in rows) / 1000:.1f} ms in {sum(row[1] for row in rows):.0f} kernels")
    for time_us, count, name in sorted(rows, reverse=True)[:28]:
        print(f"{time_us / 1000:8.2f} ms {count:5.0f} x {name[:110]}")
    host = sorted(((e.self_cpu_time_total / PROFILED_STEPS, e.count / PROFILED_STEPS, e.key) for e in events), reverse=True)
    print("host: " + "; ".join(f"{key} {spent / 1000:.1f} ms x{count:.0f}" for spent, count, key in host[:8]))


def main() -> None:
    began = time.time() - process_age()
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", "--model", choices=WORKLOADS, default="llama-1b")
    parser.add_argument("--tokens", type=int, help="in a step, instead of the workload's")
    parser.add_argument("--document", type=int, help="tokens in every document, instead of the workload's")
    parser.add_argument("--lengths", type=Path, help="a JSON list of document lengths to draw from")
    parser.add_argument("--layers", choices=("fast", "own"), default="fast")
    parser.add_argument("--graph", choices=("auto", "on", "off"), default="auto")
    parser.add_argument(
        "--products",
        choices=("ours", "torch"),
        default="ours",
        help="by the algorithms of kernels/gemm/cublaslt.py, or as torch chooses",
    )
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="print where a step's time goes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.products == "torch":
        mm.try_mm = lambda *_, **__: False
    workload = WORKLOADS[options.workload]
    changes = {name: getattr(options, name) for name in ("tokens", "document") if getattr(options, name) is not None}
    workload = replace(workload, **changes)
    make_model_folder(workload.model)
    meter = Meter(began=began, warmup=options.warmup, steps=options.steps, peak_from_first_step=True)
    ours = Ours(workload, meter, lengths=options.lengths, layers=options.layers, graph=options.graph)
    figures = ours.run()
    if options.profile:
        profile_steps(ours)
    text = json.dumps(
        {
            "workload": workload.name,
            "tokens": workload.tokens,
            "document": workload.document,
            "system": "pronghorn",
            **figures,
            "machine": machine(),
        }
    )
    print("RESULT " + text, flush=True)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
