"""`pronghorn data audit`: its options, the files that it writes, and what it prints."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pronghorn.cli.output import STARTING, displaying, say, show
from pronghorn.errors import EnvironmentFault, PronghornError
from pronghorn.program import command

if TYPE_CHECKING:
    from pronghorn.data.audit.audit import Speed
    from pronghorn.recipe import Recipe

TEXT = "find copies, leaks, junk and contradictions in the training rows, and what they cost; needs no GPU"

DRIVER = Path("/proc/driver/nvidia/version")  # looked for first: torch takes 5 s to import


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "-o", "--output", type=Path, default=Path("audit"), metavar="FOLDER", help="folder to write to (default: %(default)s)"
    )
    one.add_argument("--gpu", metavar="NAME", help="GPU whose seconds are counted, as in plan (default: this machine's)")


def audit(arguments: argparse.Namespace, recipe: Recipe) -> None:
    folder = arguments.output
    with displaying(arguments) as display:
        from pronghorn.data.audit.audit import collect
        from pronghorn.data.encode.tokens import TokenizerFiles
        from pronghorn.report.audit_page import render_audit
        from pronghorn.report.html import write_text

        display.progress(STARTING, 1, 1)
        tokenizer = TokenizerFiles(recipe.model, recipe.data)  # read only if the rows are not cached
        found = collect(recipe, tokenizer, speed=_speed(recipe, arguments.gpu), progress=display.progress)
        name = Path(arguments.recipe).name
        facts = {"recipe": name, **found.facts, "select": {"file": str(folder / "select.json"), **found.facts["select"]}}
        files = {
            "select.json": found.select,
            "audit.json": json.dumps(facts, indent=1, ensure_ascii=False) + "\n",
            "audit.html": render_audit(facts, name),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                write_text(folder / file, text)
        except OSError as error:
            raise EnvironmentFault.of(error, "cannot write the audit", folder, "choose another folder with -o") from error
    say(arguments, facts, found.table())
    if not arguments.json:
        show(f"page:       {folder / 'audit.html'}")
        if facts["left_out"]["rows"]:
            select = f"data.select={folder / 'select.json'}"
            show(f"train:      {command('train', arguments.recipe, select)}")


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
