"""The tables of hours.py for docs/results.md: what each arm took and reached, what the audit found, and the defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.hours import ARMS
from benchmarks.record import read
from benchmarks.result_tables import source, table

GOAL = {"dirty": 0.5, "clean": 0.8}  # of the reference's GPU seconds, for everything on
ALLOWED = 0.005  # of the reference's final loss
POINTS = -0.02  # of exact answers: the lower limit of the paired difference
NOT_MEASURED = "Not measured."
Rows = Sequence[dict[str, Any]]


def tokens(row: dict[str, Any]) -> int:
    """Trained and evaluated."""
    return int(row["tokens"] + row["looks"] * row["dev_tokens"])


def limit(reference: Rows) -> float:
    """The final loss that counts as the reference's quality."""
    losses = [row["final_loss"] for row in reference]
    return mean(losses) + max(ALLOWED * mean(losses), 2 * (stdev(losses) if len(losses) > 1 else 0.0))


def exact(rows: Rows) -> list[float]:
    """Of each final row: in what share of the runs its answer was exact."""
    return [mean(int(run["exact"][i]) for run in rows) for i in range(len(rows[0]["exact"]))] if "exact" in rows[0] else []


def fewer_exact(rows: Rows, reference: Rows) -> float | None:
    """The lower 95 % limit of the difference in exact answers, paired by row."""
    pairs = [one - other for one, other in zip(exact(rows), exact(reference), strict=True)]
    return mean(pairs) - 1.96 * stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None


def arms_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """An arm of a case each: means over seeds, relative to the reference of the same seeds."""
    runs, found = [row for row in content["results"] if row["part"] == "arm"], []
    for case in dict.fromkeys(row["case"] for row in runs):
        of = {name: [row for row in runs if row["case"] == case and row["arm"] == name] for name in sorted(ARMS, key=number)}
        for name, rows in of.items():
            reference = [row for row in of["A1"] if row["seed"] in {one["seed"] for one in rows}]
            if not rows or not reference:
                continue

            def ratio(value: Any, rows: Rows = rows, reference: Rows = reference) -> float:
                return sum(map(value, rows)) / sum(map(value, reference))

            right = fewer_exact(rows, reference)
            good = [row["final_loss"] <= limit(of["A1"]) for row in rows]
            found.append({
                "case": case, "arm": name, "runs": len(rows), "seconds": mean(row["seconds"] for row in rows),
                "of_seconds": ratio(lambda row: row["seconds"]), "of_held": ratio(lambda row: row["held_seconds"] or math.nan),
                "of_tokens": ratio(tokens),
                "deciding": sum(row["eval_seconds"] for row in rows) / sum(row["seconds"] for row in rows),
                "loss": mean(row["final_loss"] for row in rows),
                "deviation": stdev([row["final_loss"] for row in rows]) if len(rows) > 1 else 0.0,
                "exact": mean(exact(rows)) if exact(rows) else None, "fewer_exact": right,
                "reached": sum(good), "holds": all(good) and (right is None or right > POINTS),
            })  # fmt: skip
    return found


def number(arm: str) -> int:
    return int(arm[1:])


def hours(folder: Path) -> str:
    if not (folder / "hours.json").exists():
        return NOT_MEASURED
    content = read(folder / "hours.json")
    found, rows = arms_of(content), []
    if not found:
        return NOT_MEASURED
    for one in found:
        answers = "" if one["exact"] is None else f"{one['exact']:.1%} ({100 * one['fewer_exact']:+.1f})"
        rows.append((
            one["case"], f"{one['arm']}: {ARMS[one['arm']].title}", f"{one['seconds']:.1f}", f"{one['of_seconds']:.2f}",
            "" if math.isnan(one["of_held"]) else f"{one['of_held']:.2f}", f"{one['of_tokens']:.2f}", f"{one['deciding']:.0%}",
            f"{one['loss']:.4f} ± {one['deviation']:.4f}", answers,
            f"{one['reached']} of {one['runs']}" + ("" if one["holds"] else ", **not reached**"),
        ))  # fmt: skip
    head = ("data", "arm", "GPU seconds", "of A1's", "whole runs, of A1's", "tokens, of A1's", "evaluation, of the seconds",
            "final loss", "exact answers (lower limit of the difference, points)", "A1's quality")  # fmt: skip
    absent = [f"{name} ({one.title}): {one.absent}." for name, one in ARMS.items() if one.absent]
    return "\n\n".join([table(head, rows) + source(content), *verdicts(found), *absent])


