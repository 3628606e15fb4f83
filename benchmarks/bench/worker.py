"""One system on one workload, in its own process; the last line it prints is `RESULT {json}`.

    python -m benchmarks.bench.worker --system pronghorn --workload llama-1b [--warmup 10] [--steps 20] [--out FILE]

Imports nothing heavy before the system's own library, which may want to be first.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import importlib.util
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bench.weights import model_folder
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS, System, Workload
from pronghorn.model.read_ahead import read_ahead
from pronghorn.process import importing, set_defaults
from pronghorn.report.stages import process_age

BEGAN = time.time() - process_age()  # when this process was created


def missing(system: System, workload: Workload) -> list[str]:
    needed = system.needs + (("bitsandbytes",) if workload.method == "qlora" and system.name != "pronghorn" else ())
    return [name for name in ("torch", "transformers", *needed) if importlib.util.find_spec(name) is None]


def measure(
    system: System, workload: Workload, *, warmup: int, steps: int, lengths: Path | None, turn: Path | None = None
) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": workload.name, "system": system.name}
    if absent := missing(system, workload):
        return row | {"status": "not installed", "why": f"no module {', '.join(absent)}"}
    if system.name == "pronghorn":
        set_defaults()
        read_ahead(str(model_folder(workload.model)))
        with importing():
            importlib.import_module("benchmarks.bench.ours")
    if system.script:
        importlib.import_module(system.script)  # before torch and transformers, as Unsloth's README asks
    from benchmarks.bench.meter import Meter, machine

    if system.script:  # libraries that import their parts when somebody asks for them
        importlib.import_module("peft")
        _ = importlib.import_module("trl").SFTTrainer
    importlib.import_module("benchmarks.bench.ours" if system.name == "pronghorn" else "benchmarks.bench.peers")
    waited = 0.0 if turn is None else _wait_for(turn)
    meter = Meter(began=BEGAN + waited, warmup=warmup, steps=steps, peak_from_first_step=system.captures)
    if system.name == "pronghorn":
        from benchmarks.bench import ours

        figures = ours.measure(workload, meter, lengths)
    else:
        from benchmarks.bench import peers

        figures = peers.measure(system.name, workload, meter, lengths)
    ahead = {} if turn is None else {"imported": "while another system was measured"}
    return row | {"status": "measured", "why": ""} | figures | ahead | {"machine": machine()}


def _wait_for(turn: Path) -> float:
    """Until no other process has the GPU, in seconds; then it is ours until this process ends."""
    began = time.time()
    fcntl.flock(os.open(turn, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
    return time.time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lengths", type=Path, help="JSON list of document lengths to sample from")
    parser.add_argument("--budget", help="memory budget of Pronghorn's plan, such as 20GB (default: the workload's)")
    parser.add_argument("--turn", type=Path, help="lock file to wait for after the imports, before the GPU is used")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    workload = WORKLOADS[options.workload]
    workload = replace(workload, budget=options.budget) if options.budget else workload
    result = measure(
        SYSTEMS[options.system],
        workload,
        warmup=options.warmup,
        steps=options.steps,
        lengths=options.lengths,
        turn=options.turn,
    )
    text = json.dumps(result)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    print("RESULT " + text, flush=True)


if __name__ == "__main__":
    main()
