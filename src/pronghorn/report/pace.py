"""How fast something long goes, and how long it still takes: 26%, 19 s left, 1,950 rows/s, 12,800 of 50,000 rows.

What matters most stands first: a narrow terminal cuts off the end.
"""

from __future__ import annotations

import statistics
from collections import deque

from pronghorn.report import number_format

UNITS = {
    "tokenizing": "rows",
    "reading cached tokens": "rows",
    "duplicates and junk": "rows",
    "comparing rows": "rows",
    "sweep": "tokens",
    **dict.fromkeys(("merging", "quantizing", "converting", "uploading"), "bytes"),
}
SURE_AFTER = 2.0  # seconds; before that a pace says little
WINDOW = 30.0  # seconds that count: what follows is like what was just now, not like the start
EVERY = 0.5  # seconds between two looks that are kept


def unit_of(label: str) -> str:
    return UNITS.get(label, "bytes" if label.startswith("downloading ") else "")


def amount_of(label: str, number: int) -> str:
    """`50,000 rows`, `16.1 GB`"""
    unit = unit_of(label)
    return number_format.size(number) if unit == "bytes" else f"{number:,} {unit}".rstrip()


def so_far(label: str, done: int, total: int) -> str:
    """`12,800 of 50,000 rows`, `2.1 GB of 16.1 GB`"""
    of = amount_of(label, done) if unit_of(label) == "bytes" else f"{done:,}"
    return f"{of} of {amount_of(label, total)}"


class Paces:
    """The pace of everything that has a progress, by its label."""

    def __init__(self) -> None:
        self._looks: dict[str, deque[tuple[float, int]]] = {}

    def at(self, label: str, done: int, now: float) -> None:
        looks = self._looks.setdefault(label, deque())
        if not looks or now - looks[-1][0] >= EVERY:
            looks.append((now, done))
        while len(looks) > 2 and now - looks[1][0] > WINDOW:
            looks.popleft()

    def end(self, label: str) -> None:
        self._looks.pop(label, None)

    def told(self, label: str, done: int, total: int, now: float) -> str:
        """For people; "" where there is nothing to say yet. `total` 0: unknown."""
        if not done and not total:
            return ""
        unit, rate = unit_of(label), self._rate(label, done, now)
        parts = [f"{done / total:.0%}"] if total else []
        if rate and total:
            parts.append(f"{number_format.duration((total - done) / rate)} left")
        if rate and unit:
            parts.append(f"{amount_of(label, round(rate))}/s")
        return ", ".join([*parts, so_far(label, done, total) if total else amount_of(label, done)])

    def _rate(self, label: str, done: int, now: float) -> float:
        """Per second; 0 while it is not known. Until `now`, so that what stands still becomes slower."""
        looks = self._looks.get(label)
        if not looks or now - looks[0][0] < SURE_AFTER:
            return 0.0
        began, before = looks[0]
        return max(0.0, (done - before) / (now - began))


WINDOW_SECONDS = 30.0  # long enough to even out single steps, short enough to show a slow disk or a busy neighbour


class Throughput:
    """Real tokens a second (padding does not count), and how long the rest of a run takes.

    Fed with every step; `seconds` is its wall-clock with the wait for data, without evaluation and saving.
    """

    def __init__(self, window_seconds: float = WINDOW_SECONDS) -> None:
        self._window_seconds = window_seconds
        self._window: deque[tuple[int, float]] = deque()
        self._window_total = 0.0
        self.steps, self.paused = 0, 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self.steps += 1
        self._window.append((tokens, seconds))
        self._window_total += seconds
        while len(self._window) > 1 and self._window_total - self._window[0][1] >= self._window_seconds:
            self._window_total -= self._window.popleft()[1]

    def pause(self, seconds: float) -> None:
        """Time of an evaluation or a checkpoint: no part of the throughput, but of what is still to come."""
        self.paused += seconds

    def now(self) -> float:
        """Tokens a second over the last WINDOW_SECONDS."""
        seconds = sum(seconds for _, seconds in self._window)
        return sum(tokens for tokens, _ in self._window) / seconds if seconds > 0 else 0.0

    def eta(self, steps_left: int) -> float | None:
        """Seconds until the end; None before the first step.

        The median, because the first step (warm-up, compiling) is often many times slower than all others.
        """
        if not self.steps:
            return None
        step_seconds = statistics.median(seconds for _, seconds in self._window)
        return steps_left * (step_seconds + self.paused / self.steps)
