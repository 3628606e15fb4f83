"""The table of a sweep for a terminal, and sweep.html, from what sweep.json has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pronghorn.report import number_format
from pronghorn.report.html import page_of
from pronghorn.report.plots import Plot, Series, draw

COLUMNS = ("trial", "keys", "tokens", "loss ± SE", "GPU time", "why it ended")


def sweep_table(facts: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(name, overflow="fold", justify="right" if name in COLUMNS[2:5] else "left")
    for row in _best_first(facts):
        style = "green" if row["trial"] == facts["winner"] else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(row)))
    tokens, seconds = _spent(facts)
    table.add_row("all", "", f"{tokens:,}", "", number_format.duration(seconds), "")
    return table


def render_sweep(facts: Mapping[str, Any]) -> str:
    title, rows = f"{facts['recipe']}: sweep", _best_first(facts)
    head = (
        f'<header><div class="brand">Pronghorn</div><div class="title"><h1>{escape(title)}</h1></div>'
        f'<p class="sub">{escape(facts["told"])}</p></header>'
    )
    heads = "".join(f'<th class="{_class(name)}">{name}</th>' for name in COLUMNS)
    lines = "".join(f"<tr>{_line(row)}</tr>" for row in rows)
    shown = f'<h2>Trials</h2><div class="card wide"><table class="stages"><tr>{heads}</tr>{lines}</table></div>'
    note = (
        '<p class="note">Held-out losses after a short decay, which is thrown away; of the last rung, at its end. Trials '
        "of one rung have seen the same rows. Standard errors are over rows.</p>"
    )
    body = [head, _tiles(facts, rows), "<h2>Losses</h2>", draw(_plot(facts, rows)), shown, note]
    return page_of(title, body, "Made by Pronghorn from sweep.json.")


def _plot(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Plot:
    """Trials that ended early are single points, or short lines below the winner's colour."""
    series = []
    for row in reversed(rows):  # the winner is drawn last, above the others
        won = row["trial"] == facts["winner"]
        points = [(float(one["step"]), float(one["loss"])) for one in row["rungs"] if one["loss"] is not None]
        series.append(Series(row["trial"], "eval" if won else "train", points, "line" if won else "faint", won))
        series.append(Series(row["trial"], "eval" if won else "train", points, "dots", False))
    return Plot("at each rung", series, tall=True, unit="loss", log=True)


def _tiles(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    won = rows[0]
    tokens, spent = _spent(facts)
    best = [
        ("winner", won["trial"], _keys(won)),
        ("held-out loss", number_format.figure(won["loss"]), f"± {number_format.figure(won['error'])}, at its end"),
    ]
    tiles = [
        *(best if facts["winner"] else [("winner", "none", "every trial diverged")]),
        ("trials", f"{len(rows)}", f"{len(facts['rungs']['shares'])} rungs"),
        ("tokens", number_format.count(tokens), "read by all trials"),
        ("GPU time", number_format.duration(spent), f"{number_format.duration(facts['seconds'])} with loading"),
    ]
    return '<dl class="tiles">' + "".join(
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for label, value, more in tiles
    ) + "</dl>"  # fmt: skip


def _spent(facts: Mapping[str, Any]) -> tuple[int, float]:
    """Tokens that all trials read, decays and evaluations aside, and seconds of the GPU, those included."""
    return sum(row["tokens"] for row in facts["trials"]), sum(row["seconds"] for row in facts["trials"])


def _best_first(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The winner, then those that came farthest, the lower loss first; those that diverged have none."""
    return sorted(
        facts["trials"],
        key=lambda row: (row["trial"] != facts["winner"], -len(row["rungs"]), row["loss"] is None, row["loss"] or 0.0),
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    loss = "–" if row["loss"] is None else f"{number_format.figure(row['loss'])} ± {number_format.figure(row['error'])}"
    return row["trial"], _keys(row), f"{row['tokens']:,}", loss, number_format.duration(row["seconds"]), row["ended"]


def _line(row: Mapping[str, Any]) -> str:
    return "".join(f'<td class="{_class(name)}">{escape(cell)}</td>' for name, cell in zip(COLUMNS, _cells(row), strict=True))


def _keys(row: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in row["keys"].items())


def _class(name: str) -> str:
    return "n" if name in COLUMNS[2:5] else "key" if name == COLUMNS[0] else ""
