"""The results file: one JSON object, written anew after every result, so that a run cut off keeps what it has.

    {"what", "commands": [...], "results": [row, ...]}

A row has "workload", "system" (or "ceiling"), "status" (measured | not installed | failed | timed out), "why",
"date", and where it was measured the figures of `meter.Meter.result` and "machine".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.bench.workloads import WORKLOADS, Workload
from pronghorn.errors import CommandError

Row = dict[str, Any]
NAME = "side-by-side.json"
CEILING = "ceiling"
WHAT = (
    "Whole training steps on random weights of the real architectures. Where a row says nothing else: LoRA r=16 on all seven "
    "linear layers of a decoder layer (mixtures of experts: on attention, or on attention and experts), AdamW, one micro-batch "
    "per optimizer step, loss on every token. All systems train on the same documents from the same model folder, each in its "
    "own process, one after another on the same machine. Speed is real tokens per second, without padding, over the steps "
    "after warm-up. Memory is the allocator's peak in GiB after the second step (Pronghorn: from the first step). Time to "
    "first step runs from process start to the end of the first optimizer step. The ceiling is the speed of the frozen "
    "weights' matrix products alone (forward and input gradient), in bf16, or in FP8 where Pronghorn computes in FP8, without "
    "attention"
)


class Results:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.commands: list[str] = []
        if path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows, commands = list(content["results"]), list(content.get("commands", []))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CommandError(
                what="not a results file", where=str(path), why=str(error), fix="choose another --out, or move the file away"
            ) from error
        for row in rows:
            self.add(row, save=False)
        self.commands += [command for command in commands if command not in self.commands]

    def take_over(self, path: Path) -> None:
        """Rows of an earlier file, where there are none yet."""
        if not path.exists():
            raise CommandError(
                what="file not found", where=str(path), fix="pass the side-by-side.json of an earlier run to --resume"
            )
        before = self.rows
        self.rows = []
        self._read(path)
        for row in before:
            self.add(row, save=False)

    def get(self, workload: str, system: str) -> Row | None:
        return next((row for row in self.rows if row["workload"] == workload and row["system"] == system), None)

    def add(self, row: Row, *, save: bool = True) -> None:
        """In the place of the same system's older row."""
        self._refuse_another_machine(row)
        self.rows = [old for old in self.rows if (old["workload"], old["system"]) != (row["workload"], row["system"])] + [row]
        if save:
            self.save()

    def _refuse_another_machine(self, row: Row) -> None:
        here = row.get("machine", {}).get("hardware")
        there = next((name for old in self.rows if (name := old.get("machine", {}).get("hardware"))), None)
        if here and there and here != there:
            raise CommandError(
                what=f"this machine has a {here}, the existing results are from a {there}",
                where=str(self.path),
                why="results of different machines cannot be compared",
                fix="choose another --out",
            )

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"what": WHAT, "commands": self.commands, "results": self.rows}
        building = self.path.with_name(self.path.name + ".tmp")
        with building.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        building.replace(self.path)


def by_workload(rows: Iterable[Row], order: Iterable[str], systems: Iterable[str]) -> dict[str, list[Row]]:
    """Rows grouped by workload, both in the order given; the ceiling is not among them."""
    ranks = {name: i for i, name in enumerate(systems)}
    listed = list(rows)
    groups = {
        workload: sorted(
            (row for row in listed if row["workload"] == workload and row["system"] in ranks),
            key=lambda row: ranks[row["system"]],
        )
        for workload in order
    }
    return {workload: group for workload, group in groups.items() if group}


def rate(row: Row | None) -> float | None:
    """Tokens in a second; of preference data pairs, since systems compute different tokens for the same pair."""
    if not row or row.get("status") != "measured":
        return None
    return float(row["pairs_per_second" if "pairs_per_second" in row else "tokens_per_second"])


def speed_of(row: Row | None) -> str:
    """For people: a bare number is tokens in a second."""
    if row is None or (found := rate(row)) is None:
        return ""
    return f"{found:,.1f} pairs/s" if "pairs_per_second" in row else f"{found:,.0f}"


def fastest(rows: Iterable[Row], prefix: str = "") -> Row | None:
    """Of a system's ways; without a prefix, of all."""
    return max(
        (row for row in rows if row["system"].startswith(prefix) and rate(row)), key=lambda row: rate(row) or 0.0, default=None
    )


def unsloths_best(rows: Iterable[Row], name: str) -> Row | None:
    """On a workload, or on one in which only our side's arithmetic or budget is another."""

    def work(workload: Workload) -> tuple[object, ...]:
        return tuple(getattr(workload, name) for name in ("model", "tokens", "document", "method", "adapters", "rank", "pairs"))

    listed = [row for row in rows if row["workload"] in WORKLOADS]
    alike = (row for row in listed if work(WORKLOADS[row["workload"]]) == work(WORKLOADS[name]))
    return fastest((row for row in listed if row["workload"] == name), "unsloth") or fastest(alike, "unsloth")
