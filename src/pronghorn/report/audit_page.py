"""audit.html: what each reason of `pronghorn data audit` found, from what audit.json has: examples side by side, in which words
that differ are marked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from html import escape
from typing import Any

from pronghorn.report import number_format
from pronghorn.report.html import page_of

COLOURS = ("--bad", "--eval", "--train", "--warn", "--faint")  # of the reasons, in their order


def render_audit(facts: Mapping[str, Any], name: str) -> str:
    """`name`: of the recipe."""
    reasons = facts["reasons"]
    head = (
        f'<header><div class="brand">Pronghorn</div><div class="title"><h1>{escape(name)}: data audit</h1></div>'
        f'<p class="sub">What the training rows are worth, before the first step.</p></header>'
    )
    remarks = "".join(f"<li>{escape(remark)}</li>" for remark in facts["remarks"])
    notes = f'<h2>Notices</h2><div class="card"><ul class="notices">{remarks}</ul></div>' if remarks else ""
    body = [head, _tiles(facts), _overview(facts), *(_section(one, colour) for one, colour in _coloured(reasons)), notes]
    return page_of(f"{name}: data audit", body, "Made by Pronghorn from audit.json.")


def _coloured(reasons: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    return [(one, COLOURS[number % len(COLOURS)]) for number, one in enumerate(reasons)]


def _tiles(facts: Mapping[str, Any]) -> str:
    left, speed = facts["left_out"], facts["speed"]
    share = f"{number_format.percent(left['tokens'] / max(1, facts['tokens']))} of all tokens"
    seconds = "name a GPU with --gpu" if speed is None else f"of {number_format.duration(facts['seconds'])} on {speed['gpu']}"
    tiles = [
        ("to train on", f"{facts['rows']:,}", f"{facts['unit']}s, {facts['held_out']:,} held out"),
        ("tokens", number_format.count(facts["tokens"]), "per epoch"),
        ("can be left out", f"{left['rows']:,}", share),
        ("GPU time for these", number_format.duration(left["seconds"]), seconds),
    ]
    return '<dl class="tiles">' + "".join(
        f'<div class="tile"><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for label, value, more in tiles
    ) + "</dl>"  # fmt: skip


def _overview(facts: Mapping[str, Any]) -> str:
    coloured, most = _coloured(facts["reasons"]), max(1, *(one["tokens"] for one in facts["reasons"]))
    rows = "".join(
        f'<tr><td class="key"><i style="background:var({colour})"></i>{escape(one["title"])}</td>'
        f'<td class="bar"><div style="width:{100 * one["tokens"] / most:.2f}%;background:var({colour})"></div></td>'
        f'<td class="n">{one["rows"]:,}</td><td class="n">{one["tokens"]:,}</td>'
        f'<td class="n">{number_format.duration(one["seconds"])}</td>'
        f'<td class="n">{format(one["left_out"], ",") if one["leaves_out"] else "never"}</td></tr>'
        for one, colour in coloured
    )
    head = "".join(f'<th class="n">{name}</th>' for name in ("rows", "tokens", "GPU time", "left out"))
    return (
        f'<h2>Rows by reason</h2><div class="card"><table class="stages"><tr><th>reason</th><th class="bar"></th>{head}</tr>'
        f'{rows}</table><p class="note">A row with several reasons is left out by the first. select.json names each row '
        "that is left out; remove a line there to keep one.</p></div>"
        '<p class="advice"><b>To train without them:</b> data.select: '
        f"{escape(facts['select']['file'])} "
        "<span>— and, to know whether the choice helps more than fewer rows do, once with data.select: "
        f"{{random: {_random(facts)}}}</span></p>"
    )


def _random(facts: Mapping[str, Any]) -> str:
    """The share of rows that stay."""
    return f"{1 - facts['left_out']['rows'] / max(1, facts['rows']):.3g}"


def _section(one: Mapping[str, Any], colour: str) -> str:
    notes = " · ".join(f"{escape(note)}: {count:,}" for note, count in one["notes"].items())
    head = f"<h2>{escape(one['title'].capitalize())}</h2>"
    if not one["rows"]:
        return f'{head}<div class="card"><p>{escape(one["why"])}</p><p class="none">none</p></div>'
    tables = "".join(_example(example) for example in one["examples"])
    return (
        f'{head}<div class="card" style="border-left:4px solid var({colour})">'
        f'<p>{escape(one["why"])}</p><p class="note">{escape(one["risk"])}{" " * bool(notes)}{notes}</p>{tables}</div>'
    )


def _example(example: Mapping[str, Any]) -> str:
    text, beside = example["text"], example.get("beside_text", example["text"])
    cells = [_cell(example["row"], text, beside)]
    if "beside" in example:
        cells.append(_cell(example["beside"] + ", held out" * example["beside_held_out"], beside, text))
    heads = "".join(f"<th>{escape(label)}</th>" for label, _ in cells)
    shown = "".join(cell for _, cell in cells)
    return (
        f'<h4 class="spaced">{escape(example["note"])}</h4>'
        f'<table class="answers pair"><thead><tr>{heads}</tr></thead><tbody><tr>{shown}</tr></tbody></table>'
    )


def _cell(label: str, text: str, other: str) -> tuple[str, str]:
    return label, f'<td data-label="{escape(label)}"><div class="said">{_marked(text, other)}</div></td>'


def _marked(text: str, other: str) -> str:
    """The words that the other text does not have in this place are marked."""
    words, others = re.findall(r"\s+|\S+", text), re.findall(r"\s+|\S+", other)
    blocks = SequenceMatcher(None, [word.lower() for word in words], [word.lower() for word in others])
    shown = []
    for kind, start, stop, _, _ in blocks.get_opcodes():
        part = escape("".join(words[start:stop]))
        shown.append(part if kind == "equal" or not part.strip() else f"<mark>{part}</mark>")
    return "".join(shown)
