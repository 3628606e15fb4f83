"""What a person (or a machine) sees while a run goes on. Three displays with one interface:

    LiveDisplay    a terminal: four lines that stay in place, with notices and evaluations scrolling above them
    PlainDisplay   no terminal (a file, a pipe, CI): short lines, never more than one a second for steps
    JsonDisplay    --json: the run's events, one JSON object a line

Each is a listener of the run's log (`handle`) and a progress callback (`progress`). The event `stopping` is not in the log: it
comes from a signal's handler, in the middle of anything, so whoever handles it neither prints nor waits. None of them can stop
a run: when nobody reads the output any more, they fall silent. Call `close` before printing anything else.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pronghorn.errors import counted, printable
from pronghorn.program import runnable
from pronghorn.report import number_format
from pronghorn.report.bars import sparkline, stage_bar, stage_legend
from pronghorn.report.console import SafeConsole, say_now
from pronghorn.report.pace import Paces, Throughput, so_far
from pronghorn.report.run_log import as_number
from pronghorn.report.run_stats import STATES, ending
from pronghorn.report.stages import Stages

REFRESH_PER_SECOND = 4
KEPT_LOSSES = 400  # for the sparkline: its columns are means, and a longer past would hide what happens now
FIRST_MINUTE = 60.0  # plain lines: one a second in the first minute, then one every ten seconds
PROGRESS_AFTER, PROGRESS_EVERY = 2.0, 5.0  # plain lines of a progress: none when it is over soon
LABEL_WIDTH = 12
STOPPING = "stopping"  # an event that is not in the log
SAVING = "saving"  # and labels of progress
EVALUATING = {"evaluating", "answering", "answers of the base model"}


class Display(Protocol):
    def handle(self, event: dict[str, Any]) -> None:
        """One event of the log."""

    def progress(self, label: str, done: int, total: int) -> None:
        """How far something long has come; total 0: unknown."""

    def close(self) -> None:
        """The end; may be called twice."""


def make_display(json: bool, stages: Stages | None = None) -> Display:
    """The display that fits standard output. `stages`: for the live view of where the time goes."""
    if json:
        return JsonDisplay()
    console = SafeConsole()  # reads NO_COLOR, TERM and the like
    return LiveDisplay(console, stages) if console.is_terminal and not console.is_dumb_terminal else PlainDisplay()


class JsonDisplay:
    """The events as they are in run.jsonl."""

    def __init__(self) -> None:
        self._line = _Line()

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == STOPPING:
            say_now(event["text"])
        else:
            self._line.say(json.dumps(event, allow_nan=False))  # ASCII, whatever the pipe's encoding

    def progress(self, label: str, done: int, total: int) -> None:
        """Not an event of the run."""

    def close(self) -> None:
        self._line.flush()


class PlainDisplay:
    """Lines of plain text, few enough to read in a log file."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._clock = _Line(), clock
        self._run = _Run()
        self._began = clock()
        self._last_step = self._last_progress = -math.inf
        self._first_seen: dict[str, float] = {}
        self._paces = Paces()
        self._open: set[str] = set()  # progress labels that have shown a line and not their end

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == STOPPING:
            say_now(event["text"])
            if not _same_file(1, 2):
                self._line.later.append(event["text"])
            return
        self._run.handle(event)
        if event["event"] == "step":
            now = self._clock()
            every = 1.0 if now - self._began < FIRST_MINUTE else 10.0
            if not (now - self._last_step >= every or event.get("step") in (1, self._run.steps)):
                return
            self._last_step = now
        for text in _lines(self._run, event, 160):
            self._line.say(text)

    def progress(self, label: str, done: int, total: int) -> None:
        now = self._clock()
        began = self._first_seen.setdefault(label, now)
        self._paces.at(label, done, now)
        if total > 0 and done >= total:
            self._first_seen.pop(label)
            self._paces.end(label)
            if label in self._open:
                self._open.discard(label)
                self._line.say(f"{label}: {so_far(label, total, total)}")
        elif now - began >= PROGRESS_AFTER and now - self._last_progress >= PROGRESS_EVERY:
            self._last_progress = now
            self._open.add(label)
            told = self._paces.told(label, done, total, now)
            self._line.say(f"{label}: {told}" if told else label)

    def close(self) -> None:
        self._line.flush()


