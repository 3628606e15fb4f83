"""Line plots as inline SVG that stretches to any width, with axis texts beside it so that they never stretch.

The SVG is 1000 by 1000 units without a fixed aspect; strokes do not scale, and a dot is a stroke of no length with a
round cap. The numbers behind it travel along as JSON for the read-out under the pointer (`html_style.SCRIPT`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Literal

MOST_POINTS = 2000  # of one line; a screen has no more columns, and 100,000 steps stay a small file
UNITS = 1000.0
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    colour: str  # a CSS class of the page
    points: Sequence[Point]  # sorted by x; y may be nan
    kind: Literal["line", "faint", "dots"] = "line"
    shown: bool = True  # in the legend and the read-out


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    series: Sequence[Series]
    from_zero: bool = False
    level: tuple[float, str] | None = None  # a horizontal line and its name
    breaks: Sequence[tuple[float, str]] = ()  # vertical lines and their names
    star: tuple[float, float, str] | None = None  # the best point
    note: str = ""
    tall: bool = False
    unit: str = ""  # what the y axis counts; small plots say it in their title
    log: bool = False  # with a switch to a logarithmic y axis


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a point lies in the frame, as shares of its width and height from the lower left."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool = False

    def x(self, value: float) -> float:
        return (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        if self.log:
            return math.log(max(value, self.y0) / self.y0) / math.log(self.y1 / self.y0)
        return (value - self.y0) / (self.y1 - self.y0)

    def y_inside(self, value: float) -> float:
        return min(1.0, max(0.0, self.y(value)))


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: of each equal stretch the lowest and the highest, so no peak is lost; first and last stay."""
    if len(points) <= most:
        return list(points)
    inner, buckets = points[1:-1], (most - 2) // 2
    kept = [points[0]]
    for i in range(buckets):
        stretch = inner[i * len(inner) // buckets : (i + 1) * len(inner) // buckets]
        low, high = min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])
        kept += [low] if low == high else sorted((low, high))
    return [*kept, points[-1]]


