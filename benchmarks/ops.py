"""Times every kernel beside plain torch, torch.compile and Liger on one GPU, and prints one table.

    python -m benchmarks.ops [--only rms_norm,rope] [--json benchmarks/results/ops.json]
    python -m benchmarks.ops --sweep rms_norm      # the tile sizes of the file's CONFIGS, instead of the peers
    python -m benchmarks.ops --dry                 # a few rows on any machine: does every script run and is it right?

A file benchmarks/op_<op>.py has
    cases() -> list of dicts; "T" is the number of rows, and --dry sets it to 16 and adds "dry": True
    run(case) -> lines, usually what `compare` returns
    sweep(case) -> lines (optional), one a tile size
A line is {"op", "case", "impl", "ms", "bytes" or "flops", "rate", "share_of_copy", "error"}. `ours` is a kernel of this
project, other names are peers or tile sizes. Bytes are what must be read and written once; the share is of the copy rate
measured in the same run; the error is the largest one against fp32, relative to the largest value, so that a wrong kernel
cannot look fast. --json makes or fills a file {"what", "runs"}: a run has its machine, command, commit and lines, which
take the place of older lines of the same op, case and implementation.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import pkgutil
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch._functorch import config as functorch_config

from benchmarks.record import commit, read, write

Line = dict[str, Any]
WHAT = "Kernels beside plain torch, torch.compile and other libraries: milliseconds, rate, error against fp32"
Outputs = torch.Tensor | Sequence[torch.Tensor | None]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLUSH_BYTES = 2**30  # 230 us of writing on an H200: it empties L2 (50 MB) and lets the host run ahead of the device


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")


def milliseconds(call: Callable[[], object], repeats: int = 30) -> float:
    """Median over `repeats`, each with a cold L2, by device events. 0 without a GPU: then only correctness is checked."""
    if DEVICE != "cuda":
        call()
        return 0.0
    for _ in range(5):
        call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        _flush_buffer().zero_()
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return float(torch.tensor([start.elapsed_time(stop) for start, stop in events]).median())


@cache
def copy_rate() -> float:
    """Bytes per second of a device copy, read plus written; 0 without a GPU."""
    if DEVICE != "cuda":
        return 0.0
    source = torch.empty(2**31, dtype=torch.int8, device=DEVICE).random_()
    target = torch.empty_like(source)
    rate = 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) / 1e3)
    return rate


def error_against(outputs: Outputs, truths: Outputs) -> float:
    """Largest error relative to the largest true value, over all outputs; NaN and missing outputs count as infinite."""
    pairs = [(outputs, truths)] if isinstance(outputs, torch.Tensor) else zip(outputs, truths, strict=True)
    worst = 0.0
    for got, truth in pairs:
        if truth is None:
            continue
        if got is None or got.shape != truth.shape or not torch.isfinite(got).all():
            return float("inf")
        difference = (got.float() - truth.float()).abs().max() / truth.float().abs().max().clamp_min(1e-30)
        worst = max(worst, float(difference))
    return worst


def line_for(
    op: str, case: str, impl: str, ms: float, *, moved_bytes: int | None = None, flops: int | None = None, error: float
) -> Line:
    """One line with its rate (TB/s or TFLOP/s) and, for bytes, its share of the copy rate."""
    line: Line = {"op": op, "case": case, "impl": impl, "ms": ms, "error": error}
    if flops is not None:
        line |= {"flops": flops, "rate": flops / ms * 1e-9 if ms else None, "unit": "TFLOP/s"}
    if moved_bytes is not None:
        rate = moved_bytes / ms * 1e-9 if ms else None
        line |= {"bytes": moved_bytes, "share_of_copy": rate * 1e12 / copy_rate() if rate else None}
        line |= {} if flops is not None else {"rate": rate, "unit": "TB/s"}
    return line


def compare(
    op: str, case: str, calls: dict[str, Callable[[], Outputs] | None], truth: Callable[[], Outputs], *,
    moved_bytes: int | None = None, flops: int | None = None,
) -> list[Line]:  # fmt: skip
    """Times and judges each call; every call returns its outputs in the order of `truth`, which is computed in fp32.

    A peer that is not there is None and gets no line; one that fails (its interface moved, it does not compile) is told
    and gets a line without a time. Peers are judged like ours.
    """
    lines: list[Line] = []
    truths = truth()
    for impl, call in calls.items():
        if call is None:
            continue
        try:
            error = error_against(call(), truths)
        except (TypeError, RuntimeError) as fault:
            if impl == "ours":
                raise
            print(f"{op} {case}: {impl} failed: {str(fault).splitlines()[0]}", file=sys.stderr)
            lines.append({"op": op, "case": case, "impl": impl, "ms": None, "failed": str(fault)})
            continue
        lines.append(line_for(op, case, impl, milliseconds(call), moved_bytes=moved_bytes, flops=flops, error=error))
    return lines


def compiled(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """torch.compile with static shapes on a GPU; None elsewhere, where its time would say nothing."""
    if DEVICE != "cuda":
        return None
    functorch_config.donated_buffer = False  # else its backward cannot be timed twice over one forward
    return torch.compile(function, dynamic=False)


def peer(module: str, name: str) -> Any:
    """A name of a peer library that need not be installed, or None."""
    try:
        return getattr(importlib.import_module(module), name, None) if DEVICE == "cuda" else None
    except ImportError:
        return None


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """For sweeps: `with replaced(rms_norm, "_forward_config", lambda *_: config)`."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def machine() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "liger_kernel", "transformers"):
        try:
            versions[name] = str(getattr(importlib.import_module(name), "__version__", "present"))
        except ImportError:
            versions[name] = "not installed"
    return {
        "hardware": torch.cuda.get_device_name() if DEVICE == "cuda" else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda,
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "benchmarks.ops", *sys.argv[1:]]),
        "commit": commit(),
    }