class LiveDisplay:
    """A few lines that stay in place. rich's own thread draws them, so the loop only stores numbers."""

    def __init__(self, console: Console, stages: Stages | None = None) -> None:
        self._console, self._stages = console, stages
        self._run = _Run()
        self._bars: dict[str, tuple[int, int]] = {}
        self._paces = Paces()
        self._live: Live | None = None
        self._closed = self._gone = self._stopping = self._saving = False
        # Held only while numbers are stored or drawn, never while printing: rich holds a lock of its own there. Reentrant,
        # because a signal's handler may log a notice in the middle of `handle`.
        self._lock = threading.RLock()

    def handle(self, event: dict[str, Any]) -> None:
        if event["event"] == STOPPING:
            self._stopping = True  # rich's thread draws it
            return
        with self._lock:
            self._run.handle(event)
            if event["event"] == "step":
                self._bars.clear()  # what had to be prepared is ready
        if event["event"] != "step":
            for text in _lines(self._run, event, max(20, self._console.width - 1)):
                style = {"notice": "yellow", "eval": "bold"}.get(event["event"], "dim")
                self._print(Text(text, style="dim" if text.startswith("  ") else style, overflow="ellipsis"))
        self._start()

    def progress(self, label: str, done: int, total: int) -> None:
        with self._lock:
            self._saving = self._saving or label == SAVING
            if total and done >= total:
                self._bars.pop(label, None)
                self._paces.end(label)
            else:
                # Who does not know how far it is does not tell its end either: it is over once something else goes on.
                self._bars = {name: bar for name, bar in self._bars.items() if bar[1] or name == label}
                self._bars[label] = (done, total)
                self._paces.at(label, done, time.monotonic())
        self._start()

    def close(self) -> None:
        self._closed = True
        if self._live is not None:
            with self._lock:
                self._bars.clear()
                self._stopping = False  # what follows says how it ended
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()

    def _print(self, text: Text) -> None:
        """Above the live lines, where rich puts it. Text, not markup: a notice with [brackets] stays as it is."""
        if not self._gone:
            try:
                self._console.print(text, soft_wrap=True)  # the terminal breaks lines, so that commands can be copied whole
            except OSError:  # the terminal is gone; the run goes on
                self._gone = True

    def _start(self) -> None:
        if self._live is None and not self._closed and not self._gone:
            self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=REFRESH_PER_SECOND)
            try:
                self._live.start()
            except OSError:
                self._gone = True

    def _draw(self) -> RenderableType:
        """Called by rich's thread, REFRESH_PER_SECOND times a second."""
        with self._lock:
            return self._rows()

    def _rows(self) -> RenderableType:
        width = min(self._console.width, 100)
        rows: list[RenderableType] = []
        for label, (done, total) in list(self._bars.items()):
            amount = self._paces.told(label, done, total, time.monotonic())
            rows.append(_bar_row(label, done, total, amount, width))
        if self._run.step or self._run.steps:
            rows += self._training(width)
        seconds = self._stages.seconds if self._stages is not None else self._run.stages
        if sum(seconds.values()) > 0:
            clock = f" {number_format.duration(sum(seconds.values()))}  "
            bar = stage_bar(seconds, _bar_width(width))
            rows.append(Text.assemble("time".ljust(LABEL_WIDTH), bar, clock, stage_legend(seconds, 3)))
        if self._stopping:
            rows.append(Text(self._stop_line(time.monotonic()), style="yellow"))
        for row in rows:
            if isinstance(row, Text):
                row.no_wrap, row.overflow = True, "ellipsis"
        return Group(*rows)

    def _stop_line(self, now: float) -> str:
        """After Ctrl-C, until the end: what is still being done, and about how long."""
        doing, left = f"finishing step {self._run.step + 1:,}, then saving", self._run.until_saved(now)
        if self._saving:
            doing, left = "saving" if SAVING in self._bars else "saved, writing the report", None
        elif self._bars.keys() & EVALUATING:
            doing, left = "finishing the evaluation, then saving", None  # its bar says how long
        about = "" if left is None else f" (about {number_format.duration(max(1.0, left))})"
        return f"{'stopping'.ljust(LABEL_WIDTH)}{doing}{about}; Ctrl-C again quits now"

    def _training(self, width: int) -> list[RenderableType]:
        run = self._run
        left = run.left(time.monotonic())
        rest = "" if left is None else f"  {number_format.duration(left)} left" if run.step < run.steps else "  last step done"
        rows: list[RenderableType] = [_bar_row("step", run.step, run.steps, f"{run.step:,} of {run.steps:,}{rest}", width)]
        if run.losses:
            spark = sparkline(list(run.losses), _bar_width(width)).ljust(_bar_width(width))
            loss = number_format.figure(run.losses[-1])
            line = Text.assemble("loss".ljust(LABEL_WIDTH), (spark, "green"), " ", (loss, "bold"))
            line.append(f"  {number_format.count(run.rate.now())} tokens/s")
            if run.evaluation is not None:
                line.append(f"  evaluation {number_format.figure(run.evaluation)}")
            rows.append(line)
        return rows


