"""What the command line prints: results and errors, for people and for machines, on terminals, pipes and closed outputs."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronghorn.errors import Interrupted, Problems, PronghornError
from pronghorn.program import runnable

if TYPE_CHECKING:
    from pronghorn.report.display import Display
    from pronghorn.report.stages import Stages

STARTING = "starting"


def make_printable() -> None:
    """A terminal that is not UTF-8 gets `?` for what it cannot show, and a process without standard output or error is no
    error."""
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def forget_output() -> None:
    """Python flushes once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ignore_ctrl_c(words: Sequence[str] | None) -> None:
    """A second one would leave a traceback of the interpreter's end. Only where the process is ours."""
    if words is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def show_error(error: PronghornError, *, as_json: bool) -> None:
    for one in error.problems if isinstance(error, Problems) else [error]:
        one.fix = runnable(one.fix)
    if as_json:
        print(json.dumps(error.as_dict()))
        return
    from rich.text import Text

    from pronghorn.report.console import SafeConsole

    style = "yellow" if isinstance(error, Interrupted) else "bold red"
    with suppress(OSError):  # the terminal is gone; the exit code still tells
        SafeConsole(stderr=True, soft_wrap=True).print(Text(str(error), style=style))


@contextmanager
def displaying(
    arguments: argparse.Namespace, stages: Stages | None = None, label: str = STARTING, *, quiet: bool = False
) -> Iterator[Display]:
    """From before the heavy imports on: those alone take 5 s on two CPU cores, and nobody likes a silent terminal. `quiet`: a
    rank that leaves it to another to show the run; it has no events, which is all that the display for machines shows."""
    from pronghorn.report.display import make_display

    display = make_display(json=arguments.json or quiet, stages=stages)
    try:
        display.progress(label, 0, 0)
        yield display
    finally:
        display.close()


def say(arguments: argparse.Namespace, as_dict: dict[str, Any], for_people: object) -> None:
    if arguments.json:
        from pronghorn.report.run_log import plain

        print(json.dumps(plain(as_dict), allow_nan=False))  # ASCII, whatever the pipe's encoding
    else:
        show(for_people)


def show(renderable: object) -> None:
    from pronghorn.report.console import result_console

    console = result_console(soft_wrap=isinstance(renderable, str))
    console.print(renderable, crop=console.is_terminal)  # a pipe has no width


def coloured() -> bool:
    from rich.console import Console

    return Console().color_system is not None and not Console().no_color
