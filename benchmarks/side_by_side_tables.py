"""The side-by-side results as Markdown tables, for README.md and docs/results.md (table.py)."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench.results import CEILING, Row, by_workload, fastest, rate, speed_of, unsloths_best
from benchmarks.bench.table import cells, ratio_to, why_not
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS

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
                        *ratio_to(rate(row) or 0.0, rate(unsloth)),
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
    return f"**{speed_of(ours)}**", speed_of(unsloth) or without, *ratio_to(rate(ours) or 0.0, rate(unsloth))


def _both(form: str, name: str, ours: Row, theirs: Row | None) -> str:
    texts = [form.format(row[name]) for row in (ours, theirs) if row and row.get(name) is not None]
    return f"{texts[0]} ({texts[1]})" if len(texts) == 2 else "".join(texts)


def _table(head: Sequence[str], lines: Sequence[tuple[str, ...]]) -> str:
    every = [tuple(head), tuple("---" for _ in head), *(_escaped(line) for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def _escaped(line: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(cell.replace("|", "\\|").replace("<", "&lt;") for cell in line)
