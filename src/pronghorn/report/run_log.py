"""run.jsonl: what happened in a run, one JSON object a line, and the one source for everything that is shown.

Every event has `event`, `time` (unix seconds) and `session` (1 for the first start in this folder, then 2, 3, ...).
A run that is killed leaves at most one torn line; the next start cuts it off, and readers overlook it.
After a resume from step N the steps beyond N are done again, so `history` drops what earlier sessions said about them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Self

from pronghorn.errors import DataError, EnvironmentFault, PronghornError

FILE_NAME = "run.jsonl"
BELONGS_TO_A_STEP = (
    "step",
    "eval",
    "checkpoint",
    "experts",
    "ranks",
    "samples",
    "decay",
    "average",
)  # events that a resume from an earlier step makes void
SYNCED = ("checkpoint", "rewind", "end")  # rare, and what a resume relies on: these also survive a power cut
TAIL_BLOCK = 1 << 16  # bytes read at a time when looking for the last line
# What readers count on. An event where one of these is of another kind is none that we wrote.
ANY = ("count", "number", "text", "map", "list", "truth", "nothing", "too large")
_COUNT, _NUMBER, _MAP = ("count",), ("count", "number"), ("map", "nothing")
_FIGURE = ("count", "number", "text")  # "nan" is written as text
_COUNTED = "session step tokens loss_tokens seen_tokens bytes steps planned ranks eval_documents exit_code samples cut to"
_COUNTED += " data.documents data.tokens parameters.total parameters.trainable"
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_COUNTED.split(), _COUNT),
    **dict.fromkeys(("time", "epoch", "total"), _NUMBER),
    **dict.fromkeys(("loss", "grad_norm", "lr", "perplexity"), _FIGURE),
    **dict.fromkeys(("recipe", "data", "parameters", "versions", "counts", "metrics"), _MAP),
    "resumed_from": ("count", "nothing"),
    "generations": ("list", "nothing"),
    "text": ("text", "list", "nothing"),
    "seconds": (*_FIGURE, *_MAP),
    "data.efficiency": (*_NUMBER, "nothing"),
    "after": ("map",),
}
LARGEST = 2_000_000_000  # bytes; a step has 300
LONGEST_TIME = 1e11  # seconds since 1970: the year 5138; beyond it there is no date to show


class RunLog:
    """Appends events to folder/run.jsonl. Each line reaches the operating system before `write` returns."""

    def __init__(self, folder: Path, listeners: Sequence[Callable[[dict[str, Any]], None]] = ()) -> None:
        self.path = folder / FILE_NAME
        self._listeners = tuple(listeners)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a kill between two steps loses nothing, and one write is one line.
            _require_file(self.path)
            self._file = self.path.open("a+b", buffering=0)
            self._end, self.session = _repair(self._file.fileno())
        except OSError as error:
            fix = "choose another output folder, or make this one writable"
            raise EnvironmentFault.of(error, "cannot open the run's log", self.path, fix) from error

    def write(self, event: str, **fields: object) -> None:
        """Adds one event, then tells the listeners exactly what was written."""
        record = plain({"event": event, "time": round(time.time(), 3), "session": self.session, **fields})
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        try:
            _write_all(self._file.fileno(), line)
            if event in SYNCED:
                os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # half a line would spoil the next one
                os.ftruncate(self._file.fileno(), self._end)
            fix = "free some disk space, then run the same command again: it resumes from the last checkpoint"
            raise EnvironmentFault.of(error, "cannot write the run's log", self.path, fix) from error
        self._end += len(line)
        for listener in self._listeners:
            listener(record)

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """One more listener, which may write events of its own."""
        self._listeners += (listener,)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SilentLog(RunLog):
    """The log of a rank that does not write the run's files: it keeps and reports nothing."""

    def __init__(self) -> None:
        pass

    def write(self, event: str, **fields: object) -> None:
        pass

    def close(self) -> None:
        pass


