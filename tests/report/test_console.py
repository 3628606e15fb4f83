"""Whatever is printed, control characters in it are shown, and rich's own colours stay."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from pronghorn.report.console import PipeConsole, SafeConsole
from pronghorn.report.display import LiveDisplay, PlainDisplay

HOSTILE = "a\x1b[2Jb\x07c\x9bd\re"
SHOWN = r"a\x1b[2Jb\x07c\x9bd\x0de"


def test_texts_and_tables() -> None:
    out = io.StringIO()
    console = SafeConsole(file=out, force_terminal=True, color_system="truecolor", no_color=False, width=200)
    table = Table()
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE, style="red"))
    for renderable in (HOSTILE, Text(HOSTILE, style="bold green"), table):
        console.print(renderable, markup=False, highlight=False)
    printed = out.getvalue()
    assert "\x1b[1;32m" in printed  # rich's own
    for part in ("\x1b[2J", "\x07", "\x9b"):
        assert part not in printed
    assert "x1b[2J" in printed


def test_a_broken_pipe_is_for_the_command_line() -> None:
    with pytest.raises(BrokenPipeError):
        PipeConsole(file=io.StringIO()).on_broken_pipe()


def test_displays(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "checkpoint", "step": 1, "path": HOSTILE, "bytes": 1, "seconds": 1.0}
    PlainDisplay().handle(event)
    assert SHOWN in capsys.readouterr().out
    for reason, why in (("early stop", ": no gain"), ("health", ""), ("error", "")):  # the command shows errors itself
        PlainDisplay().handle({"event": "end", "reason": reason, "why": "no gain", "step": 1})
        assert capsys.readouterr().out.endswith(f"after 1 step{why}\n"), reason
    out = io.StringIO()
    live = LiveDisplay(SafeConsole(file=out, force_terminal=True, width=200))
    live.handle(event)
    live.close()
    assert "\x1b[2Jb" not in out.getvalue()
    assert "x1b[2Jb" in out.getvalue()
