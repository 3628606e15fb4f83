"""The curves of quality.py as one SVG: held-out losses on the left, how far each is from what it is held against on the right.

As benchmarks/bench/picture.py's, it brings its own ground and follows the reader's light or dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from pronghorn.report.plots import tick_text, ticks

WIDTH, TOP, BOTTOM = 960, 84, 340
LEFT_PANEL, RIGHT_PANEL = (64, 450), (560, 936)
Point = tuple[float, float]
STYLE = """
.ground{fill:#faf9f7;stroke:#e7e3dc}.ink{fill:#1d1b18}.soft{fill:#6b665e}.grid{stroke:#e2ddd4}.zero{stroke:#a39d93}
.band{fill:#efece6}text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.title{font-size:17px;font-weight:600}
.bold{font-weight:600}.line{fill:none;stroke-width:2}.c0{stroke:#6b665e}.c1{stroke:#1f5f99}.c2{stroke:#c05a1c}.c3{stroke:#8a7ab8}
.c4{stroke:#2e8b57}.c5{stroke:#b5275a}.c6{stroke:#7a5c1e}.c7{stroke:#0f8b8d}
@media(prefers-color-scheme:dark){.ground{fill:#151412;stroke:#302d29}.ink{fill:#edeae5}.soft{fill:#a09a90}.grid{stroke:#2b2825}
.zero{stroke:#6e6961}.band{fill:#22201d}.c0{stroke:#a09a90}.c1{stroke:#6ea8dc}.c2{stroke:#f0894a}.c3{stroke:#b3a5e0}
.c4{stroke:#62c08b}.c5{stroke:#ee6b98}.c6{stroke:#d1ac5e}.c7{stroke:#4fc7c9}}
"""


@dataclass(frozen=True)
class Panel:
    """A frame with its scales: x are steps, y what is drawn."""

    sides: tuple[int, int]
    last_step: float
    low: float
    high: float

    def place(self, step: float, value: float) -> Point:
        left, right = self.sides
        share = (min(self.high, max(self.low, value)) - self.low) / (self.high - self.low)
        return left + (right - left) * step / self.last_step, BOTTOM - (BOTTOM - TOP) * share

    def frame(self, unit: str) -> list[str]:
        left, right = self.sides
        parts = []
        for value in ticks(self.low, self.high):
            y = self.place(0, value)[1]
            kind = "zero" if value == 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(_text(left - 8, y + 4, f"{value:g}{unit}" if unit else tick_text(value), "soft", "end"))
        for step in ticks(0, self.last_step, 4):
            parts.append(_text(self.place(step, self.low)[0], BOTTOM + 18, tick_text(step), "soft", "middle"))
        return parts

    def line(self, points: Sequence[Point], colour: int) -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.place(*point) for point in points))
        return f'<polyline class="line c{colour}" points="{path}"/>'


def draw(result: dict[str, Any]) -> str:
    runs = result["results"]
    last_step = max(1, runs[0]["held_out"][-1][0])
    values = [loss for run in runs for step, loss in run["held_out"]]
    spread = max(values) - min(values) or 1.0
    left = Panel(LEFT_PANEL, last_step, min(values) - 0.05 * spread, max(values) + 0.05 * spread)
    parts = [*left.frame(""), *(left.line(run["held_out"], number) for number, run in enumerate(runs))]
    differences = _differences(result)
    if differences:
        widest = max(1.2, *(1.1 * abs(value) for _, points in differences for _, value in points))
        right = Panel(RIGHT_PANEL, last_step, -widest, widest)
        top, bottom = right.place(0, 1.0)[1], right.place(0, -1.0)[1]
        parts.append(
            f'<rect class="band" x="{RIGHT_PANEL[0]}" y="{top:.1f}" width="{RIGHT_PANEL[1] - RIGHT_PANEL[0]}"'
            f' height="{bottom - top:.1f}"/>'
        )
        parts += [*right.frame(" %"), *(right.line(points, number) for number, points in differences)]
        parts.append(_text(RIGHT_PANEL[0], 70, "above or below what it is held against; shaded: 1 %", "ink bold"))
    parts.append(_text(LEFT_PANEL[0], 70, "held-out loss", "ink bold"))
    parts += _legend(result)
    machine, title = result["machine"], f"{result['model']}: the same batches, other arithmetic"
    where = f"{machine['hardware']}, torch {machine['versions']['torch']}, {machine['date'][:10]}"
    head, height = [_text(24, 32, title, "ink title"), _text(24, 50, where, "soft")], BOTTOM + 50 + 20 * len(runs)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        f' aria-label="{escape(title)}"><style>{STYLE}</style><rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}"'
        f' height="{height - 1}" rx="12"/>' + "".join(head + parts) + "</svg>\n"
    )


def _differences(result: dict[str, Any]) -> list[tuple[int, list[Point]]]:
    """(number of the run, percent above the one it is held against at each look)"""
    curves = {run["form"]: dict(run["held_out"]) for run in result["results"]}
    numbers = {form: number for number, form in enumerate(curves)}
    return [
        (
            numbers[one["form"]],
            [(step, 100 * (loss / curves[one["against"]][step] - 1)) for step, loss in curves[one["form"]].items()],
        )
        for one in result["verdicts"]
        if one["allowed"] is not None
    ]


def _legend(result: dict[str, Any]) -> list[str]:
    parts, titles = [], {run["form"]: run["title"] for run in result["results"]}
    against = {one["form"]: one["against"] for one in result["verdicts"] if one["allowed"] is not None}
    for number, run in enumerate(result["results"]):
        x, y = LEFT_PANEL[0], BOTTOM + 46 + 20 * number
        parts.append(f'<line class="line c{number}" x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}"/>')
        held = f", held against {titles[against[run['form']]]}" if run["form"] in against else ""
        parts.append(_text(x + 30, y, f"{run['title']}: {run['held_out'][-1][1]:.4f}{held}", "ink"))
    return parts


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{placed}>{escape(text)}</text>'
