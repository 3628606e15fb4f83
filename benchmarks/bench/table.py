"""Results as a table in the terminal. benchmarks/side_by_side_tables.py makes those of README.md and docs/results.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.bench.results import CEILING, Row, by_workload, rate, speed_of, unsloths_best
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS

if TYPE_CHECKING:
    from rich.console import Group


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A system without figures says why in the place of its speed."""
    lines = []
    for workload, group in by_workload(rows, WORKLOADS, SYSTEMS).items():
        limit = next((row for row in rows if row["workload"] == workload and row["system"] == CEILING), None)
        ceiling = rate(limit)
        unsloth = rate(unsloths_best(rows, workload))
        lines += [(workload, SYSTEMS[row["system"]].label, *_figures(row, ceiling, unsloth)) for row in group]
        if limit:
            figures = (f"{ceiling:,.0f}", *ratio_to(ceiling, unsloth), "100 %") if ceiling else (why_not(limit), "", "")
            lines.append((workload, "matrix products alone", *figures, "", "", ""))
    return lines


def _figures(row: Row, ceiling: float | None, unsloth: float | None) -> tuple[str, ...]:
    speed = rate(row)
    if speed is None:
        return (why_not(row), "", "", "", "", "")
    memory = f"{row['peak_gib']:.1f} GiB" if row.get("peak_gib") is not None else ""
    return (
        speed_of(row),
        *ratio_to(speed, unsloth),
        f"{100 * speed / ceiling:.0f} %" if ceiling else "",
        memory,
        f"{row['seconds_to_first_step']:.1f} s",
        f"{row['loss_last']:.3f} ({row['warmup'] + row['steps']} steps)",
    )


def ratio_to(speed: float, unsloth: float | None) -> tuple[str]:
    return (f"{speed / unsloth:.2f}" if unsloth else "",)


def why_not(row: Row, width: int = 90) -> str:
    status, why = row["status"], " ".join(str(row.get("why", "")).split())
    text = f"{status}: {why}" if why else status
    return text if len(text) <= width else text[: width - 1] + "…"


def dates(machines: Sequence[Row]) -> str:
    """When rows were measured: a day, or the first and the last."""
    days = sorted({str(machine["date"])[:10] for machine in machines})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def terminal(rows: Sequence[Row]) -> Group:
    """Narrow enough for most terminals: why a system has no figures is told below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table, notes = Table(), []
    for i, name in enumerate(("workload", "system", "tokens/s", "Unsloth = 1", "of ceiling", "peak", "first step", "loss")):
        table.add_column(name, justify="left" if i < 2 else "right")
    previous = ""
    for line in cells(rows):
        if previous and line[0] != previous:
            table.add_section()
        workload, system, speed, *others, loss = line
        if not any(others):  # no figures
            notes.append(Text(f"{workload}, {system}: {speed}"))
            speed = speed.partition(":")[0][:13]
        shown = ("" if workload == previous else workload, system, speed, *others, loss.partition(" ")[0])
        table.add_row(*(Text(cell) for cell in shown))
        previous = workload
    return Group(table, *notes)
