"""Where the wall-clock went: every second of a run belongs to exactly one stage, and the parts sum to the whole.

    stages = Stages()
    with stages("step"):
        ...
        with stages("wait"):      # the inner stage pauses the outer one
            batch = next(batches)
    log.write("stages", **stages.event())

The clock starts when the process was created, so the interpreter's start and the imports before `Stages()` count
too (as `imports`); what happens in no stage is `other`. For the thread that made it only: a second thread's time
would count the same second twice, so `with stages(...)` there is an error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

STAGES = (
    "imports", "load", "read", "tokenize", "pack", "reference", "wait", "rollouts", "step", "optimizer", "evaluate", "answers",
    "average",     "checkpoint", "report", "other",
)  # fmt: skip

# A process older than this was not started for this run (a notebook, a server): its past is not the run's. A choice, not
# a measurement: far above what imports should take, even from a slow disk.
OLDEST_START = 300.0


class Stages:
    """Exclusive wall-clock accounting. Call it with a stage's name to get the context manager."""

    def __init__(self, started: float | None = None) -> None:
        """`started`: when the run began, on time.monotonic()'s clock; by default when the process was created."""
        now = time.monotonic_ns()
        began = now - int(process_age() * 1e9) if started is None else min(now, int(started * 1e9))
        self._spent = dict.fromkeys(STAGES, 0)  # whole nanoseconds: no rounding, the sum is exact
        self._spent["imports"] = now - began
        self._began, self._mark = began, now  # `_mark`: up to here the time is booked
        self._stack = ["other"]
        self._thread = threading.get_ident()

    def __call__(self, name: str) -> AbstractContextManager[None]:
        if name not in STAGES:
            raise ValueError(f"{name!r} is not a stage; the stages are {', '.join(STAGES)}")
        return self._during(name)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each stage until now, the running one included, in the order of STAGES. Another thread (a display's) books
        nothing: there the running stage has what the others leave of the wall-clock, so it grows while a step goes on."""
        if threading.get_ident() == self._thread:
            self._book()
            return {name: spent / 1e9 for name, spent in self._spent.items()}
        running, spent = self._stack[-1], dict(self._spent)
        spent[running] += time.monotonic_ns() - self._began - sum(spent.values())
        return {name: nanoseconds / 1e9 for name, nanoseconds in spent.items()}

    def total(self) -> float:
        return sum(self.seconds.values())

    def event(self) -> dict[str, Any]:
        """The fields of the log's `stages` event: one look at the clock, so the parts sum to the total exactly."""
        seconds = self.seconds
        return {"total": sum(seconds.values()), "seconds": seconds}

    def _book(self) -> None:
        now = time.monotonic_ns()
        self._spent[self._stack[-1]] += now - self._mark
        self._mark = now

    @contextmanager
    def _during(self, name: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"stage {name!r} entered in a different thread than the one that owns the accounting")
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            if self._stack[-1] != name:
                raise RuntimeError(f"stage {name!r} left while in {self._stack[-1]!r}: stages must nest (no yield inside one)")
            self._book()
            self._stack.pop()


def process_age() -> float:
    """Seconds since this process was created; 0 where that is unknown or longer ago than a run's start can be."""
    try:
        # Field 22 of stat(5), in ticks since boot; counted after the name, which may itself hold blanks and brackets.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux, or a sandbox without these
        return 0.0
    return age if 0.0 <= age <= OLDEST_START else 0.0
