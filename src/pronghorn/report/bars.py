"""Small pictures made of characters: a sparkline, and the wall-clock by stage in colours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from rich.text import Text

from pronghorn.report.number_format import percent
from pronghorn.report.stages import STAGES

SPARKS = "▁▂▃▄▅▆▇█"

# Training in green, what feeds it in blue, what interrupts it in yellow and magenta, what comes before it in grey.
STAGE_STYLES = {
    "imports": "grey50",
    "load": "grey70",
    "read": "cyan",
    "tokenize": "dark_cyan",
    "pack": "blue",
    "reference": "dark_orange3",
    "wait": "red",
    "rollouts": "green",
    "step": "green",
    "optimizer": "dark_sea_green4",
    "evaluate": "yellow",
    "answers": "gold3",
    "average": "khaki3",
    "checkpoint": "magenta",
    "report": "plum4",
    "other": "grey37",
}


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """The values as `width` characters at most, each the mean of its share of them; what is not finite is left out."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [i * len(finite) // columns for i in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def stage_bar(seconds: Mapping[str, float], width: int = 40) -> Text:
    """One bar of exactly `width` characters, a colour a stage, each as wide as its share (largest remainders)."""
    total = sum(seconds.values())
    if total <= 0:
        return Text("░" * width, style="grey37")
    exact = {stage: seconds.get(stage, 0.0) / total * width for stage in STAGES}
    cells = {stage: int(value) for stage, value in exact.items()}
    for stage in sorted(exact, key=lambda s: cells[s] - exact[s])[: width - sum(cells.values())]:
        cells[stage] += 1
    bar = Text()
    for stage, number in cells.items():
        bar.append("█" * number, style=STAGE_STYLES[stage])
    return bar


def stage_legend(seconds: Mapping[str, float], most: int = 4) -> Text:
    """The largest stages with their share, in their colours."""
    total = sum(seconds.values()) or 1.0
    largest = sorted((s for s in STAGES if seconds.get(s, 0.0) > 0), key=lambda s: -seconds[s])[:most]
    return Text("  ").join(Text(f"{s} {percent(seconds[s] / total)}", style=STAGE_STYLES[s]) for s in largest)
