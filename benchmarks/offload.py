"""Does offloading hide? The same layers recompute the same, with and without their tensors waiting in host memory.

    python -m benchmarks.offload [--workload llama-8b] [--steps 10] [--rounds 2] [--trace FILE.json.gz] [--out FILE]

One process, one model, the same documents: rounds of off and on in turn, each with its own captured step. `layer`: every layer
leaves its input. `gate_up`: every second layer leaves all but gate and up. Then some steps with offloading under the profiler:
how much of the copies' time kernels were running, and the trace itself. Writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import WORKLOADS
from benchmarks.record import record, write
from pronghorn.process import set_defaults, trace_captured_kernels

ROOT = Path(__file__).parent.parent
CASES = {"layer": 1, "gate_up": 2}  # what is computed again -> every so many layers offload
PROFILED = 2  # steps
WITHIN = 0.02
Row = dict[str, Any]


class Switch:
    """One model, whose layers change between steps what they do."""

    def __init__(self, workload: str, steps: int) -> None:
        from benchmarks.bench.meter import Meter
        from benchmarks.bench.ours import Ours

        self.ours = Ours(WORKLOADS[workload], Meter(began=time.time(), warmup=1, steps=steps))
        self.pools: dict[str, int] = {}

    def use(self, recompute: Any, every: int) -> None:
        """Every so many layers offload; 0: none."""
        import torch

        from pronghorn.memory.dry_run import kept_bytes
        from pronghorn.memory.levels import SLOT_PADDING
        from pronghorn.memory.offload import OffloadPool
        from pronghorn.model.causal_lm import engine_of
        from pronghorn.train.step.graphed_step import make_step

        ours = self.ours
        ours.step.abandon()
        ours.step = make_step(
            ours.model,
            ours.step.optimizer,
            device=ours.device,
            precision=ours.precision,
            clip=ours.recipe.train.clip,
            graph="auto",
            say=print,
        )
        engine = engine_of(ours.model)
        assert engine is not None
        engine.offload = None
        for layer in engine.layers:
            layer.offload = None
        gc.collect()  # graphs and pool of the round before
        if ours.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        away = [i for i in range(len(engine.layers)) if every and i % every == 0]
        pool = OffloadPool(len(away), kept_bytes(ours.job, recompute) + SLOT_PADDING, ours.device) if away else None
        for i, layer in enumerate(engine.layers):
            layer.level, layer.offload = recompute, pool if i in away else None
        engine.offload = pool
        if pool is not None:
            self.pools[recompute] = pool.host_bytes

    def run(self, steps: int) -> list[float]:
        """Losses."""
        import torch

        losses, waiting = [], 0
        for _ in range(steps):
            self.ours.step.begin(next(self.ours.batches))
            waiting += 1
            if waiting > self.ours.step.depth:
                losses.append(self.ours.step.finish().loss)
                waiting -= 1
        losses += [self.ours.step.finish().loss for _ in range(waiting)]
        if self.ours.device.type == "cuda":
            torch.cuda.synchronize()
        return losses


def timed(switch: Switch, recompute: str, every: int, *, warmup: int, steps: int) -> Row:
    import torch

    switch.use(recompute, every)
    switch.run(warmup)
    began = time.perf_counter()
    losses = switch.run(steps)
    ms = 1000 * (time.perf_counter() - began) / steps
    cuda = switch.ours.device.type == "cuda"
    return {
        "recompute": recompute,
        "offloaded": bool(every),
        "ms_per_step": round(ms, 2),
        "loss_last": losses[-1],
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if cuda else None,
    }


def compare(switch: Switch, recompute: str, *, rounds: int, warmup: int, steps: int) -> Row:
    every, rows = CASES[recompute], []
    for _ in range(rounds):
        rows += [timed(switch, recompute, one, warmup=warmup, steps=steps) for one in (0, every)]
        print("\n".join(json.dumps(row) for row in rows[-2:]), flush=True)
    off, on = (statistics.median(row["ms_per_step"] for row in rows if row["offloaded"] is kind) for kind in (False, True))
    return {
        "recompute": recompute,
        "every": every,
        "off_ms": off,
        "on_ms": on,
        "on_over_off": round(on / off, 4),
        "within_2_percent": on / off - 1 <= WITHIN,
        "pinned_bytes": switch.pools[recompute],
        "runs": rows,
    }


def profile(switch: Switch, trace: Path) -> Row:
    """Steps with offloading, as `use` left them."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    switch.run(2)
    with profiler(activities=[ProfilerActivity.CUDA]) as found:
        switch.run(PROFILED)
        torch.cuda.synchronize()
    trace.parent.mkdir(parents=True, exist_ok=True)
    found.export_chrome_trace(str(trace))
    return {"trace": trace.name} | hidden(trace)


def hidden(trace: Path) -> Row:
    """Of the time of copies between host and device, the share in which some kernel ran as well."""
    content = trace.read_bytes()
    events = json.loads(gzip.decompress(content) if trace.suffix == ".gz" else content)["traceEvents"]
    timed_events = [event for event in events if event.get("ph") == "X" and "dur" in event]
    kernels = merged([(e["ts"], e["ts"] + e["dur"]) for e in timed_events if e.get("cat") == "kernel"])
    found: Row = {}
    for name, mark in (("to_host", "DtoH"), ("from_host", "HtoD")):
        copies = [
            (e["ts"], e["ts"] + e["dur"], e.get("args", {}).get("bytes", 0))
            for e in timed_events
            if e.get("cat") == "gpu_memcpy" and mark in e.get("name", "")
        ]
        spent = sum(end - start for start, end, _ in copies)
        under = sum(
            max(0.0, min(end, stop) - max(start, begin))
            for start, end, _ in copies
            for begin, stop in kernels
            if begin < end and stop > start
        )
        size = sum(size for *_, size in copies)
        found[name] = {
            "copies": len(copies),
            "ms": round(spent / 1000, 2),
            "under_kernels": round(under / spent, 4) if spent else None,
            "gb_per_second": round(size / spent / 1000, 1) if spent else None,
        }
    return found


def merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without overlaps: kernels of two streams count once."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, default="llama-8b")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    set_defaults()
    trace_captured_kernels()
    make_model_folder(WORKLOADS[options.workload].model)
    import torch

    if torch.cuda.is_available():
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        with profiler(activities=[ProfilerActivity.CUDA]):  # the first start takes seconds, and comes before any capture
            torch.zeros(1, device="cuda")
    results = ROOT / "benchmarks" / "results"
    cases = options.cases.split(",")
    switch = Switch(options.workload, 1 + 2 * len(cases) * options.rounds * (options.warmup + options.steps) + 8)
    rows = [compare(switch, case, rounds=options.rounds, warmup=options.warmup, steps=options.steps) for case in cases]
    command = f"python -m benchmarks.offload --workload {options.workload} --rounds {options.rounds} --steps {options.steps}"
    content = record("Offload off and on at the same recompute level", command, rows, workload=options.workload)
    if torch.cuda.is_available():
        content["profiled"] = profile(switch, options.trace or results / f"offload-{options.workload}.trace.json.gz")
    out = options.out or results / f"offload-{options.workload}.json"
    write(out, content)
    for row in rows:
        print(
            f"{row['recompute']:8} off {row['off_ms']:.1f} ms, on {row['on_ms']:.1f} ms ({row['on_over_off']:.3f}), "
            f"pool {row['pinned_bytes'] / 1e9:.2f} GB of pinned host memory"
        )
    print(json.dumps(content.get("profiled", {})))


if __name__ == "__main__":
    main()
