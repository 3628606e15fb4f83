"""`pronghorn profile`: its options, the files that it writes, and what it prints."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from pronghorn.cli.output import STARTING, displaying, say, show
from pronghorn.cli.starting import own_code, own_rewards
from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.process import started_as, trace_captured_kernels
from pronghorn.program import command

if TYPE_CHECKING:
    from pronghorn.recipe import Recipe

TEXT = "profile some training steps: a trace for Perfetto, time by kernel group, idle time and one line of advice"
NSYS = "nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --capture-range=cudaProfilerApi --capture-range-end=stop"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--steps", type=int, default=20, metavar="N", help="steps under the profiler (default: %(default)s)")
    one.add_argument(
        "-o", "--output", type=Path, default=Path("profile"), metavar="FOLDER", help="folder to write to (default: %(default)s)"
    )
    own_rewards(one)
    nsight = one.add_mutually_exclusive_group()
    nsight.add_argument("--nsys", action="store_true", help="print the command that profiles with Nsight Systems, and end")
    nsight.add_argument("--range", action="store_true", help="mark the steps for Nsight Systems, and write nothing")


def profile(arguments: argparse.Namespace, recipe: Recipe, importing: Callable[[str], AbstractContextManager[None]]) -> None:
    """`importing`: around imports, while a model's weights begin to come from the disk."""
    folder, steps = arguments.output, arguments.steps
    if steps < 1:
        raise CommandError(what=f"--steps {steps} is not a number of steps", fix="use --steps 1 or more")
    if arguments.nsys:
        words = [word for word in arguments.given if word not in ("--nsys", "--json")]
        line = f"{NSYS} -o {shlex.quote(f'{folder}-nsys')} {command(*words, '--range')}"
        say(arguments, {"command": line}, line)
        return
    if started_as()[1] > 1:
        raise CommandError(what="profile measures one rank", why="WORLD_SIZE is set", fix="start it without torchrun or srun")
    trace_captured_kernels()
    from pronghorn.report.stages import Stages

    stages = Stages()
    with displaying(arguments, stages) as display:
        if not arguments.range:
            _write(folder)
        with stages("imports"), importing(recipe.model):
            import gzip

            from pronghorn.report.profile import table
            from pronghorn.train.run.profiling import profile_run
        display.progress(STARTING, 1, 1)
        marks, files = arguments.range, own_code(arguments)
        facts, trace = profile_run(recipe, steps, display=display, stages=stages, marks=marks, **files)
    if trace is None:
        told = facts["phases"]["profiled"]
        say(arguments, facts, f"marked {told['steps']} steps, {told['ms']:,.2f} ms each")
        return
    facts = {"recipe": Path(arguments.recipe).name, **facts, "trace": str(folder / "trace.json.gz")}
    _write(folder, {
        "trace.json.gz": gzip.compress(json.dumps(trace, allow_nan=False).encode(), 6),
        "profile.json": (json.dumps(facts, indent=1, allow_nan=False) + "\n").encode(),
    })  # fmt: skip
    say(arguments, facts, table(facts))
    if not arguments.json:
        show(f"trace       {folder / 'trace.json.gz'}: open it at https://ui.perfetto.dev, which keeps it in the browser")


def _write(folder: Path, files: dict[str, bytes] | None = None) -> None:
    """Called without files first: a folder that cannot be written is told before the steps, not after them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (files or {}).items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise EnvironmentFault.of(error, "cannot write the profile", folder, "choose another folder with -o") from error
