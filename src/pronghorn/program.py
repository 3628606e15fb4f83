"""Commands of this program, as people can type them: `pronghorn` where the shell finds this very program under that name, else
the path of the script that runs, for instance `.venv/bin/pronghorn`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

NAME = "pronghorn"
VERBS = "demo|new|check|plan|profile|data|train|fork|sweep|launch|queue|eval|chat|serve|export|verify|studio|run|runs"
_NAMED = re.compile(rf"(?<![\w./-]){NAME} (?=(?:{VERBS})\b)")


def program() -> str:
    """Ready for a shell. The script is the one that was started, or the one that pip installed for this interpreter."""
    scripts = [Path(sys.argv[0]), Path(sys.executable).with_name(NAME), Path(sysconfig.get_path("scripts"), NAME)]
    script = next((one for one in scripts if one.name == NAME and one.is_file() and os.access(one, os.X_OK)), None)
    if script is None:
        return f"{shlex.quote(_short(Path(sys.executable)))} -m {NAME}.cli"
    found = shutil.which(NAME)
    return NAME if found and script.samefile(found) else shlex.quote(_short(script))


def module(name: str) -> list[str]:
    """Starts a module in a process of its own. -P: else a file of the working folder called like a library, such as `torch.py`,
    would run in its place."""
    return [sys.executable, "-P", "-m", name]


def command(*words: str) -> str:
    return f"{program()} {shlex.join(words)}"


def runnable(text: str) -> str:
    """A sentence of ours, with its commands as they can be typed here."""
    return _NAMED.sub(lambda _: f"{program()} ", text)


def _short(path: Path) -> str:
    """From the working folder, where it is below it."""
    path = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow the link of a virtual environment's python
    here = Path.cwd()
    if path.parent == here:
        return f"./{path.name}"
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
