"""Results as a table: one list of cells, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pronghorn.bench.results import CEILING, Row, by_workload, fastest, rate, speed_of, unsloths_best
from pronghorn.bench.workloads import SYSTEMS, WORKLOADS

if TYPE_CHECKING:
    from rich.console import Group

SUMMARY_HEAD = (
    "workload",
    "Pronghorn, tokens/s",
    "Unsloth's best",
    "ratio",
    "best of the others",
    "share of ceiling",
    "peak memory (Unsloth's)",
    "time to first step (Unsloth's)",
)
BRIEF_HEAD = ("workload", "Pronghorn, tokens/s", "Unsloth's best", "ratio", "peak memory (Unsloth's)")
IN_TRL_HEAD = (
    "workload",
    "`use_gradient_checkpointing`",
    "Pronghorn, tokens/s",
    "Unsloth, tokens/s",
    "ratio",
    "peak memory (Unsloth's)",
)
IN_TRL = (
    ("False", "dropin", "unsloth"),
    ("True", "dropin-true", "unsloth-true"),
    ('"unsloth"', "dropin-unsloth", "unsloth-ckpt"),
)
HEAD = (
    "workload",
    "system",
    "real tokens/s",
    "ratio to Unsloth's best",
    "share of ceiling",
    "peak memory",
    "time to first step",
    "loss after the run",
)


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A system without figures says why in the place of its speed."""
    lines = []
    for workload, group in by_workload(rows, WORKLOADS, SYSTEMS).items():
        limit = next((row for row in rows if row["workload"] == workload and row["system"] == CEILING), None)
        ceiling = rate(limit)
        unsloth = rate(unsloths_best(rows, workload))
        lines += [(workload, SYSTEMS[row["system"]].label, *_figures(row, ceiling, unsloth)) for row in group]
        if limit:
            figures = (f"{ceiling:,.0f}", *_ratio(ceiling, unsloth), "100 %") if ceiling else (why_not(limit), "", "")
            lines.append((workload, "matrix products alone", *figures, "", "", ""))
    return lines


def _figures(row: Row, ceiling: float | None, unsloth: float | None) -> tuple[str, ...]:
    speed = rate(row)
    if speed is None:
        return (why_not(row), "", "", "", "", "")
    memory = f"{row['peak_gib']:.1f} GiB" if row.get("peak_gib") is not None else ""
    return (
        speed_of(row),
        *_ratio(speed, unsloth),
        f"{100 * speed / ceiling:.0f} %" if ceiling else "",
        memory,
        f"{row['seconds_to_first_step']:.1f} s",
        f"{row['loss_last']:.3f} ({row['warmup'] + row['steps']} steps)",
    )


def _ratio(speed: float, unsloth: float | None) -> tuple[str]:
    return (f"{speed / unsloth:.2f}" if unsloth else "",)


def why_not(row: Row, width: int = 90) -> str:
    status, why = row["status"], " ".join(str(row.get("why", "")).split())
    if status == "not built":
        return why
    text = f"{status}: {why}" if why else status
    return text if len(text) <= width else text[: width - 1] + "…"


def dates(machines: Sequence[Row]) -> str:
    """When rows were measured: a day, or the first and the last."""
    days = sorted({str(machine["date"])[:10] for machine in machines})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def markdown(rows: Sequence[Row]) -> str:
    return _table(HEAD, cells(rows))


def summary(rows: Sequence[Row]) -> str:
    """A line for each piece of work that ours was measured on, as Markdown."""
    lines = []
    for name, group, ours in _measured(rows):
        speed, unsloth = rate(ours) or 0.0, unsloths_best(rows, name)
        other = fastest(row for row in group if not row["system"].startswith(("pronghorn", "dropin", "unsloth")))
        ceiling = rate(next((row for row in rows if (row["workload"], row["system"]) == (name, CEILING)), None))
        lines.append(
            (
                WORKLOADS[name].describe(),
                *_beside(group, ours, unsloth),
                f"{speed_of(other)} ({SYSTEMS[other['system']].label})" if other else "",
                f"{100 * speed / ceiling:.0f} %" if ceiling else "",
                _both("{:.1f} GiB", "peak_gib", ours, unsloth),
                _both("{:.0f} s", "seconds_to_first_step", ours, unsloth),
            )
        )
    return _table(SUMMARY_HEAD, lines)


def brief(rows: Sequence[Row], names: Sequence[str]) -> str:
    """The same of a few workloads and with fewer columns."""
    return _table(
        BRIEF_HEAD,
        [
            (
                WORKLOADS[name].describe(),
                *_beside(group, ours, unsloths_best(rows, name)),
                _both("{:.1f} GiB", "peak_gib", ours, unsloths_best(rows, name)),
            )
            for name, group, ours in _measured(rows)
            if name in names
        ],
    )


def in_trl(rows: Sequence[Row]) -> str:
    """The same TRL script under Pronghorn and under Unsloth, a line for each setting of its checkpointing."""
    found = {(row["workload"], row["system"]): row for row in rows if rate(row)}
    lines = []
    for name, workload in WORKLOADS.items():
        for setting, ours, theirs in IN_TRL:
            row, unsloth = found.get((name, ours)), found.get((name, theirs))
            if row is not None:
                lines.append(
                    (
                        workload.describe(),
                        f"`{setting}`",
                        f"**{speed_of(row)}**",
                        speed_of(unsloth) or "not measured",
                        *_ratio(rate(row) or 0.0, rate(unsloth)),
                        _both("{:.1f} GiB", "peak_gib", row, unsloth),
                    )
                )
    return _table(IN_TRL_HEAD, lines)


def _measured(rows: Sequence[Row]) -> list[tuple[str, list[Row], Row]]:
    """(workload, its rows, ours among them), of those that ours was measured on."""
    groups = by_workload(rows, WORKLOADS, SYSTEMS).items()
    return [(name, group, row) for name, group in groups for row in group if row["system"] == "pronghorn" and rate(row)]


def _beside(group: Sequence[Row], ours: Row, unsloth: Row | None) -> tuple[str, str, str]:
    without = next((why_not(row, 40) for row in group if row["system"].startswith("unsloth")), "not measured")
    return f"**{speed_of(ours)}**", speed_of(unsloth) or without, *_ratio(rate(ours) or 0.0, rate(unsloth))


def _both(form: str, name: str, ours: Row, theirs: Row | None) -> str:
    texts = [form.format(row[name]) for row in (ours, theirs) if row and row.get(name) is not None]
    return f"{texts[0]} ({texts[1]})" if len(texts) == 2 else "".join(texts)


def _table(head: Sequence[str], lines: Sequence[tuple[str, ...]]) -> str:
    every = [tuple(head), tuple("---" for _ in head), *(_escaped(line) for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def _escaped(line: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in line)


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
