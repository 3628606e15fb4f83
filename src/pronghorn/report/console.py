"""A console that shows control characters instead of obeying them, whatever is printed on it: texts, tables, bars."""

from __future__ import annotations

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