def read_log(path: Path) -> list[dict[str, Any]]:
    """All events of a run.jsonl (or of the folder that holds one), as written. A torn last line is overlooked."""
    path = path / FILE_NAME if path.is_dir() else path
    _require_file(path)
    if path.exists() and path.stat().st_size > LARGEST:
        raise DataError(
            f"the run's log is larger than {LARGEST:,} bytes",
            where=str(path),
            fix="move it away; the next run creates a new one",
        )
    lines = path.read_bytes().split(b"\n")  # not splitlines: an answer may hold other line separators
    lines.pop()  # what follows the last line break: nothing, or a torn line
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        event = parse_event(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            raise DataError(
                "invalid line in the run's log",
                where=f"{path}:{number}",
                why=f"the line starts with {line[:60]!r}",
                fix="remove the line; the rest of the log stays usable",
            )
    return events


def _require_file(path: Path) -> None:
    """A pipe would be waited at for ever, and /dev/zero never ends."""
    if path.exists() and not path.is_file():
        raise DataError("the run's log is not a file", where=str(path), fix="move it away; the next run creates a new one")


def history(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run as it counts: without what earlier sessions did beyond the step that a later one resumed from."""
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "start":
            # Started again without a checkpoint: everything is done again, an evaluation before step 1 included.
            last_valid = event.get("resumed_from")
            last_valid = -1 if last_valid is None else last_valid
            kept = [e for e in kept if e["event"] not in BELONGS_TO_A_STEP or e.get("step", 0) <= last_valid]
        kept.append(event)
    return kept


def as_number(value: object) -> float:
    """A number of the log as a float: "nan" and "inf" are written as strings, what is missing counts as nan."""
    if isinstance(value, (int, float, str)):
        try:
            return float(value)
        except (ValueError, OverflowError):  # a text; a number of 400 digits
            return math.nan
    return math.nan


def plain(value: object) -> Any:
    """The value in JSON's own types: numpy and torch scalars as numbers, nan and inf as strings, paths as text."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (str, PurePath)):
        return str(value).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be written anywhere
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        return plain(value.item())
    raise TypeError(f"{type(value).__name__} cannot be written to the run's log")


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One line; None: it is no event of ours."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):  # covers broken JSON, broken UTF-8, and a hundred thousand brackets
        return None
    return event if isinstance(event, dict) and _as_written(event) else None


def _as_written(event: dict[str, Any]) -> bool:
    """Whether everything that readers count on is of its kind."""
    kind = event.get("event")
    if not isinstance(kind, str) or not all(_kind(value) in KINDS.get(key, ANY) for key, value in event.items()):
        return False
    for section in ("data", "parameters"):
        if not all(_kind(value) in KINDS.get(f"{section}.{key}", ANY) for key, value in (event.get(section) or {}).items()):
            return False
    seconds = event.get("seconds")
    if isinstance(seconds, dict) != (kind == "stages") and seconds is not None:
        return False
    if isinstance(seconds, dict) and not all(_kind(value) in _NUMBER for value in seconds.values()):
        return False
    if kind == "rewind" and not {"to", "after"} <= event.keys():  # a resumed run relies on them
        return False
    rows = (event.get("counts") or {}).items()
    experts = all(layer.isdecimal() and _kind(row) == "list" and all(_kind(n) == "count" for n in row) for layer, row in rows)
    waited = event.get("waited", [])
    numbers = isinstance(waited, list) and all(_kind(number) in _NUMBER for number in waited)
    return experts and numbers and 0 <= event.get("time", 0) < LONGEST_TIME


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int):
        return "count" if 0 <= value < 2**63 else "too large"
    if isinstance(value, float):
        return "number" if math.isfinite(value) else "too large"  # JSON's 1e999
    return {str: "text", list: "list", dict: "map", type(None): "nothing"}[type(value)]


def _write_all(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


def _repair(descriptor: int) -> tuple[int, int]:
    """Cuts off a torn last line. Returns the log's length and the number of the session that begins."""
    end = os.fstat(descriptor).st_size
    while end:
        whole = _after_last_break(descriptor, end)  # where the last complete line ends
        start = _after_last_break(descriptor, whole - 1) if whole else 0
        last = parse_event(os.pread(descriptor, whole - start, start)) if whole else None
        if whole < end:
            os.ftruncate(descriptor, whole)
        end = whole
        if last is not None:
            return end, int(last.get("session", 0)) + 1  # a count, or it would be no event
        if end:  # complete, yet no event: a power cut can leave a line of zeros
            os.ftruncate(descriptor, start)
            end = start
    return 0, 1


def _after_last_break(descriptor: int, end: int) -> int:
    """The offset just after the last line break before `end`; 0 if there is none."""
    while end > 0:
        start = max(0, end - TAIL_BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def base_model(folder: Path) -> str:
    """The model that a run's log names, or nothing; what is wrong with the log is told by who needs more of it. A folder counts
    from where the run was started, which is above the run's own."""
    with contextlib.suppress(PronghornError, OSError, KeyError, TypeError, RuntimeError):  # a loop of links, the last one
        if names := [str(event["recipe"]["model"]) for event in read_log(folder) if event.get("event") == "start"]:
            places = (above / names[-1] for above in folder.resolve().parents)
            return next((str(place) for place in places if place.is_dir()), names[-1])
    return ""
