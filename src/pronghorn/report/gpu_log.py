"""gpu.jsonl, beside run.jsonl: a line every 5 seconds with what each of the run's GPUs says of its memory, power and use.

    {"time": 1760000000.0, "session": 1, "gpus": [{"memory": bytes, "total": bytes, "own": bytes of the run's process,
     "power": watts, "utilisation": percent, "energy": joules since the driver was loaded}]}

What a GPU does not tell is null. A GPU's figures are of all that runs on it, other programs included. It is a file of its own
because it is written from a thread beside the run, and may be missing, torn or deleted without any loss to the run.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from pronghorn.report.run_log import as_number, plain

FILE_NAME = "gpu.jsonl"
EVERY = 5.0  # seconds between two samples
LATEST = 1.5 * EVERY  # seconds before the end of a step in which there is a sample, unless none was taken
LARGEST = 1 << 28  # bytes: three months of one GPU; what is larger is none of ours


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# Of several GPUs: the fullest one's memory, the sum of power, the mean of use. Of a step's samples: the largest memory, means.
FIGURES: dict[str, tuple[str, Callable[[Sequence[float]], float], Callable[[Sequence[float]], float]]] = {
    "memory": ("GPU memory, GB", max, max),
    "power": ("GPU power, W", sum, _mean),
    "utilisation": ("GPU utilisation, %", _mean, _mean),
}
JOULES_A_KWH = 3.6e6


def append(folder: Path, session: int, at: float, gpus: Sequence[dict[str, float | None]]) -> None:
    """One line in one write. What a kill tore off before it stays a line of its own."""
    line = json.dumps(plain({"time": round(at, 3), "session": session, "gpus": gpus}), separators=(",", ":")) + "\n"
    with (folder / FILE_NAME).open("a+b", buffering=0) as file:
        end = os.fstat(file.fileno()).st_size
        torn = end and os.pread(file.fileno(), 1, end - 1) != b"\n"
        file.write(b"\n" * bool(torn) + line.encode())


class GpuLog:
    """The samples of a run as they come: what is new is read, from where the last look ended."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME
        self._forget()

    def _forget(self) -> None:
        self.times, self.columns = array("d"), {name: array("d") for name in FIGURES}
        self.gpus = 0  # of the run's, those on the machine of rank 0
        self.joules: float | None = None  # all sessions, those steps included that were done again
        self._last: tuple[Any, float, float, float] | None = None  # session, time, watts, counter
        self._offset = self._inode = 0

    @classmethod
    def of(cls, folder: Path) -> GpuLog:
        found = cls(folder)
        found.refresh()
        return found

    def refresh(self) -> bool:
        """Whether there is anything new. A file that is not there, or cannot be read, has no samples."""
        try:
            about = self.path.stat()
            if not self.path.is_file() or about.st_ino != self._inode or about.st_size < self._offset:
                self._forget()
                self._inode = about.st_ino
            if not self.path.is_file() or not self._offset < about.st_size <= LARGEST:
                return False
            with self.path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except OSError:
            self._forget()
            return False
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.split(b"\n"):
            self._add(line)
        return bool(whole)

    def _add(self, line: bytes) -> None:
        """What is no sample is left out."""
        try:
            sample = json.loads(line)
            at, gpus = float(sample["time"]), list(sample["gpus"])
            found = {name: over([as_number(one[name]) for one in gpus]) for name, (_, over, _) in FIGURES.items()}
            counter = sum(as_number(one["energy"]) for one in gpus)
        except (ValueError, OverflowError, RecursionError, LookupError, TypeError):
            return
        found["memory"] /= 1e9
        self.gpus = len(gpus)
        self.times.append(at)
        for name, column in self.columns.items():
            column.append(found[name])
        now = (sample.get("session"), at, found["power"], counter)
        spent = _between(self._last, now)
        if math.isfinite(spent):
            self.joules = (self.joules or 0.0) + spent
        self._last = now

    @property
    def kwh(self) -> float | None:
        return None if self.joules is None else self.joules / JOULES_A_KWH

    def by_step(self, name: str, times: Iterable[float], seconds: Iterable[float]) -> list[float]:
        """A figure of each step that ended at such a time and took so long; nan, where there is no sample near."""
        column, over, found = self.columns[name], FIGURES[name][2], []
        for end, took in zip(times, seconds, strict=True):
            first, last = bisect_right(self.times, end - max(took, LATEST)), bisect_right(self.times, end)
            inside = [value for value in column[first:last] if math.isfinite(value)]
            found.append(over(inside) if inside else math.nan)
        return found


def _between(before: tuple[Any, float, float, float] | None, now: tuple[Any, float, float, float]) -> float:
    """Joules: by the GPU's counter, else by its power. Between two sessions the run had no GPU."""
    if before is None or before[0] != now[0] or now[1] < before[1]:
        return math.nan
    counted = now[3] - before[3]
    return counted if counted >= 0 else (before[2] + now[2]) / 2 * (now[1] - before[1])
