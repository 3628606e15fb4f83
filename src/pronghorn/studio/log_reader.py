"""A run's log as it grows: what is new is read, from where the last look ended; steps are columns of numbers.

10,000 steps are 2.3 MB. Steps that hold nothing but the usual figures are taken out of the text by one pattern; every other
line is read as `run_log` reads it.
"""

from __future__ import annotations

import math
import os
import re
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronghorn.report.gpu_log import FIGURES, GpuLog
from pronghorn.report.plots import Point
from pronghorn.report.run_log import FILE_NAME, as_number, parse_event
from pronghorn.report.run_stats import Curve, RunStats, run_stats

AXES = ("step", "tokens", "hours", "cost")
COLUMNS = ("time", "step", "loss", "grad_norm", "lr", "tokens", "seconds", "seen_tokens")
# What `train/run/run_events.py` writes of every step. Anything more (rewards, margins) makes it a line of its own kind.
LINE = re.compile(
    rb'^(?:\{"event":"step","time":([\d.]+),"session":(\d+),"step":(\d+),"epoch":[\d.e+-]+,"loss":(-?\d[\d.e+-]*),'
    rb'"grad_norm":(-?\d[\d.e+-]*),"lr":(-?\d[\d.e+-]*),"tokens":(\d+),"loss_tokens":\d+,"seconds":(-?\d[\d.e+-]*),'
    rb'"seen_tokens":(\d+)\}|(.+))$',
    re.MULTILINE,
)
BLOCK = 1 << 18  # bytes read at a time: 10 ms, in which no other thread answers
LONGEST_LINE = 16 << 20  # bytes; what is longer is none of ours
TAIL = 1024  # bytes before the place where reading goes on, several lines: if they have changed, so has the file
HEAD_BYTES, TAIL_BYTES = 1 << 15, 1 << 13  # of a first look
MOST_FIGURES, MOST_SAMPLES, MOST_NOTICES = 16, 20, 400
USUAL = {*COLUMNS, "event", "session", "epoch", "loss_tokens"}
NAN = math.nan


