"""`python -m benchmarks.bench`: this machine, Pronghorn next to other installed systems: its options, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from pronghorn.cli.output import show, show_error
from pronghorn.errors import CommandError, PronghornError


def options() -> argparse.ArgumentParser:
    one = argparse.ArgumentParser(prog="python -m benchmarks.bench", description="Pronghorn next to other installed systems.")
    one.add_argument("--json", action="store_true", help="one JSON object per result")
    one.add_argument(
        "--workloads", default="", metavar="A,B", help="workloads to run (default: all except tiny, which is for CPUs)"
    )
    one.add_argument(
        "--systems", default="", metavar="A,B", help="systems to compare (default: those listed for each workload)"
    )
    one.add_argument("--steps", type=int, default=20, help="timed steps (default: %(default)s)")
    one.add_argument("--warmup", type=int, default=10, help="untimed warmup steps (default: %(default)s)")
    one.add_argument("--out", default="runs/bench", help="results folder; an existing one is continued (default: %(default)s)")
    one.add_argument(
        "--time-limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="time limit of one measurement process, in seconds (default: %(default)s)",
    )
    one.add_argument("--resume", metavar="FILE", help="reuse results of an earlier side-by-side.json")
    one.add_argument(
        "--again", default="", metavar="A,B", help="measure these systems again; `failed` means those without results"
    )
    one.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="SYSTEM=DIR[:DIR]",
        help="PYTHONPATH of a system's process; SYSTEM may be `all`",
    )
    one.add_argument(
        "--ahead",
        action="store_true",
        help="import the next system's libraries while one is measured: about half the total time, but times to "
        "the first step are not comparable",
    )
    one.add_argument("--lengths", metavar="FILE", help="JSON list of document lengths to sample from")
    return one


def main(words: Sequence[str] | None = None) -> int:
    arguments = options().parse_args(words)
    try:
        bench(arguments)
    except PronghornError as error:
        show_error(error, as_json=arguments.json)
        return error.exit_code
    return 0


def bench(arguments: argparse.Namespace) -> None:
    from benchmarks.bench.side_by_side import PICTURE, Plan, parse_paths, run
    from benchmarks.bench.table import terminal
    from benchmarks.bench.workloads import DEFAULT_WORKLOADS, SYSTEMS, WORKLOADS, pick

    if arguments.steps < 1 or arguments.warmup < 1:
        raise CommandError(
            what="--steps and --warmup must be at least 1", fix="remove them for the defaults, 20 steps after 10 warmup steps"
        )
    plan = Plan(
        out=Path(arguments.out),
        workloads=pick(arguments.workloads, list(WORKLOADS), "workload") or DEFAULT_WORKLOADS,
        systems=pick(arguments.systems, list(SYSTEMS), "system"),
        warmup=arguments.warmup,
        steps=arguments.steps,
        time_limit=arguments.time_limit,
        paths=parse_paths(arguments.path),
        lengths=Path(arguments.lengths) if arguments.lengths else None,
        resume=Path(arguments.resume) if arguments.resume else None,
        again=pick(arguments.again, [*SYSTEMS, "ceiling", "failed"], "system"),
        ahead=arguments.ahead,
        command=_command(arguments),
    )
    if arguments.json:
        run(plan, lambda text: None, lambda row: print(json.dumps(row), flush=True))
        return
    results = run(plan, lambda text: print(text, end="", flush=True))
    show(terminal(results.rows))
    print(f"results: {results.path}\npicture: {plan.out / PICTURE}")


def _command(arguments: argparse.Namespace) -> str:
    """For the results file: how often and how long; folders are this machine's own business."""
    return (
        f"python -m benchmarks.bench --steps {arguments.steps} --warmup {arguments.warmup}"
        + "".join(f" --{name} {value}" for name in ("workloads", "systems") if (value := getattr(arguments, name)))
        + (" --ahead" if arguments.ahead else "")
    )


if __name__ == "__main__":
    raise SystemExit(main())