def smooth(points: Sequence[Point], width: int | None = None, every: int = 1) -> list[Point]:
    """A centred mean over `width` points (a fiftieth of them by default), so without lag. `every`: of so many points one.

    At the start, where a loss falls steeply, the window shrinks on both sides; at the end only its right side does,
    because there the trend is flat and a window of one point would show noise as a turn.
    """
    half = max(1, (len(points) // 50 if width is None else width) // 2)
    sums = list(accumulate((y for _, y in points), initial=0.0))
    result = []
    for i in range(0, len(points), every):
        left = min(half, i)
        first, last = i - left, min(i + left, len(points) - 1)
        result.append((points[i][0], (sums[last + 1] - sums[first]) / (last + 1 - first)))
    return result


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each power of ten, or round numbers where that would be too few; of many powers only some."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits: tuple[int, ...] = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [digit * 10.0**power for power in powers[:: max(1, len(powers) // 6)] for digit in digits]
    inside = [tick for tick in found if low <= tick <= high]
    return inside if len(inside) >= 3 else [tick for tick in ticks(low, high) if tick > 0]


def tick_text(value: float) -> str:
    """0 · 0.5 · 2e-4 · 1,500 · 150k · 2.5M"""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    if size >= 1e3:
        return f"{value:,.4g}" if value == round(value) else f"{value:,.1f}"
    if size and size < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits.removesuffix('.0')}e{int(power)}"
    return f"{value:.4g}"


def draw(plot: Plot) -> str:
    """The plot as HTML; an empty frame with a word in it when there is nothing to draw."""
    series = [Series(s.name, s.colour, _finite(s.points), s.kind, s.shown) for s in plot.series]
    series = [s for s in series if s.points]
    if not series:
        head = f"<figcaption><h3>{escape(plot.title)}</h3></figcaption>"
        return f'<figure class="plot">{head}<p class="none">no data yet</p></figure>'
    scale = Scale(*_x_range(series), *_y_range(plot, series))
    above = sum(y > scale.y1 for s in series for _, y in s.points)
    series = [Series(s.name, s.colour, thin(s.points), s.kind, s.shown) for s in series]
    legend = "".join(f'<span class="{s.colour} {s.kind}">{escape(s.name)}</span>' for s in series if s.shown)
    hidden = f"{above:,} {'step is' if above == 1 else 'steps are'} above the plotted range." if above else ""
    note = " ".join(filter(None, (plot.note, hidden)))
    frames = _frame(plot, series, scale)
    switch = ""
    if plot.log and (lowest := min((y for s in series for _, y in s.points if y > 0), default=0.0)) and scale.y1 > lowest:
        on_log = Scale(scale.x0, scale.x1, lowest / 1.1, scale.y1, log=True)
        frames += _frame(plot, series, on_log)
        switch = '<label class="switch"><input type="checkbox" name="log">log scale</label>'
    return (
        f'<figure class="plot{" tall" if plot.tall else ""}"><figcaption><h3>{escape(plot.title)}</h3>'
        + (f'<div class="legend">{legend}{switch}</div>' if plot.tall else "")
        + f"</figcaption>{frames}"
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + f'<script type="application/json">{_numbers(series, scale)}</script></figure>'
    )


def _frame(plot: Plot, series: Sequence[Series], scale: Scale) -> str:
    """The axes and what is drawn between them. The switch shows one of two: with and without `log`."""
    y_ticks = log_ticks(scale.y0, scale.y1) if scale.log else ticks(scale.y0, scale.y1, 5 if plot.tall else 3)
    x_ticks = [t for t in ticks(scale.x0, scale.x1, 6 if plot.tall else 4) if t == round(t)]
    labels_y = "".join(f'<span style="bottom:{100 * scale.y(t):.2f}%">{tick_text(t)}</span>' for t in y_ticks)
    labels_x = "".join(f'<span style="left:{100 * scale.x(t):.2f}%">{tick_text(t)}</span>' for t in x_ticks)
    unit = f'<div class="unit">{escape(plot.unit)}</div>' if plot.unit else ""
    return (
        f'<div class="frame{" log" if scale.log else ""}">{unit}<div class="y">{labels_y}</div><div class="area">'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{escape(plot.title)}">'
        f"{_shapes(plot, series, scale, y_ticks)}</svg>{_marks(plot, scale)}"
        '<div class="cursor"></div><div class="tip"></div></div>'
        f'<div class="x">{labels_x}<b>step</b></div></div>'
    )


def as_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _x_range(series: Sequence[Series]) -> tuple[float, float]:
    low, high = min(s.points[0][0] for s in series), max(s.points[-1][0] for s in series)
    return (low, high) if high > low else (low - 1, high + 1)


def _y_range(plot: Plot, series: Sequence[Series]) -> tuple[float, float]:
    """From the drawn values; of faint lines only up to the 99.5th percentile, lest one spike flatten the rest."""
    values: list[float] = []
    for s in series:
        ys = sorted(y for _, y in s.points)
        keep = math.ceil(len(ys) * 0.995) if s.kind == "faint" and len(ys) >= 200 else len(ys)
        values += (ys[0], ys[keep - 1])
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return (0.0 if plot.from_zero and low >= 0 else low - room), high + room


def _unit(share: float) -> str:
    return f"{UNITS * share:.1f}".removesuffix(".0")


def _path(places: Sequence[tuple[str, str]], kind: str) -> str:
    if kind == "dots":
        return "".join(f"M{x} {y}h.01" for x, y in places)
    return "M" + "L".join(f"{x} {y}" for x, y in places)


def _shapes(plot: Plot, series: Sequence[Series], scale: Scale, y_ticks: Sequence[float]) -> str:
    shapes = [f'<path class="grid" d="M0 {_unit(1 - scale.y(t))}H1000"/>' for t in y_ticks]
    for x, name in plot.breaks:
        shapes.append(f'<path class="break" d="M{_unit(scale.x(x))} 0V1000"><title>{escape(name)}</title></path>')
    if plot.level and 0 <= scale.y(plot.level[0]) <= 1:
        shapes.append(f'<path class="level" d="M0 {_unit(1 - scale.y(plot.level[0]))}H1000"/>')
    for s in series:
        places = [(_unit(scale.x(x)), _unit(1 - scale.y_inside(y))) for x, y in s.points]
        kind = "dots" if len(places) == 1 else s.kind
        shapes.append(f'<path class="{kind} {s.colour}" d="{_path(places, kind)}"/>')
    return "".join(shapes)


def _marks(plot: Plot, scale: Scale) -> str:
    marks = []
    if plot.star:
        x, y, text = plot.star
        side = " left" if scale.x(x) > 0.7 else ""
        place = f"left:{100 * scale.x(x):.2f}%;bottom:{100 * scale.y_inside(y):.2f}%"
        marks.append(f'<div class="star{side}" style="{place}"><b>{escape(text)}</b></div>')
    if len(plot.breaks) <= 3:  # more names than that would cover each other; the lines still tell theirs when pointed at
        for x, name in plot.breaks:
            side = " before" if scale.x(x) > 0.6 else ""
            marks.append(f'<div class="name{side}" style="left:{100 * scale.x(x):.2f}%">{escape(name)}</div>')
    if plot.level and 0 <= scale.y(plot.level[0]) <= 1:
        marks.append(
            f'<div class="name right" style="bottom:{100 * scale.y(plot.level[0]):.2f}%">{escape(plot.level[1])}</div>'
        )
    return "".join(marks)


def _numbers(series: Sequence[Series], scale: Scale) -> str:
    lines = [
        {
            "name": s.name,
            "colour": s.colour,
            "dots": s.kind == "dots",
            "x": [int(x) for x, _ in s.points],
            "y": [float(f"{y:.5g}") for _, y in s.points],
        }
        for s in series
        if s.shown
    ]
    return as_json({"x0": scale.x0, "x1": scale.x1, "lines": lines})