class LogReader:
    """One run. `generation` changes when what was read before no longer holds: a resume, another file under the name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.lock = folder, folder / FILE_NAME, threading.RLock()
        self.generation, self.gpu = 0, GpuLog(folder)
        self._forget()

    def _forget(self) -> None:
        self.columns = {name: array("d") for name in COLUMNS}
        self.figures: dict[str, array[float]] = {}
        self.events: list[dict[str, Any]] = []  # all but steps; `steps` stands for those that came in its place
        self.drawn: dict[Any, dict[str, list[float]]] = {}  # curves as they were asked for
        self.steps_of: dict[int, int] = {}  # by session, those done again included
        self.bad_lines = self.offset = self._inode = 0
        self._tail = b""
        self.partial = False  # only its beginning and its end were looked at
        self.generation += 1

    @property
    def rows(self) -> int:
        return len(self.columns["step"])

    @property
    def more(self) -> tuple[str, ...]:
        """Figures of the steps that not every run has."""
        return (*self.figures, *(name for name in FIGURES if self.gpu.times))

    # ---- reading ---------------------------------------------------------------------------------------------------------

    def refresh(self) -> bool:
        """Whether there is anything new. An OSError: the log is not there."""
        with self.lock, self.path.open("rb") as file:
            about = os.fstat(file.fileno())
            if self.partial or not self._goes_on(file.fileno(), about):
                self._forget()
                self._inode = about.st_ino
            before = self.offset
            size = BLOCK
            while True:
                block = os.pread(file.fileno(), size, self.offset)
                whole = block[: block.rfind(b"\n") + 1]
                if not whole and len(block) < size:
                    break
                if not whole and size < LONGEST_LINE:
                    size *= 4
                    continue
                whole, size = whole or block, BLOCK
                self._feed(whole)
                self.offset += len(whole)
                self._tail = (self._tail + whole)[-TAIL:]
            if self.gpu.refresh() or self.offset != before:
                self.drawn.clear()
            return self.offset != before

    def glance(self) -> None:
        """The beginning and the end of a large log, enough for a line in a table."""
        with self.lock, self.path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= HEAD_BYTES + TAIL_BYTES:
                self.refresh()
                return
            self._forget()
            head, tail = os.pread(file.fileno(), HEAD_BYTES, 0), os.pread(file.fileno(), TAIL_BYTES, size - TAIL_BYTES)
            self._feed(head[: head.rfind(b"\n") + 1])
            self._feed(tail[tail.find(b"\n") + 1 : tail.rfind(b"\n") + 1])
            self.partial = True

    def _goes_on(self, descriptor: int, about: os.stat_result) -> bool:
        if about.st_ino != self._inode or about.st_size < self.offset:
            return False
        return os.pread(descriptor, len(self._tail), self.offset - len(self._tail)) == self._tail

    def _feed(self, text: bytes) -> None:
        plain: list[tuple[bytes, ...]] = []
        for found in LINE.findall(text):
            if found[9]:
                self._add_steps(plain)
                plain = []
                self._add(parse_event(found[9]))
            else:
                plain.append(found)
        self._add_steps(plain)

    def _add_steps(self, found: Sequence[tuple[bytes, ...]]) -> None:
        if not found:
            return
        times, sessions, steps, losses, norms, rates, tokens, seconds, seen, _ = zip(*found, strict=True)
        for name, texts in zip(COLUMNS, (times, steps, losses, norms, rates, tokens, seconds, seen), strict=True):
            self.columns[name].extend(map(float, texts))
        for session in set(sessions):
            self._mark(int(session), float(times[-1]), sessions.count(session))

    def _mark(self, session: int, time: float, count: int) -> None:
        """`run_stats` asks when a session ended, and not what its steps were."""
        self.steps_of[session] = self.steps_of.get(session, 0) + count
        last = self.events[-1] if self.events else {}
        if last.get("event") != "steps" or last.get("session") != session:
            self.events.append({"event": "steps", "session": session})
        self.events[-1]["time"] = time

    def _add(self, event: dict[str, Any] | None) -> None:
        if event is None:
            self.bad_lines += 1
            return
        kind = event["event"]
        if kind == "step":
            for name in COLUMNS:
                self.columns[name].append(as_number(event.get(name)))
            self._add_figures(event)
            self._mark(event.get("session", 1), as_number(event.get("time")), 1)
            return
        if kind == "start":
            self._drop_steps_after(event.get("resumed_from") or 0)
        self._drop_old(kind, event)
        self.events.append(event)

    def _add_figures(self, event: dict[str, Any]) -> None:
        for name in event.keys() - USUAL:
            value = as_number(event[name])
            if name not in self.figures and (len(self.figures) >= MOST_FIGURES or not math.isfinite(value)):
                continue
            column = self.figures.setdefault(name, array("d"))
            column.extend([NAN] * (self.rows - 1 - len(column)))
            column.append(value)

    def _drop_steps_after(self, step: int) -> None:
        """They are done again."""
        keep = bisect_right(self.columns["step"], step)
        if keep < self.rows:
            for column in (*self.columns.values(), *self.figures.values()):
                del column[keep:]
            self.generation += 1

    def _drop_old(self, kind: str, event: dict[str, Any]) -> None:
        """Large or frequent events: the last ones are kept."""
        most = {"experts": 1, "rows": 1, "samples": MOST_SAMPLES, "notice": MOST_NOTICES}.get(kind)
        session = event.get("session", 1) if kind == "stages" else None
        if kind == "stages":  # its figures are cumulative in a session
            most = 1
        if most is None:
            return
        same = [i for i, e in enumerate(self.events) if e["event"] == kind and session in (None, e.get("session", 1))]
        for i in reversed(same[: max(0, len(same) - most + 1)]):
            del self.events[i]

    # ---- what it says ----------------------------------------------------------------------------------------------------

    def stats(self) -> RunStats:
        with self.lock:
            run = run_stats(self.events)
            seconds, steps, figures = self.columns["seconds"], self.columns["step"], self.figures
            spent = sum(seconds)
            losses = [] if "frac_reward_zero_std" in figures else list(zip(self.columns["loss"], steps, strict=True))
            rewards = list(zip(figures.get("reward", ()), steps, strict=False))
            return replace(
                run,
                step=max(run.step, _last(steps)),
                loss=_curve(losses, min),
                reward=_curve([pair for pair in rewards if not math.isnan(pair[0])], max),
                tokens=_last(self.columns["seen_tokens"]),
                tokens_per_second=sum(self.columns["tokens"]) / spent if spent > 0 else 0.0,
                sessions=tuple(replace(one, steps=self.steps_of.get(one.number, 0)) for one in run.sessions),
            )

    def column(self, name: str, start: int = 0) -> list[float]:
        with self.lock:
            if name == "rate":
                pairs = zip(self.columns["tokens"][start:], self.columns["seconds"][start:], strict=True)
                return [tokens / seconds if seconds > 0 else NAN for tokens, seconds in pairs]
            if name in FIGURES:
                return self.gpu.by_step(name, self.columns["time"][start:], self.columns["seconds"][start:])
            found = self.columns.get(name, self.figures.get(name, array("d")))[start:]
            return [*found, *([NAN] * (self.rows - start - len(found)))]

    def points(self, name: str, x: str = "step") -> list[Point]:
        """A figure of the steps, or of the evaluations (`eval`), over steps, tokens, hours or cost; without what is not a
        number. Nothing over the cost of a run without a price."""
        with self.lock:
            if x == "cost" and run_stats(self.events).price is None:
                return []
            if name == "eval":
                kept = [(as_number(e.get("step")), as_number(e.get("loss"))) for e in self.kept("eval")]
                return [(self._place(step, x), loss) for step, loss in kept if math.isfinite(loss)]
            values = self.column(name)
            return [(at, y) for at, y in zip(self._axis(x), values, strict=True) if math.isfinite(y) and math.isfinite(at)]

    def kept(self, kind: str) -> list[dict[str, Any]]:
        """Events of this kind that later sessions did not do again."""
        found: list[dict[str, Any]] = []
        for event in self.events:
            if event["event"] == "start":
                after = event.get("resumed_from")
                found = [e for e in found if e.get("step", 0) <= (-1 if after is None else after)]
            elif event["event"] == kind:
                found.append(event)
        return found

    def _axis(self, x: str) -> Sequence[float]:
        """Hours and cost (USD, at the price that the log has) are of the steps, without loading and evaluations."""
        if x == "tokens":
            return self.columns["seen_tokens"]
        if x not in AXES[2:]:
            return self.columns["step"]
        run = run_stats(self.events)
        an_hour = run.gpus * (run.price or 0.0) if x == "cost" else 1.0
        total, axis = 0.0, array("d")
        for one in self.columns["seconds"]:
            total += one if math.isfinite(one) else 0.0
            axis.append(total / 3600.0 * an_hour)
        return axis

    def _place(self, step: float, x: str) -> float:
        """Where this step lies on the axis."""
        axis, steps = self._axis(x), self.columns["step"]
        return step if x == "step" else axis[i - 1] if (i := bisect_right(steps, step)) else 0.0


def _last(column: Sequence[float]) -> int:
    """A line of a step may lack a figure."""
    return int(column[-1]) if column and math.isfinite(column[-1]) else 0


def _curve(values: Sequence[tuple[float, float]], best: Callable[..., Any]) -> Curve:
    finite = [pair for pair in values if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    chosen = best(finite, key=lambda pair: pair[0], default=None)
    if not values:
        return Curve()
    return Curve(values[0][0], values[-1][0], *((chosen[0], int(chosen[1])) if chosen else (None, None)))
