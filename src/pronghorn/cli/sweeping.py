"""`pronghorn sweep`: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pronghorn.cli.output import STARTING, displaying, say, show
from pronghorn.errors import CommandError
from pronghorn.process import importing, started_as
from pronghorn.program import command
from pronghorn.report.stages import Stages

if TYPE_CHECKING:
    from pronghorn.recipe import Recipe

TEXT = "try several values of keys by successive halving, and train the best to its end; the same command resumes"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--budget", metavar="AMOUNT", help="20min, 3USD or 3runs (tokens of so many whole runs); default: what halving takes"
    )
    one.add_argument("--price", type=float, metavar="USD", help="price per GPU hour in USD (default: a list price)")
    one.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="folder to write to (default: the recipe's output and -sweep)"
    )


def sweep(arguments: argparse.Namespace, load: Callable[[Sequence[str]], Recipe]) -> None:
    """`load`: the recipe with such key=value words."""
    if started_as()[1] > 1:
        raise CommandError(what="a sweep runs in one process", fix="start it without torchrun; it uses one GPU")
    stages = Stages()
    with displaying(arguments, stages) as display:
        with stages("imports"), importing():
            from pronghorn.memory.gpus import local_gpu
            from pronghorn.model.load import pick_device
            from pronghorn.report.sweep_page import sweep_table
            from pronghorn.sweep.grid import trials_of
            from pronghorn.sweep.plan import Budget
            from pronghorn.sweep.run import Sweep
        display.progress(STARTING, 1, 1)
        folder, trials = trials_of(arguments.overrides, load, arguments.output)
        gpu = local_gpu(pick_device())
        price = arguments.price if arguments.price is not None else gpu.price if gpu else None
        budget = Budget.of(arguments.budget, price) if arguments.budget else None
        told = (lambda _: None) if arguments.json else lambda text: display.handle({"event": "notice", "text": text})
        name = Path(arguments.recipe).name
        found = Sweep(folder, trials, display=display, budget=budget, price=price, say=told, stages=stages, name=name).run()
    say(arguments, found, sweep_table(found))
    if not arguments.json:
        best = str(folder / found["winner"])
        show(f"page:       {folder / 'sweep.html'}")
        show(f"run:        {best}, finished")
        show(f"chat:       {command('chat', best)}")
