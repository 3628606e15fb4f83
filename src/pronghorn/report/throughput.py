"""Real tokens a second (padding does not count), now and over the run, and how long the rest will take."""

from __future__ import annotations

import statistics
from collections import deque

WINDOW_SECONDS = 30.0  # long enough to even out single steps, short enough to show a slow disk or a busy neighbour


class Throughput:
    """Fed with every step; `seconds` is the step's wall-clock with the wait for data, without evaluation and saving."""

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
