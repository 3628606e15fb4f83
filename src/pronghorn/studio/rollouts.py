"""Answers that a run gave while it learned from rewards: all that its log has, searched and sorted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.report.run_log import FILE_NAME, as_number, parse_event, plain
from pronghorn.serve.asked import RequestError
from pronghorn.studio.live import MOST_TEXT

MOST_SHOWN = 100
LONGEST_LINE = 16 << 20  # bytes
WANTED = (b'{"event":"samples"', b'{"event":"start"')  # how such lines begin
SORTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "newest": lambda one: -one["step"],
    "oldest": lambda one: one["step"],
    "lowest": lambda one: _or_last(one["reward"]),
    "highest": lambda one: _or_last(-one["reward"]),
}


@dataclass(frozen=True)
class Wanted:
    text: str = ""  # in prompt, expected or answer
    low: float = -math.inf
    high: float = math.inf
    sort: str = "newest"

    @classmethod
    def of(cls, text: str | None, low: str | None, high: str | None, sort: str | None) -> Wanted:
        try:
            low_, high_ = float(low or -math.inf), float(high or math.inf)
        except ValueError:
            raise RequestError("a reward is a number") from None
        if (sort or "newest") not in SORTS:
            raise RequestError(f"sort is one of {', '.join(SORTS)}")
        return cls((text or "").lower(), low_, high_, sort or "newest")

    def has(self, one: dict[str, Any]) -> bool:
        said = " ".join(str(one.get(key) or "") for key in ("prompt", "expected", "answer")).lower()
        asked = math.isfinite(self.low) or math.isfinite(self.high)
        return (not asked or self.low <= one["reward"] <= self.high) and self.text in said


def _or_last(reward: float) -> float:
    """An answer without a reward is the last in either order."""
    return math.inf if math.isnan(reward) else reward


def rollouts(folder: Path, wanted: Wanted) -> dict[str, Any]:
    """`all`: how many the log has; `found`: how many of them are wanted; `rows`: the first of those."""
    everything = _samples(folder / FILE_NAME)
    found = sorted((one for one in everything if wanted.has(one)), key=SORTS[wanted.sort])
    rows = [{key: value[:MOST_TEXT] if isinstance(value, str) else value for key, value in one.items()} for one in found]
    return {"all": len(everything), "found": len(found), "rows": plain(rows[:MOST_SHOWN])}


def _samples(log: Path) -> list[dict[str, Any]]:
    """Without those of steps that a resume did again."""
    found: list[dict[str, Any]] = []
    with log.open("rb") as file:
        while line := file.readline(LONGEST_LINE):
            event = parse_event(line) if line.startswith(WANTED) else None
            if event is None:
                continue
            if event["event"] == "start":
                found = [one for one in found if one["step"] <= (event.get("resumed_from") or 0)]
                continue
            shown = event.get("shown")
            for one in shown if isinstance(shown, list) else []:
                if isinstance(one, dict):
                    found.append({**one, "step": event.get("step", 0), "reward": as_number(one.get("reward"))})
    return found