def verdicts(found: Rows) -> list[str]:
    """Whether the goal holds, and whether it is more than training less."""
    said, of = [], {(one["case"], one["arm"]): one for one in found}
    for case in dict.fromkeys(one["case"] for one in found):
        everything, half, by_chance = (of.get((case, name)) for name in ("A9", "A3", "A2"))
        if everything is None:
            continue
        goal = GOAL[case.partition("-")[2]]
        met = everything["holds"] and everything["of_seconds"] <= goal
        text = f"{case}: everything on took {everything['of_seconds']:.2f} of the reference's GPU seconds"
        text += f" (goal: {goal}) and {'reached' if everything['holds'] else 'did not reach'} its quality: "
        text += "**met**" if met else "**missed**"
        for other, name in ((half, "half of the steps"), (by_chance, "random rows at equal seconds")):
            if other is not None:
                better = "better than" if everything["loss"] < other["loss"] else "no better than"
                text += f"; {better} {name} ({other['loss']:.4f} after {other['of_seconds']:.2f})"
        said.append(text + ".")
    return said


def audits(folder: Path) -> str:
    if not (folder / "hours.json").exists():
        return NOT_MEASURED
    content, rows = read(folder / "hours.json"), []
    runs = [row for row in content["results"] if row["part"] == "audit"]
    for case in dict.fromkeys(row["case"] for row in runs):
        defects = [row["defects"] for row in runs if row["case"] == case]
        for name in sorted({name for one in defects for name in one}):
            of = [one[name] for one in defects if name in one]
            planted, named = sum(one["planted"] for one in of), sum(one["named"] for one in of)
            hits = sum((one["recall"] or 0.0) * one["planted"] for one in of)
            kinds = sorted({kind for one in of for kind in one["recall_by_kind"]})
            by_kind = ", ".join(f"{kind} {mean(one['recall_by_kind'].get(kind, 0.0) for one in of):.2f}" for kind in kinds)
            recall, precision = (f"{hits / part:.3f}" if part else "" for part in (planted, named))
            rows.append((case, name, f"{planted:,}", recall, precision, by_kind if len(kinds) > 1 else ""))
    head = ("data", "defect", "planted", "recall", "precision", "recall by kind")
    return table(head, rows) + source({**content, "command": "python -m benchmarks.hours prepare"})


def defaults(folder: Path) -> str:
    if not (folder / "hours-defaults.json").exists():
        return NOT_MEASURED
    content, rows = read(folder / "hours-defaults.json"), []
    runs = [row for row in content["results"] if row["part"] == "defaults"]
    rates = sorted({row["lr"] for row in runs})
    for data in dict.fromkeys(row["data"] for row in runs):
        best = min(row["dev_loss"] for row in runs if row["data"] == data)
        for batch in sorted({row["batch"] for row in runs}):
            of = {row["lr"]: row for row in runs if (row["data"], row["batch"]) == (data, batch)}
            if not of:
                continue
            any_ = next(iter(of.values()))
            speed = any_["tokens"] / any_["step_seconds"]
            losses = [f"{row['dev_loss']:.4f}" if (row := of.get(lr)) else "" for lr in rates]
            losses = [f"**{text}**" if text == f"{best:.4f}" else text for text in losses]
            rows.append((data, f"{batch:,}", f"{any_['steps']:,}", f"{speed:,.0f}", *losses))
    head = ("data", "tokens a step", "steps", "tokens/s", *(f"held-out loss, rate {lr:g}" for lr in rates))
    return table(head, rows) + source(content)


BLOCKS = {"hours": hours, "hours-audit": audits, "hours-defaults": defaults}
