"""`pronghorn data audit`: its options, the files that it writes, and what it prints."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from pronghorn.cli.output import STARTING, displaying, say, show
from pronghorn.errors import CommandError, EnvironmentFault, PronghornError
from pronghorn.program import command

if TYPE_CHECKING:
    from pronghorn.data.audit.audit import Speed
    from pronghorn.data.audit.scores import RowScores, Scoring
    from pronghorn.data.encode.tokens import TokenTable
    from pronghorn.recipe import Recipe
    from pronghorn.report.display import Display

TEXT = "find copies, leaks, junk and contradictions in the training rows, and what they cost; without --score, needs no GPU"

DRIVER = Path("/proc/driver/nvidia/version")  # looked for first: torch takes 5 s to import


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "-o", "--output", type=Path, default=Path("audit"), metavar="FOLDER", help="folder to write to (default: %(default)s)"
    )
    one.add_argument("--gpu", metavar="NAME", help="GPU whose seconds are counted, as in plan (default: this machine's)")
    one.add_argument("--run", type=Path, metavar="FOLDER", help="an earlier run: losses of the rows, from its rows.jsonl")
    one.add_argument("--score", action="store_true", help="one forward pass of the model over all rows; tells its price first")
    one.add_argument("--yes", action="store_true", help="with --score on a terminal: the price is accepted")
    one.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="REASON:SHARE",
        help="also leave out up to this share of all rows: off-task:0.2 (with --score), known:0.1 (known rows alone)",
    )


def audit(arguments: argparse.Namespace, recipe: Recipe) -> None:
    folder, leave_out = arguments.output, _leave_out(arguments, recipe)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before a scoring pass, whose losses could not be written
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_written(error, folder) from error
    with displaying(arguments) as display:
        from pronghorn.data.audit.audit import collect
        from pronghorn.data.encode.tokens import TokenizerFiles
        from pronghorn.report.audit_page import render_audit
        from pronghorn.report.html import write_text

        display.progress(STARTING, 1, 1)
        tokenizer = TokenizerFiles(recipe.model, recipe.data)  # read only if the rows are not cached
        speed = _speed(recipe, arguments.gpu)
        scoring = _scoring(arguments, recipe, display, speed)
        found = collect(recipe, tokenizer, speed=speed, scoring=scoring, leave_out=leave_out, progress=display.progress)
        name = Path(arguments.recipe).name
        facts = {"recipe": name, **found.facts, "select": {"file": str(folder / "select.json"), **found.facts["select"]}}
        files = {
            "select.json": found.select,
            "audit.json": json.dumps(facts, indent=1, ensure_ascii=False) + "\n",
            "audit.html": render_audit(facts, name),
            **({"scores.jsonl": found.scores} if found.scores else {}),
        }
        try:
            for file, text in files.items():
                write_text(folder / file, text)
        except OSError as error:
            raise _not_written(error, folder) from error
    say(arguments, facts, found.table())
    if not arguments.json:
        show(f"page:       {folder / 'audit.html'}")
        if facts["left_out"]["rows"]:
            select = f"data.select={folder / 'select.json'}"
            kept = [word for word in arguments.overrides if not word.startswith(("output=", "data.select="))]
            show(f"train:      {command('train', arguments.recipe, *kept, select, f'output={_free(recipe.output)}')}")


def _not_written(error: OSError, folder: Path) -> EnvironmentFault:
    return EnvironmentFault.of(error, "cannot write the audit", folder, "choose another folder with -o")


def _free(output: str) -> str:
    """A folder without a run: one that exists goes on with the rows that it has."""
    first = f"{output}-selected"
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not Path(name).exists())


def _leave_out(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, float]:
    """The shares by reason; refused are those that nothing is known for."""
    scored = arguments.run is not None or arguments.score
    if scored and recipe.objective.kind.reads != "documents":
        raise CommandError(
            what=f"objective {recipe.objective} has no loss of each row",
            fix="remove --run and --score; the other reasons remain",
        )
    if arguments.run is not None and arguments.score:
        raise CommandError(what="--run and --score both give losses of the rows", fix="use one of them")
    found = {}
    for text in arguments.leave_out:
        name, _, share = text.partition(":")
        try:
            found[name.replace("-", "_")] = number = float(share)
        except ValueError:
            number = 0.0
        if name not in ("off-task", "known") or not 0 < number < 1:
            raise CommandError(
                what=f"--leave-out {text} is not a reason and a share of the rows", fix="write off-task:0.2 or known:0.1"
            )
    if found and not (arguments.score or (scored and "off_task" not in found)):
        needs = "--score" if "off_task" in found else "--run FOLDER or --score"
        raise CommandError(what=f"--leave-out needs {needs}", why="nothing else tells which rows these are", fix=f"add {needs}")
    return found


def _scoring(arguments: argparse.Namespace, recipe: Recipe, display: Display, speed: Speed | None) -> Scoring | None:
    from pronghorn.data.audit.scores import of_run

    if arguments.run is not None:
        return lambda table, held: of_run(arguments.run, table)
    if not arguments.score:
        return None

    def score(table: TokenTable, held: TokenTable | None) -> RowScores:
        from pronghorn.train.run.row_scores import score_rows

        tokens = int(table.lengths.sum()) + (0 if held is None else int(held.lengths.sum()))
        forward = 1 / 3 if recipe.method == "full" else 1 / 2  # of a step: without the products of backward
        price = "GPU seconds are unknown: name a GPU with --gpu"
        if speed is not None:
            price = f"about {tokens / speed.tokens_per_second * forward:,.1f} s on {speed.gpu}, and loading the model"
        told = f"--score: {tokens:,} tokens forward through the model, {price}"
        if sys.stdin.isatty() and not (arguments.yes or arguments.json):
            raise CommandError(what=f"{told}; nothing was computed yet", fix="add --yes to go on")
        display.handle({"event": "notice", "text": told})
        return score_rows(recipe, table, held, display.progress)

    return score


def _speed(recipe: Recipe, gpu: str | None) -> Speed | None:
    """The plan's, on the GPU that is named, or on this machine's if there is one and the run can be planned."""
    if gpu is None and not DRIVER.exists():
        return None
    import torch

    from pronghorn.data.audit.audit import Speed
    from pronghorn.train.run.run_forecast import forecast

    if gpu is None and not torch.cuda.is_available():
        return None
    try:
        (found,) = forecast(recipe, gpu=gpu)
    except PronghornError:
        if gpu is not None:
            raise
        return None
    return Speed(found.gpu.sold_as, found.tokens_per_second)