def merged(before: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """A results file with one more run. An older line is left out where the run has the same one."""
    fresh = {_name(line) for line in run["lines"]}
    older = [old | {"lines": [line for line in old["lines"] if _name(line) not in fresh]} for old in before]
    return {"what": WHAT, "runs": [*(old for old in older if old["lines"]), run]}


def _name(line: Line) -> tuple[str, str, str]:
    return line["op"], line["case"], line.get("impl", "ours")


def benchmark_modules(only: Sequence[str]) -> dict[str, ModuleType]:
    package = Path(__file__).parent
    names = [info.name.removeprefix("op_") for info in pkgutil.iter_modules([str(package)]) if info.name.startswith("op_")]
    unknown = set(only) - set(names)
    if unknown:
        raise SystemExit(f"no benchmark of {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    return {name: importlib.import_module(f"benchmarks.op_{name}") for name in names if not only or name in only}


def _text(line: Line) -> str:
    ms = f"{line['ms']:9.3f}" if line.get("ms") else "        -"
    rate = f"{line['rate']:8.2f} {line.get('unit', ''):7}" if line.get("rate") else "       -        "
    share = f"{100 * line['share_of_copy']:5.0f} %" if line.get("share_of_copy") else "      -"
    error = line.get("error")
    told = f"{error:9.1e}" if error is not None else "        -"
    return f"{line['op']:28} {line['case']:46} {line.get('impl', 'ours'):24} {ms} ms {rate} {share} {told}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="ops, with commas between")
    parser.add_argument("--where", default="", metavar="D=4096,V=128256", help="only cases with these sizes")
    parser.add_argument("--sweep", default="", metavar="OP", help="time the tile sizes of one op")
    parser.add_argument("--dry", action="store_true", help="16 rows, no timing without a GPU")
    parser.add_argument("--json", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    if DEVICE != "cuda" and not options.dry:
        raise SystemExit("no CUDA device: nothing to time (--dry checks that the scripts run)")
    print(f"copy {copy_rate() * 1e-12:.2f} TB/s" if DEVICE == "cuda" else "no GPU: correctness only", flush=True)
    print(f"{'op':28} {'case':46} {'impl':24} {'time':>12} {'rate':>16} {'of copy':>7} {'error':>9}")
    lines: list[Line] = []
    before = read(options.json)["runs"] if options.json and options.json.exists() else []
    wanted = [part.split("=", 1) for part in options.where.split(",") if part]
    chosen = [options.sweep] if options.sweep else [name for name in options.only.split(",") if name]
    for module in benchmark_modules(chosen).values():
        for given in module.cases():
            if any(str(given.get(name)) != value for name, value in wanted):
                continue
            case = given | ({"T": 16, "dry": True} if options.dry else {})
            found = (module.sweep if options.sweep else module.run)(case)
            for line in [found] if isinstance(found, dict) else found:
                lines.append(line)
                print(_text(line), flush=True)
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
            if options.json:  # after every case: a run that is cut off keeps what it has
                write(options.json, merged(before, machine() | {"copy_bytes_per_second": copy_rate(), "lines": lines}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
