"""`python -m benchmarks.bench`: every system on every workload, one process after another; its table and picture.

With --ahead a process imports its libraries while the one before it measures, and then waits for its turn: half the time.
Each result is in the file as soon as it is there. The same command goes on with what is missing, so that a machine lent for a
few minutes at a time is enough. Nothing is silently left out: a system that is not installed, fails or takes too long has a row
that says so.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pronghorn
from benchmarks.bench.picture import draw
from benchmarks.bench.results import CEILING, NAME, Results, Row, rate, speed_of
from benchmarks.bench.table import why_not
from benchmarks.bench.weights import model_folder
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS, Workload
from pronghorn.errors import CommandError

PICTURE = "side-by-side.svg"
# Nothing is looked up or sent; for the systems' own processes only.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_DISABLED": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_DISABLE_AUTO_UPDATES": "1",
}
# In favour of the peers: less memory is lost between blocks of different sizes.
PEERS_ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
WEIGHTS = "weights"


@dataclass(frozen=True)
class Plan:
    out: Path
    workloads: Sequence[str]
    systems: Sequence[str] = ()  # those of each workload, unless named
    warmup: int = 10
    steps: int = 20
    time_limit: float = 600.0  # seconds, each process
    paths: dict[str, str] = field(default_factory=dict)  # system -> folders its process finds packages in
    lengths: Path | None = None
    resume: Path | None = None
    again: Sequence[str] = ()  # systems to measure once more; `failed`: whatever has no figures
    ahead: bool = False  # the next process imports its libraries while one measures
    command: str = ""

    def jobs(self) -> Iterator[tuple[Workload, str]]:
        for name in self.workloads:
            workload = WORKLOADS[name]
            if not workload.pairs:
                yield workload, CEILING
            yield from ((workload, system) for system in self.systems or workload.systems)


def parse_paths(words: Sequence[str]) -> dict[str, str]:
    """`unsloth=DIR[:DIR]`; `all` is for every system that has none of its own, a variant takes its system's."""
    paths = {}
    for word in words:
        system, equals, folders = word.partition("=")
        if not equals or not folders or system not in {*SYSTEMS, CEILING, "all"}:
            raise CommandError(
                what=f"--path {word} is not valid",
                why="the format is SYSTEM=FOLDER or SYSTEM=FOLDER:FOLDER",
                fix=f"use one of these systems: all, {', '.join(SYSTEMS)}",
            )
        absent = [folder for folder in folders.split(":") if not Path(folder).is_dir()]
        if absent:
            raise CommandError(what=f"--path {word}: folder not found", where=absent[0])
        paths[system] = ":".join(str(Path(folder).resolve()) for folder in folders.split(":"))
    return paths


def run(plan: Plan, say: Callable[[str], None], on_row: Callable[[Row], None] = lambda row: None) -> Results:
    """`say` gets pieces of text, the line ends in them; `on_row` every new row."""
    results = Results(plan.out / NAME)
    if plan.resume is not None:
        results.take_over(plan.resume)
    if plan.command and plan.command not in results.commands:
        results.commands.append(plan.command)
    jobs = list(plan.jobs())
    due = [
        (number, *job)
        for number, job in enumerate(jobs, 1)
        if not (found := results.get(job[0].name, job[1])) or _again(plan, found)
    ]
    with ends_with_us(), ExitStack() as started:
        ready: Process | None = None
        for at, (number, workload, system) in enumerate(due):
            say(f"[{number}/{len(jobs)}] {workload.name:13} {system:13} ")
            began, current = time.monotonic(), ready or _first_part(plan, workload, system)
            if isinstance(current, Process):
                started.enter_context(current)
            following = due[at + 1][1:] if plan.ahead and at + 1 < len(due) else None
            ready = None
            if following and isinstance(current, Process) and _waits_its_turn(*following):
                ready = started.enter_context(_worker(plan, *following))  # whatever happens to us, it ends
            row = {"workload": workload.name, "system": system, **_second_part(plan, current), "date": _now()}
            results.add(row)
            say(f"{summary(row)}  [{time.monotonic() - began:.0f} s]\n")
            on_row(row)
    results.save()
    (plan.out / PICTURE).write_text(draw(results.rows), encoding="utf-8")
    return results


def _again(plan: Plan, row: Row) -> bool:
    """One that is not installed costs a second, and may be by now."""
    failed = row["status"] != "measured"
    return row["status"] == "not installed" or row["system"] in plan.again or (failed and "failed" in plan.again)


