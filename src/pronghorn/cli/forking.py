"""`pronghorn fork`: its options, and what it prints."""

from __future__ import annotations

import argparse
import io
from pathlib import Path
from typing import TYPE_CHECKING

from pronghorn.cli.output import say
from pronghorn.process import importing
from pronghorn.program import command

if TYPE_CHECKING:
    from pronghorn.recipe import Recipe

TEXT = "begin a new run with a checkpoint of another, with the same or changed recipe keys"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument("run", help="a run's output folder")
    one.add_argument("new", help="the new run's folder")
    one.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="recipe keys that change: train.lr=1e-4")
    one.add_argument("--checkpoint", type=int, required=True, metavar="N", help="the step to go on from")


def fork(arguments: argparse.Namespace) -> None:
    with importing():
        from pronghorn.train.checkpoint.fork import fork
        from pronghorn.train.run.run_folder import RECIPE_NAME

    folder = fork(Path(arguments.run), arguments.checkpoint, lambda then: _changed(then, arguments.overrides, arguments.new))
    go_on = command("train", str(folder / RECIPE_NAME))
    told = {"written": str(folder), "step": arguments.checkpoint, "next": go_on}
    say(arguments, told, f"wrote {folder}, which goes on after step {arguments.checkpoint}; next: {go_on}")


def _changed(then: Recipe, words: list[str], output: str) -> tuple[Recipe, str]:
    """The recipe of a checkpoint with these keys, and its text."""
    from ruamel.yaml import YAML

    from pronghorn.recipe_file import parse_recipe, scalar

    def text_of(recipe: Recipe) -> str:
        written = io.StringIO()
        YAML().dump(recipe.model_dump(mode="json", exclude_defaults=True), written)
        return written.getvalue()

    now = parse_recipe(text_of(then), [*words, f"output={scalar(output)}"])
    return now, text_of(now)
