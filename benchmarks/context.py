"""The longest context that trains within a memory budget: ours and peers', 8B QLoRA, one document a step.

    python -m benchmarks.context --budget 24GB --systems pronghorn,unsloth [--tokens N,N,...] [--path unsloth=DIR] [--show]

One optimizer step of one document in a process of its own, with the device's memory limited to the budget, the same way for
every system: torch's allocator may take so much and no more, and the rest of the device is occupied, so that a library which
looks at the free memory sees what a GPU of that size would show. A length counts if the gradient is not zero and the trained
tensors changed. Unsloth runs with its own checkpointing, in 4 bits.

Ours begins with what its planner says would fit, and goes down by 5 % if it does not. A peer tries the lengths of --tokens (of
all systems that are not pronghorn), in between the longest that trained and the shortest that did not. Every result is in the
file as soon as it is there; the same command goes on with what is missing. A GB is 10^9 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from benchmarks.bench.side_by_side import OFFLINE, PEERS_ALLOCATOR, last_error, parse_paths
from benchmarks.bench.weights import model_folder
from benchmarks.bench.worker import BEGAN, missing
from benchmarks.bench.workloads import LORA_RANK, MODELS, SYSTEMS, Workload
from benchmarks.record import write
from pronghorn.process import set_defaults

ROOT = Path(__file__).parent.parent
SYSTEM = {"unsloth": "unsloth-ckpt"}  # with its own checkpointing: without, contexts are short
MODEL = "llama-8b-long"
TIME_LIMIT = 560.0  # seconds a process
DOWN = 0.95  # ours, after a length that did not fit
TRIES = 4  # of ours; what the planner refuses costs seconds, and does not count
PLANNER = "the planner says so"
MULTIPLE = 1024  # tokens
SPARE = 10**9  # bytes beside the budget for what is not the allocator's: the context, kernels
SPARE_SHARE = 0.06  # of the budget: what our planner leaves to fragments on a device of its own
TRAINED, NO_ROOM = "trained", "out of memory"
Row = dict[str, Any]
Method = Literal["qlora", "lora"]


def bytes_of(budget: str) -> int:
    if not budget.endswith("GB"):
        raise SystemExit(f"--budget {budget}: write an amount such as 24GB")
    return int(float(budget.removesuffix("GB")) * 10**9)


# ---- one step, in a process of its own ---------------------------------------------------------------------------------------


def one_step(system: str, model: str, method: Method, tokens: int, budget: str) -> Row:
    """What became of it; an out-of-memory error is a result, any other error is not caught."""
    workload = Workload("context", model, tokens, document=tokens, method=method, budget=budget)
    if absent := missing(SYSTEMS[system], workload):
        return {"status": "not installed", "why": f"no module {', '.join(absent)}"}
    if system == "pronghorn":
        set_defaults()
    if system.startswith("unsloth"):
        importlib.import_module("unsloth")  # before torch and transformers, as its README asks
    import torch

    from benchmarks.bench.meter import OneStep, machine
    from pronghorn.errors import RecipeError

    occupied = limit(bytes_of(budget), occupy=True)
    told: Row = {"machine": machine(), "occupied_bytes": occupied}
    try:
        meter = OneStep(began=BEGAN)
        if system == "pronghorn":
            from benchmarks.bench.ours import Ours

            ours = Ours(workload, meter, graph="off", calibrate=False)
            limit(bytes_of(budget))  # a run of ours sets one of its own, with room for fragments
            figures = ours.run()
        else:
            from benchmarks.bench import peers

            figures = peers.measure(system, workload, meter, None)
    except torch.OutOfMemoryError as error:
        return told | {"status": NO_ROOM, "why": str(error).splitlines()[0][:300], "peak_bytes": peak(torch)}
    except RecipeError as error:
        return told | {"status": NO_ROOM, "why": f"{PLANNER}: {error.what}"}
    figures |= {"peak_bytes": peak(torch), "seconds": figures["ms_per_step"] / 1000}
    return told | {"status": TRAINED, "why": ""} | figures


def limit(budget: int, *, occupy: bool = False) -> int:
    """Holds the allocator to the budget; occupies what a device of that size would not have. Returns the occupied bytes."""
    import torch

    if not torch.cuda.is_available():
        return 0
    torch.empty(1, device="cuda")  # so that there is a context
    free, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
    rest = free - int(budget * (1 + SPARE_SHARE)) - SPARE
    if not occupy or rest <= 0:
        return 0
    place = ctypes.c_uint64()
    error = ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(rest))
    if error:
        raise RuntimeError(f"{rest / 1e9:.1f} GB of the device cannot be occupied: CUDA error {error}")
    return rest


def peak(torch: Any) -> int | None:
    """Of the allocator, since the step began."""
    return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None


# ---- all of them -------------------------------------------------------------------------------------------------------------


def attempt(
    system: str, model: str, method: Method, tokens: int, budget: str, *, time_limit: float = TIME_LIMIT, path: str = ""
) -> Row:
    """One process to its end or its time limit. Told apart: trained, out of memory, timed out, killed, failed."""
    words = [
        "-m",
        "benchmarks.context",
        "--one",
        system,
        "--model",
        model,
        "--method",
        method,
        "--tokens",
        str(tokens),
        "--budget",
        budget,
    ]
    places = (*path.split(":"), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))
    environment = {**PEERS_ALLOCATOR, **os.environ, **OFFLINE, "PYTHONPATH": ":".join(place for place in places if place)}
    # One working folder for all: what a system compiles into it, its next process finds again.
    scratch = Path(tempfile.gettempdir()) / "pronghorn-bench-work"
    scratch.mkdir(exist_ok=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=scratch,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=time_limit)
        row = outcome(output.splitlines(), process.returncode)
    except subprocess.TimeoutExpired:
        row = {"status": "timed out", "why": f"not done after {time_limit:.0f} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started itself, too
        process.wait()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    named = {"system": system, "budget": budget, "tokens": tokens, "process_seconds": round(time.monotonic() - began, 1)}
    return row | named | {"date": date}


def outcome(lines: Sequence[str], code: int) -> Row:
    told = [line for line in lines if line.startswith("RESULT ")]
    print("\n".join(line for line in lines if not line.startswith("RESULT "))[-4000:], flush=True)
    if told:  # whatever happened to the process after that
        row: Row = json.loads(told[-1].removeprefix("RESULT "))
        return row
    why = last_error(lines, code)
    if code == -signal.SIGKILL:  # not by us: that would have been the time limit
        return {"status": "killed", "why": f"by the system, as it does when the host's memory is full; last seen: {why}"}
    no_room = any(words in why for words in ("OutOfMemoryError", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED"))
    return {"status": NO_ROOM if no_room else "failed", "why": why}


def ours_longest(model: str, method: Method, budget: str) -> int:
    """What our planner says, less 1 %. It needs no GPU, and takes none of its memory."""
    from pronghorn.memory.costs import predicted_costs
    from pronghorn.memory.forecast import problem_of
    from pronghorn.memory.gpus import find_gpu
    from pronghorn.memory.job import Job, shape_of
    from pronghorn.memory.max_context import max_context
    from pronghorn.memory.plan import host_room

    job = Job(shape_of(MODELS[model]), 16384, method, LORA_RANK, graphed=False)
    problem = problem_of(job, predicted_costs(job, find_gpu("h200")), bytes_of(budget), host_room())  # times do not matter
    return rounded(max_context(problem) * 0.99)


def rounded(tokens: float) -> int:
    return max(MULTIPLE, int(tokens) // MULTIPLE * MULTIPLE)


def search_down(first: int, done: Iterable[Row], measure: Callable[[int], Row]) -> None:
    """From `first` on, shorter by 5 % a time, until one trains. Stops at what is neither trained nor out of memory."""
    known = {row["tokens"]: row for row in done}
    if any(row["status"] == TRAINED for row in known.values()):
        return
    shortest = min((row["tokens"] for row in known.values() if row["status"] == NO_ROOM), default=None)
    tokens = first if shortest is None else min(first, rounded(shortest * DOWN))
    tried = 0
    while tried < TRIES:
        row = measure(tokens)
        if row["status"] != NO_ROOM or tokens <= MULTIPLE:
            return
        tried += not row.get("why", "").startswith(PLANNER)
        tokens = rounded(tokens * DOWN)


def search_among(candidates: Sequence[int], done: Iterable[Row], measure: Callable[[int], Row]) -> None:
    """Halves the candidates between the longest that trained and the shortest that did not; the first try is the shortest, so
    that there is a figure soon. Stops at what is neither trained nor out of memory."""
    rows = list(done)
    while True:
        trained = max((row["tokens"] for row in rows if row["status"] == TRAINED), default=0)
        no_room = min((row["tokens"] for row in rows if row["status"] == NO_ROOM), default=float("inf"))
        between = sorted(tokens for tokens in set(candidates) if trained < tokens < no_room)
        if not between:
            return
        rows.append(measure(between[len(between) // 2] if trained or no_room < float("inf") else between[0]))
        if rows[-1]["status"] not in (TRAINED, NO_ROOM):
            return


# ---- the file and the table --------------------------------------------------------------------------------------------------


class Results:
    """Rows of every attempt; one that timed out, failed or was killed is tried again, and replaced."""

    def __init__(self, path: Path, command: str) -> None:
        self.path = path
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"commands": [], "results": []}
        self.commands: list[str] = [*content["commands"], *([command] if command not in content["commands"] else [])]
        self.rows: list[Row] = content["results"]

    def of(self, system: str, budget: str) -> list[Row]:
        return [row for row in self.rows if (row["system"], row["budget"]) == (system, budget)]

    def add(self, row: Row) -> None:
        def place(one: Row) -> tuple[str, str, int]:
            return one["system"], one["budget"], one["tokens"]

        self.rows = [old for old in self.rows if place(old) != place(row)] + [row]
        content = {"what": __doc__, "commands": self.commands, "longest": longest(self.rows), "results": self.rows}
        write(self.path, content)


def longest(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """budget -> system -> tokens"""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["status"] == TRAINED:
            of_budget = found.setdefault(row["budget"], {})
            of_budget[row["system"]] = max(of_budget.get(row["system"], 0), row["tokens"])
    return found


def table(rows: Iterable[Row]) -> str:
    lines = [("budget", "system", "tokens", "result", "peak", "seconds a step", "loss"), ("---",) * 7]
    for row in sorted(rows, key=lambda row: (bytes_of(row["budget"]), row["system"], row["tokens"])):
        trained, amount = row["status"] == TRAINED, row.get("peak_bytes")
        result = "trains" if trained else row["status"] if row["status"] == NO_ROOM else f"{row['status']}: {row['why'][:60]}"
        lines.append(
            (
                row["budget"],
                row["system"],
                f"{row['tokens']:,}",
                result,
                f"{amount / 1e9:.2f} GB" if amount and trained else "",
                f"{row['seconds']:.1f}" if trained else "",
                f"{row['loss_first']:.4f}" if trained else "",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def prepare(model: str) -> None:
    """The model's folder; a long one has the weights of the other, and a config of its own."""
    short, folder = model.removesuffix("-long"), model_folder(model)
    source = model_folder(short)
    if not source.is_dir():  # in a process of its own, which leaves no memory taken
        subprocess.run([sys.executable, "-m", "benchmarks.bench.weights", "--model", short], check=True)
    if short == model or folder.is_dir():
        return
    folder.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = MODELS[model]["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    wanted = [SYSTEM.get(name.strip(), name.strip()) for name in options.systems.split(",")]
    paths = parse_paths(options.path)
    lengths = [rounded(int(tokens)) for tokens in options.tokens.split(",") if tokens]
    names = ",".join(name.removesuffix("-ckpt") for name in wanted)
    results = Results(
        options.out,
        f"python -m benchmarks.context --budget {options.budget} --systems {names}"
        + (f" --tokens {options.tokens}" if options.tokens else "")
        + (f" --ours {options.ours}" if options.ours else ""),
    )
    if not options.show:
        prepare(options.model)
    for system in () if options.show else wanted:
        path = paths.get(system) or paths.get(system.split("-")[0]) or paths.get("all") or ""

        def measure(tokens: int, system: str = system, path: str = path) -> Row:
            print(f"{system}, {options.budget}, {tokens:,} tokens", flush=True)
            row = attempt(
                system, options.model, options.method, tokens, options.budget, time_limit=options.time_limit, path=path
            )
            results.add(row)
            print(f"  {row['status']} {row['why']} [{row['process_seconds']} s]", flush=True)
            return row

        done = results.of(system, options.budget)
        if system == "pronghorn" and not options.ours:
            search_down(ours_longest(options.model, options.method, options.budget), done, measure)
        else:
            search_among([rounded(int(options.ours))] if system == "pronghorn" else lengths, done, measure)
    print(table(results.rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", default="24GB")
    parser.add_argument("--systems", default="pronghorn,unsloth")
    parser.add_argument("--tokens", default="", help="lengths for the peers to try, comma-separated")
    parser.add_argument("--ours", help="a length for ours to try, instead of the planner's")
    parser.add_argument("--model", choices=MODELS, default=MODEL)
    parser.add_argument("--method", choices=("qlora", "lora"), default="qlora")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, metavar="SECONDS", help="of a process")
    parser.add_argument(
        "--path", action="append", default=[], metavar="SYSTEM=DIR[:DIR]", help="where a system's process finds its packages"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "context-llama-8b.json")
    parser.add_argument("--show", action="store_true", help="print the table of what is there, and measure nothing")
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)  # the process of one attempt
    options = parser.parse_args()
    if not options.one:
        run(options)
        return
    row = one_step(options.one, options.model, options.method, int(options.tokens), options.budget)
    print("RESULT " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