def summary(row: Row) -> str:
    """One line of progress."""
    speed = rate(row)
    if speed is None:
        return why_not(row, 150)
    if row["system"] == CEILING:
        return f"{speed:,.0f} tokens/s, {row['tflops']} TFLOP/s"
    memory = f", {row['peak_gib']} GiB" if row.get("peak_gib") is not None else ""
    unit = "" if "pairs_per_second" in row else " tokens/s"
    return (
        f"{speed_of(row)}{unit}{memory}, first step after {row['seconds_to_first_step']:.1f} s,"
        f" loss {row['loss_first']:.3f} -> {row['loss_last']:.3f}, gradient norm {row['grad_norm']:.3g}"
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _first_part(plan: Plan, workload: Workload, system: str) -> Process | Row:
    """A process that has begun, or what there is to say instead."""
    if system != CEILING and not model_folder(workload.model).is_dir():
        made = launched(plan, workload.name, WEIGHTS, ["-m", "benchmarks.bench.weights", "--model", workload.model]).result(
            plan
        )
        if made["status"] != "measured":
            return made | {"why": f"cannot create the model folder: {made['why']}"}
    if system == CEILING:
        return launched(plan, workload.name, system, ["-m", "benchmarks.bench.ceiling", "--workload", workload.name]).result(
            plan
        )
    return _worker(plan, workload, system)


def _second_part(plan: Plan, begun: Process | Row) -> Row:
    return begun.result(plan) if isinstance(begun, Process) else begun


def _waits_its_turn(workload: Workload, system: str) -> bool:
    """Whether it may begin while another measures: it imports, and waits before it touches the GPU."""
    return system != CEILING and model_folder(workload.model).is_dir()


def _worker(plan: Plan, workload: Workload, system: str) -> Process:
    words = [
        "-m",
        "benchmarks.bench.worker",
        "--system",
        system,
        "--workload",
        workload.name,
        "--warmup",
        str(plan.warmup),
        "--steps",
        str(plan.steps),
        *(["--lengths", str(plan.lengths.resolve())] if plan.lengths else []),
        *(["--turn", str(plan.out.resolve() / "logs" / "turn.lock")] if plan.ahead else []),
    ]
    return launched(plan, workload.name, system, words)


@dataclass(frozen=True)
class Process:
    """Its output is kept beside the results. It ends with the `with` it is in, if not before."""

    system: str
    process: subprocess.Popen[Any]
    log: Path

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            _kill_group(self.process)

    def result(self, plan: Plan) -> Row:
        """Once it has ended, or its time has."""
        try:
            code = self.process.wait(plan.time_limit)
        except subprocess.TimeoutExpired:
            return {"status": "timed out", "why": f"not finished after {plan.time_limit:.0f} s"}
        finally:
            _kill_group(self.process)
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith("RESULT ")]
        if code == 0 and self.system == WEIGHTS:
            return {"status": "measured"}
        if told:  # whatever happened to the process after that
            row: Row = json.loads(told[-1].removeprefix("RESULT "))
            return row
        return {"status": "failed", "why": last_error(lines[1:], code)}


def launched(plan: Plan, name: str, system: str, words: list[str]) -> Process:
    log = plan.out / "logs" / f"{name}.{system}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    (log.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    # One working folder for all: what a system compiles into it, its next process finds again.
    scratch = Path(tempfile.gettempdir()) / "pronghorn-bench-work"
    scratch.mkdir(exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        output.write(f"$ {shlex.join(['python', *words])}\n")
        output.flush()
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=scratch,
            env=environment(plan, system),
            start_new_session=True,
        )
    return Process(system, process, log)


def environment(plan: Plan, system: str) -> dict[str, str]:
    own = SYSTEMS[system].name.split("-")[0] if system in SYSTEMS else system
    chosen = plan.paths.get(system) or plan.paths.get(own) or plan.paths.get("all") or ""
    inherited = os.environ.get("PYTHONPATH", "") if not chosen else ""
    ours = (str(Path(__file__).parents[2]), str(Path(pronghorn.__file__).parent.parent))
    folders = [str(Path(folder).resolve()) for folder in (*chosen.split(":"), *ours, *inherited.split(":")) if folder]
    peer = system in SYSTEMS and system != "pronghorn" and SYSTEMS[system].script != "pronghorn"
    return {**(PEERS_ALLOCATOR if peer else {}), **os.environ, **OFFLINE, "PYTHONPATH": ":".join(folders)}


def last_error(lines: Sequence[str], code: int) -> str:
    """What the last traceback ends with; without one, the last line and the exit code."""
    traces = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if traces:
        after = [line for line in lines[traces[-1] + 1 :] if line.strip() and not line.startswith(" ")]
        if after:
            return after[0].strip()[:400]
    written = [line.strip() for line in lines if line.strip()]
    return f"{written[-1][:400]} (exit code {code})" if written else f"exit code {code}"


def _kill_group(process: subprocess.Popen[Any]) -> None:
    """Also what the process started; it leads its own group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def ends_with_us() -> Iterator[None]:
    """SIGTERM as an exception, so that the running process is ended before we are."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
