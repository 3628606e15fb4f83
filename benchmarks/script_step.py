"""Where a step of somebody's script goes: the script that `python -m benchmarks.bench` runs in TRL's trainer, profiled.

    python -m benchmarks.script_step --workload llama-1b-trl-qlora [--systems dropin-true,unsloth-true] [--out FILE]

Each system in a process of its own: some warm steps by the clock, then a few with the profiler on. Told are milliseconds a
step, the time in which the GPU ran any kernel, how many kernels there were, the kernels that took most, and between which
kernels the GPU was idle longest. Idle time is the host's: it could not launch fast enough, or waited for a number. On a CPU,
operators take the kernels' place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bench.workloads import SYSTEMS, WORKLOADS, pick

PROFILED = 3  # steps
SHOWN = 25  # kernels, and pairs of kernels with idle time between them
LONG_GAP_US = 20.0  # shorter ones are launches
Row = dict[str, Any]


def measure(system: str, workload: str, *, warmup: int, steps: int) -> Row:
    """In this process."""
    import importlib

    importlib.import_module(SYSTEMS[system].script)  # before torch and transformers, as Unsloth's README asks
    import torch

    from benchmarks.bench import peers
    from benchmarks.bench.meter import Meter, machine

    cuda = torch.cuda.is_available()
    kind = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    profiler = torch.profiler.profile(activities=[kind])

    class Profiled(Meter):
        """Its figures are those of the steps before the profiler starts."""

        @property
        def total(self) -> int:
            return self.warmup + self.steps + PROFILED

        def step_ended(self, tokens: Any, pairs: int = 0) -> None:
            super().step_ended(tokens, pairs)
            if self.done == self.warmup + self.steps:
                self._wait()
                self._times[self.done] = time.perf_counter()
                profiler.start()
            elif self.done == self.total:
                self._wait()
                profiler.stop()

    meter = Profiled(began=time.time(), warmup=warmup, steps=steps, peak_from_first_step=SYSTEMS[system].captures)
    figures = peers.measure(system, WORKLOADS[workload], meter, None)
    times = meter._times
    found = summary(profiler.events(), cuda=cuda)
    return {
        "system": system,
        "workload": workload,
        "loss_last": figures["loss_last"],
        "grad_norm": figures["grad_norm"],
        "peak_gib": figures["peak_gib"],
        "ms_per_step": round(1000 * (times[warmup + steps] - times[warmup]) / steps, 2),
        **found,
        "machine": machine(),
    }


def summary(events: Any, *, cuda: bool) -> Row:
    """Of profiled steps: the time in which anything ran, and the kernels by name."""
    by_name: dict[str, list[float]] = {}
    spans = []
    for event in events:
        name = str(getattr(event.device_type, "name", event.device_type))
        if (name == "CUDA") is not cuda or not event.time_range.elapsed_us():
            continue
        by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
        spans.append((event.time_range.start, event.time_range.end, event.name))
    busy, until, before = 0.0, float("-inf"), ""
    gaps: dict[str, list[float]] = {}
    for begin, end, name in sorted(spans):
        if before and begin - until > LONG_GAP_US:
            gaps.setdefault(f"{before[:60]} -> {name[:60]}", []).append(begin - until)
        busy += max(0.0, end - max(begin, until))
        until, before = max(until, end), name
    kernels = sorted(((sum(us), len(us), name) for name, us in by_name.items()), reverse=True)[:SHOWN]
    longest = sorted(((sum(us), len(us), name) for name, us in gaps.items()), reverse=True)[:SHOWN]
    return {
        "busy_ms_per_step": round(busy / 1000 / PROFILED, 2),
        "kernels_per_step": round(len(spans) / PROFILED),
        "gaps": [
            {"ms": round(us / 1000 / PROFILED, 3), "times": round(count / PROFILED, 1), "between": name}
            for us, count, name in longest
        ],
        "most": [
            {"ms": round(us / 1000 / PROFILED, 3), "times": round(count / PROFILED, 1), "kernel": name[:140]}
            for us, count, name in kernels
        ],
    }


def told(row: Row) -> str:
    lines = [
        f"{row['workload']}, {row['system']}: {row['ms_per_step']} ms a step, of which the GPU worked "
        f"{row['busy_ms_per_step']} ms in {row['kernels_per_step']} kernels; peak {row['peak_gib']} GiB"
    ]
    lines += [f"  {one['ms']:9.3f} ms {one['times']:7.1f} x  {one['kernel']}" for one in row["most"]]
    return "\n".join([*lines, *(f"  {one['ms']:9.3f} ms {one['times']:7.1f} x  idle: {one['between']}" for one in row["gaps"])])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-1b-trl")
    parser.add_argument("--systems", default="dropin")
    parser.add_argument("--warmup", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    systems = pick(options.systems, [name for name, system in SYSTEMS.items() if system.script], "script's system")
    if options.here:
        print("RESULT " + json.dumps(measure(systems[0], options.workload, warmup=options.warmup, steps=options.steps)))
        return 0
    subprocess.run([sys.executable, "-m", "benchmarks.bench.weights", "--model", WORKLOADS[options.workload].model], check=True)
    rows, command = (
        [],
        [
            sys.executable,
            "-m",
            "benchmarks.script_step",
            "--here",
            "--workload",
            options.workload,
            "--warmup",
            str(options.warmup),
            "--steps",
            str(options.steps),
        ],
    )
    for system in systems:
        ended = subprocess.run([*command, "--systems", system], stdout=subprocess.PIPE, text=True, check=False)
        found = next((line for line in reversed(ended.stdout.splitlines()) if line.startswith("RESULT ")), None)
        if found is None:
            print(f"{system} ended with exit code {ended.returncode} and no result", file=sys.stderr)
            continue
        rows.append(json.loads(found.removeprefix("RESULT ")))
        print(told(rows[-1]), flush=True)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if len(rows) == len(systems) else 1


if __name__ == "__main__":
    raise SystemExit(main())
