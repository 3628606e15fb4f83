"""`pronghorn run script.py [its arguments]`: a script or notebook written for another library, as it is."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pronghorn.cli.output import ignore_ctrl_c, say
from pronghorn.errors import CommandError

TEXT = "run an unmodified Unsloth script or notebook on Pronghorn"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--explain", action="store_true", help="list the translations and what the script uses, without running it"
    )
    one.add_argument("script", nargs="?", help="a .py or .ipynb file")
    one.add_argument("words", nargs="*", default=[], help="arguments of the script")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(what is ours, what is the script's own): all behind the script is, also `--help`, `--json` and `--`."""
    script = next((i for i, word in enumerate(words) if i > 0 and not word.startswith("-")), len(words))
    cut = script + 1 if words[:1] == ["run"] else len(words)
    return list(words[:cut]), list(words[cut:])


def run_script(arguments: argparse.Namespace) -> None:
    if arguments.explain:
        _explain(arguments)
        return
    if arguments.script is None:
        raise CommandError(what="no script to run", fix="pronghorn run script.py, or pronghorn run --explain")
    from pronghorn.compat.scripts.running import exit_code, run, show

    path, own_process, hook = Path(arguments.script), arguments.own_process, sys.excepthook
    try:
        run(arguments.script, arguments.words, own_process=own_process)
    except SystemExit:
        raise  # the script's own
    except BaseException as error:  # noqa: BLE001 - whatever the script lets escape is shown as plain python shows it
        show(error, path, hook)
        if isinstance(error, KeyboardInterrupt):
            ignore_ctrl_c(None)
        raise SystemExit(exit_code(error)) from None


def _explain(arguments: argparse.Namespace) -> None:
    from pronghorn.compat.scripts.explain import as_text, everything, of_script

    if arguments.script is None:
        say(arguments, {"adapted": everything().splitlines()}, everything())
        return
    path = Path(arguments.script)
    found = of_script(path)
    facts: dict[str, Any] = {
        name: [{"where": one.where, "what": one.what} for one in found if one.missing is missing]
        for name, missing in (("adapted", False), ("missing", True))
    }
    say(arguments, facts, as_text(path, found))
