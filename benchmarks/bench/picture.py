"""The side-by-side as one SVG: bars as shares of the ceiling, readable on light and on dark pages.

The picture has a background of its own, because a picture in a README follows the reader's system and not the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.bench.results import CEILING, Row, by_workload, rate, speed_of, unsloths_best
from benchmarks.bench.table import dates, why_not
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 960, 276, 206, 19, 6, 84
STYLE = """
.ground{fill:#faf9f7;stroke:#e7e3dc}.ink{fill:#1d1b18}.soft{fill:#6b665e}.rail{fill:#efece6}.ours{fill:#c05a1c}.peer{fill:#8fa9c4}
.full{stroke:#a39d93}text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.title{font-size:17px;font-weight:600}.bold{font-weight:600}
@media(prefers-color-scheme:dark){.ground{fill:#151412;stroke:#302d29}.ink{fill:#edeae5}.soft{fill:#a09a90}.rail{fill:#282522}
.ours{fill:#f0894a}.peer{fill:#5a7fa8}.full{stroke:#6e6961}}
"""


def draw(rows: Sequence[Row]) -> str:
    """Bars of every measured system, those without figures as a line that says why."""
    parts: list[str] = []
    y = TOP
    for workload, group in by_workload(rows, WORKLOADS, SYSTEMS).items():
        ceiling = rate(next((row for row in rows if row["workload"] == workload and row["system"] == CEILING), None))
        full = ceiling or max((found for row in group if (found := rate(row))), default=1.0)
        unsloth = rate(unsloths_best(rows, workload))
        parts.append(_text(24, y, WORKLOADS[workload].describe(), "ink bold"))
        if ceiling:
            parts.append(_text(WIDTH - 24, y, f"ceiling {ceiling:,.0f}", "soft", end=True))
        y += 12
        for row in group:
            parts += _bar(y, row, full, unsloth)
            y += BAR + GAP
        if ceiling:
            x = WIDTH - RIGHT
            lower = y - GAP + 2
            parts.append(f'<line class="full" x1="{x}" x2="{x}" y1="{y - len(group) * (BAR + GAP) - 2}" y2="{lower}"/>')
        y += 34
    title = "Real tokens per second while fine-tuning, as a share of what the matrix products alone allow"
    machines = [row["machine"] for row in rows if row.get("machine")]
    where = f"{machines[0]['hardware']}, torch {machines[0]['versions']['torch']}, {dates(machines)}" if machines else ""
    head = [_text(24, 32, title, "ink title"), _text(24, 51, where, "soft")]
    height = y - 8
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img"'
        f' aria-label="{escape(title)}"><style>{STYLE}</style><rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}"'
        f' height="{height - 1}" rx="12"/>' + "".join(head + parts) + "</svg>\n"
    )


def _bar(y: int, row: Row, full: float, unsloth: float | None) -> list[str]:
    system, speed, middle = SYSTEMS[row["system"]], rate(row), y + BAR - 5
    ours = system.name == "pronghorn"
    label = _text(LEFT - 10, middle, system.label, "ink bold" if ours else "soft", end=True)
    if speed is None:
        return [label, _text(LEFT, middle, why_not(row, 70), "soft")]
    rail = WIDTH - RIGHT - LEFT
    length = max(1.0, rail * min(1.0, speed / full))
    figure = speed_of(row) + (f"  ({speed / unsloth:.2f}x Unsloth)" if ours and unsloth else "")
    return [
        label,
        f'<rect class="rail" x="{LEFT}" y="{y}" width="{rail}" height="{BAR}" rx="3"/>',
        f'<rect class="{"ours" if ours else "peer"}" x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3"/>',
        _text(WIDTH - RIGHT + 8, middle, figure, "ink bold" if ours else "soft"),
    ]


def _text(x: float, y: float, text: str, kind: str, *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{anchor}>{escape(text)}</text>'
