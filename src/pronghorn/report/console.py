"""A console that shows control characters instead of obeying them, whatever is printed on it: texts, tables, bars."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pronghorn.errors import printable


class SafeConsole(Console):
    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """rich adds its own escape sequences after this, from styles; what stands in the text comes from files."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class PipeConsole(SafeConsole):
    """For results: rich would leave with exit code 1 when nobody reads them any more; the command line decides."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def result_console(**options: Any) -> Console:
    return PipeConsole(highlight=False, markup=False, **options)


def say_now(line: str, terminal_code: str = "") -> None:
    """Straight to file descriptor 2: `print` is not re-entrant, and a signal may arrive in the middle of one."""
    with contextlib.suppress(OSError):  # stderr may be closed or its reader gone; the signal still counts
        if os.isatty(2):
            line = f"{terminal_code}\n{line}"  # the terminal has just echoed ^C
        os.write(2, f"{line}\n".encode())
