"""Exports of checkpoints that tests make by hand."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pronghorn.export import child
from pronghorn.export.job import Options
from pronghorn.export.run import Written, export_trained
from pronghorn.export.targets import asked_for
from pronghorn.recipe import Recipe
from pronghorn.train.run.trained_run import Trained

child_run = child.run


def export(
    checkpoint: Path, recipe: Recipe, target: Path, to: str, figures: dict[str, Any] | None = None, **options: Any
) -> Written:
    """One target, not checked unless asked for."""
    (asked,) = asked_for(to)
    (written,) = export_trained(
        Trained(checkpoint, recipe), [(asked, target)], figures or {}, Options(**{"check": False, **options})
    )
    return written


def forked(arguments: list[str], folder: Path, tick: Callable[[], None] = lambda: None) -> child.Ended:
    """As child.run, in a copy of this process, which has imported torch and transformers already: 4 s each time. llama.cpp
    gets a process of its own all the same."""
    script = next(one for one in arguments if one.endswith(".py"))
    if Path(script).name == "llama_cpp_child.py":
        return child_run(arguments, folder, tick)
    with tempfile.TemporaryFile() as log:
        number = os.fork()
        if not number:
            code = 1
            try:
                for output in (1, 2):
                    os.dup2(log.fileno(), output)
                os.chdir(folder)
                sys.argv = arguments[arguments.index(script) :]
                runpy.run_path(script, run_name="__main__")
                code = 0
            except BaseException:  # noqa: BLE001 the parent reads it
                os.write(2, traceback.format_exc().encode())
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
        log.seek(0)
        return child.Ended(code, log.read().decode())
