"""`pronghorn sweep`: its options, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from pronghorn.cli.output import STARTING, displaying, say, show
from pronghorn.errors import CommandError, HealthStop
from pronghorn.process import importing, started_as
from pronghorn.program import command

TEXT = "try several values of keys by successive halving, and train the best to its end; the same command resumes"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--budget", metavar="AMOUNT", help="20min, 3USD or 3runs (tokens of so many whole runs); default: 0.4 of the grid"
    )
    one.add_argument("--price", type=float, metavar="USD", help="price per GPU hour in USD (default: a list price)")
    one.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="folder to write to (default: the recipe's output and -sweep)"
    )


def sweep(arguments: argparse.Namespace, look_for_hub: Callable[[str], None]) -> None:
    if started_as()[1] > 1:
        raise CommandError(what="a sweep runs in one process", fix="start it without torchrun; it uses one GPU")
    with displaying(arguments) as display:
        with importing():
            from pronghorn.memory.gpus import local_gpu
            from pronghorn.model.load import pick_device
            from pronghorn.recipe_file import load_recipe
            from pronghorn.report.sweep_page import sweep_table
            from pronghorn.sweep.grid import trials_of
            from pronghorn.sweep.plan import Budget
            from pronghorn.sweep.run import Sweep
        display.progress(STARTING, 1, 1)
        folder, trials = trials_of(arguments.overrides, lambda words: load_recipe(arguments.recipe, words), arguments.output)
        look_for_hub(trials[0].recipe.model)
        gpu = local_gpu(pick_device())
        price = arguments.price if arguments.price is not None else gpu.price if gpu else None
        budget = Budget.of(arguments.budget, price) if arguments.budget else None
        told = (lambda _: None) if arguments.json else lambda text: display.handle({"event": "notice", "text": text})
        name = Path(arguments.recipe).name
        found = Sweep(folder, trials, display=display, budget=budget, price=price, say=told, name=name).run()
    say(arguments, found, sweep_table(found))
    if not arguments.json:
        show(f"page:       {folder / 'sweep.html'}")
    if found["winner"] is None:
        arguments.json = False  # its one object is the table; the message goes to standard error
        raise HealthStop(
            what="every trial diverged",
            where=str(folder),
            why=found["trials"][0]["ended"],
            fix="sweep lower values of train.lr, in another folder (-o)",
        )
    if not arguments.json:
        best, ended = next((row["folder"], row["ended"]) for row in found["trials"] if row["trial"] == found["winner"])
        show(f"run:        {best}, {ended.partition('; ')[2]}")
        show(f"chat:       {command('chat', best)}")