class _Run:
    """What the displays remember of the events."""

    def __init__(self) -> None:
        self.step = self.steps = self.planned = 0
        self.losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        self.evaluation: float | None = None
        self.stages: dict[str, float] = {}
        self.rate = Throughput()
        self.heard = time.monotonic()  # when a step, an evaluation or a checkpoint was over
        self.saved_in = 0.0  # seconds of the last checkpoint

    def handle(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("start", "step", "eval", "checkpoint"):
            self.heard = time.monotonic()
        if kind == "start":
            self.steps = int(event.get("steps") or 0)
            self.planned = int(event.get("planned") or self.steps)
            self.step = int(event.get("resumed_from") or 0)
        elif kind == "step":
            self.step = int(event.get("step", 0))
            self.losses.append(as_number(event.get("loss")))
            self.rate.add(int(event.get("tokens", 0)), as_number(event.get("seconds")))
        elif kind == "decay":
            self.steps = int(event.get("steps") or 0)
        elif kind == "stages":
            self.stages = dict(event.get("seconds") or {})
        elif kind in ("eval", "checkpoint"):
            self.rate.pause(as_number(event.get("seconds")))
            if kind == "eval":
                self.evaluation = as_number(event["loss"]) if "loss" in event else None
            else:
                self.saved_in = as_number(event.get("seconds"))

    def left(self, now: float) -> float | None:
        """Seconds until the end of the run. They pass while a step goes on, but not for longer than a step should take."""
        steps = max(0, self.steps - self.step)
        until_end = self.rate.eta(steps)
        return None if until_end is None else max(self.rate.eta(max(0, steps - 1)) or 0.0, until_end - (now - self.heard))

    def until_saved(self, now: float) -> float | None:
        """Seconds until the step is done and saved; None before the first step."""
        step = self.rate.eta(1)
        return None if step is None else max(0.0, step - (now - self.heard)) + self.saved_in


def _lines(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    """The event for people, in ASCII as far as it is ours; none for events that say nothing to them."""
    say = _SAYINGS.get(event["event"])
    return say(run, event, width) if say is not None else []


def _say_step(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    left = run.rate.eta(max(0, run.steps - run.step))
    head = f"step {run.step:,}/{run.steps:,}  loss {number_format.figure(run.losses[-1])}{_preference(event)}"
    head += f"  lr {as_number(event.get('lr')):.3g}"
    return [f"{head}  {run.rate.now():,.0f} tokens/s" + (f"  {number_format.duration(left)} left" if left else "")]


def _preference(event: dict[str, Any]) -> str:
    """The figures of a step that compares answers."""
    shown = [("accuracy", "rewards/accuracies"), ("margin", "rewards/margins"), ("kl", "kl")]
    shown += [("accuracy", "accuracy"), ("margin", "margin")]  # of a reward model
    shown += [("reward", "reward"), ("length", "completions/mean_length")]  # of answers that the model gave
    return "".join(f"  {label} {number_format.score(as_number(event[name]))}" for label, name in shown if name in event)


def _say_evaluation(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    told = [f"{name} {number_format.figure(as_number(event[name]))}" for name in ("loss", "perplexity") if name in event]
    best = ", best so far" if event.get("best") else ""
    shown = [g for g in (event.get("generations") or [])[:1] if isinstance(g, dict)]
    head = f"evaluation at step {event.get('step', 0):,}: {', '.join([*told, *_metrics(event)])}{best}"
    return [head, *(_generation(g, width) for g in shown)]


def _say_base(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    return [f"base model, {counted(event.get('samples', 0), 'held-out row')}: {', '.join(_metrics(event))}"]


def _metrics(event: dict[str, Any]) -> list[str]:
    """`exact_match 0.93`, and how many answers did not end, where that is known."""
    said = [
        f"{number_format.one_line(str(name), 40)} {number_format.score(as_number(value))}"
        for name, value in (event.get("metrics") or {}).items()
    ]
    return said + ([f"{counted(event['cut'], 'answer')} truncated at eval.max_new_tokens"] if event.get("cut") else [])


def _say_checkpoint(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    took = number_format.duration(as_number(event.get("seconds")))
    amount = f"{number_format.size(as_number(event.get('bytes', 0)))}, {took}"
    return [f"checkpoint at step {event.get('step', 0):,}: {event.get('path', '')} ({amount})"]


def _say_notice(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    return [runnable(number_format.one_line(str(event.get("text", "")), 2000))]


def _say_text(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    """Events that bring their own lines: the plan of the memory, and what was measured beside it."""
    return [str(line)[:2000] for line in event.get("text") or []]


def _say_end(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    reason = str(event.get("reason", ""))
    told = event.get("why") if reason not in ("error", "health") else ""  # the command shows those itself, with their fix
    why = number_format.one_line(str(told or ""), 2000)
    return [ending(STATES.get(reason, reason), event.get("step", 0), run.planned, why)]


def _say_start(run: _Run, event: dict[str, Any], width: int) -> list[str]:
    recipe = event.get("recipe") or {}
    data = event.get("data") or {}
    parameters = event.get("parameters") or {}
    again = event.get("resumed_from")
    head = ", ".join(
        str(p) for p in (recipe.get("model"), recipe.get("method"), event.get("device"), event.get("precision")) if p
    )
    lines = [f"{event.get('run', '')}: {head}" + (f", resumed from step {again:,}" if again is not None else "")]
    if parameters and data:
        amounts = [parameters.get("trainable"), parameters.get("total"), data.get("documents"), data.get("tokens")]
        trainable, total, documents, tokens = (number_format.count(amount) for amount in amounts)
        documents += " document" if documents == "1" else " documents"
        what = f"trains {trainable} of {total} parameters on {documents}" + f", {tokens} tokens" * ("tokens" in data)
        lines.append(f"  {what}, {counted(event.get('steps', 0), 'step')}")
    return lines


_SAYINGS: dict[str, Callable[[_Run, dict[str, Any], int], list[str]]] = {
    "start": _say_start,
    "step": _say_step,
    "base": _say_base,
    "eval": _say_evaluation,
    "checkpoint": _say_checkpoint,
    "notice": _say_notice,
    "rewind": _say_notice,
    "decay": _say_notice,
    "average": _say_notice,
    "plan": _say_text,
    "measured": _say_text,
    "end": _say_end,
}


def _generation(generation: dict[str, Any], width: int) -> str:
    prompt = number_format.one_line(str(generation.get("prompt", "")), max(8, width * 2 // 5))
    return f"  {prompt} -> {number_format.one_line(str(generation.get('answer', '')), max(8, width - 6 - len(prompt)))}"


def _bar_row(label: str, done: int, total: int, amount: str, width: int) -> RenderableType:
    row = Table.grid()
    room = max(LABEL_WIDTH, min(len(label) + 1, width // 2))  # a short-lived bar with a long name need not stand in line
    row.add_column(width=room, no_wrap=True)
    row.add_column(width=_bar_width(width))
    row.add_column(no_wrap=True, overflow="ellipsis")
    bar = ProgressBar(total=total or None, completed=done, pulse=not total, width=_bar_width(width), complete_style="green")
    row.add_row(Text(number_format.one_line(label, room - 1)), bar, Text(f" {amount}"))
    return row


def _bar_width(width: int) -> int:
    return max(10, width // 3)


class _Line:
    """Whole lines on standard output; silent once nobody reads them, because that is no reason to stop training."""

    def __init__(self) -> None:
        self._silent = False
        self.later: list[str] = []  # lines from a signal's handler, which may not print

    def say(self, text: str) -> None:
        if self._silent:
            return
        while self.later:
            self.say(self.later.pop(0))
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        try:
            sys.stdout.write(printable(text).encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()
        except OSError:  # nobody reads the pipe any more, the terminal is gone, or the disk of the file is full
            self._silent = True
            # Python flushes standard output once more at its end, and would complain there.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def flush(self) -> None:
        while self.later:
            self.say(self.later.pop(0))
        if not self._silent:
            sys.stdout.flush()


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.sameopenfile(one, other)
    except OSError:  # one of them is closed
        return False
