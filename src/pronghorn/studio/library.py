"""All runs below the chosen folders: a line of each for the table, and curves of several over each other.

A log is read once and then followed. Until its turn comes, a large one is shown by its beginning and its end.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pronghorn.errors import PronghornError
from pronghorn.recipe import Recipe, flat
from pronghorn.report.plots import Point, smooth, thin
from pronghorn.report.run_log import FILE_NAME, plain
from pronghorn.report.run_stats import RunStats
from pronghorn.serve.asked import RequestError
from pronghorn.small_files import read_small
from pronghorn.studio.control import holder
from pronghorn.studio.log_reader import LogReader
from pronghorn.studio.places import Places

NOTES = "studio.json"  # in a run's folder: the note and the tags that were given to it here
AT_ONCE = 1 << 20  # bytes of news that a line of the table waits for
PAUSE = 0.2  # seconds after an answer in which no log is read in the background
MOST_ROWS = 5_000_000  # steps held in memory, 64 bytes each; of further runs the table shows the beginning and the end
MOST_RUNS, MOST_OVER_EACH_OTHER = 2000, 40
MOST_DRAWN = 64  # curves of one run that are kept
MOST_POINTS = 1500  # of one curve; a plot has about as many columns of pixels
MOST_NOTE, MOST_TAGS, LONGEST_TAG = 20_000, 20, 40


class Library:
    def __init__(self, places: Places, folders: Iterable[Path]) -> None:
        self.places, self._folders = places, [folder.resolve() for folder in folders]
        self._readers: dict[Path, LogReader] = {}
        self._rows: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._lock, self._work = threading.Lock(), threading.Condition()
        self._waiting: list[LogReader] = []
        self._closed, self._asked = False, 0.0
        threading.Thread(target=self._read_waiting, daemon=True).start()

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify()

    # ---- the table -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, Any]]:
        found = [row for log in self._logs() if (row := self._row(log))]
        return sorted(found, key=lambda row: -(row["when"] or 0.0))

    def _logs(self) -> list[Path]:
        found: list[Path] = []
        for top in self._folders:
            for place, folders, files in os.walk(top):
                folders[:] = [] if FILE_NAME in files else [name for name in folders if not name.startswith(".")]
                if FILE_NAME in files:
                    found.append(Path(place))
        return list(dict.fromkeys(found))[:MOST_RUNS]

    def _row(self, folder: Path) -> dict[str, Any] | None:
        try:
            about = (folder / FILE_NAME).stat()
        except OSError:
            return None
        self._asked = time.monotonic()
        reader = self._reader_of(folder)
        mark = (about.st_size, about.st_mtime_ns, reader.partial)
        known, row = self._rows.get(folder, (None, {}))
        if known != mark:
            try:
                self._look(reader, about.st_size)
                row = self._line(reader)
            except (OSError, PronghornError) as error:
                row = {"folder": self.places.name(folder), "name": folder.name, "state": "unreadable", "problem": str(error)}
                row["when"] = about.st_mtime
            self._rows[folder] = ((about.st_size, about.st_mtime_ns, reader.partial), row)
        return row | self._state(folder, row) | read_notes(folder)

    def _look(self, reader: LogReader, size: int) -> None:
        if not reader.partial and size - reader.offset <= AT_ONCE:
            reader.refresh()
            return
        if not reader.offset:
            reader.glance()
        with self._work:
            if reader not in self._waiting:
                self._waiting.append(reader)
                self._work.notify()

    def _read_waiting(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                reader = self._waiting.pop(0)
            while (ago := time.monotonic() - self._asked) < PAUSE:  # answers come first
                time.sleep(PAUSE - ago)
            if sum(one.rows for one in list(self._readers.values())) > MOST_ROWS:
                continue
            try:
                reader.refresh()
            except OSError:
                continue

    def _line(self, reader: LogReader) -> dict[str, Any]:
        run = reader.stats()
        metric = run.decides if run.decides in run.metrics else next(iter(run.metrics), "")
        score = run.metrics[metric].best if metric else None
        if not metric and run.reward.last is not None:
            metric, score = "reward of rollouts", run.reward.last
        names = ("model", "method", "state", "step", "steps", "tokens", "tokens_per_second", "ranks", "seconds", "device")
        row: dict[str, Any] = {name: getattr(run, name) for name in names}
        row |= {
            "folder": self.places.name(reader.folder),
            "name": run.name or reader.folder.name,
            "when": run.last if math.isfinite(run.last or 0) else None,
        }
        row |= {"last_loss": run.loss.last, "best_eval": run.evaluation.best, "metric": metric, "score": score}
        row |= {"money": run.money, "gpu_hours": run.gpu_hours, "partial": reader.partial, "output": run.recipe.get("output")}
        result: dict[str, Any] = plain(row)
        return result

    def _state(self, folder: Path, row: dict[str, Any]) -> dict[str, Any]:
        """A run whose process is gone has been cut off, however new its last line is."""
        if row.get("state") not in ("running", "cut off"):
            return {"pid": None}
        pid = holder(folder)
        return {"state": "running" if pid else "cut off", "pid": pid}

    # ---- one run, and several --------------------------------------------------------------------------------------------

    def reader(self, name: object) -> LogReader:
        folder = self.places.inside(name)
        if not (folder / FILE_NAME).is_file():
            raise RequestError(f"{self.places.name(folder)} is no run's folder (any more): it has no {FILE_NAME}", status=404)
        return self._reader_of(folder)

    def read(self, name: object) -> LogReader:
        """Its log read to the end."""
        reader = self.reader(name)
        try:
            reader.refresh()
        except OSError as error:
            raise RequestError(f"{reader.path.name}: {error.strerror}", status=404) from None
        return reader

    def overlay(self, names: Sequence[str], figure: str, x: str, even_out: float) -> list[dict[str, Any]]:
        """`even_out`: the share of a curve that each of its points is a mean of; 0: none."""
        if len(names) > MOST_OVER_EACH_OTHER:
            raise RequestError(f"more than {MOST_OVER_EACH_OTHER} runs at once")
        found = []
        for name in names:
            self._asked = time.monotonic()
            reader = self.read(name)
            asked = (figure, x, even_out)
            if asked not in reader.drawn:
                if len(reader.drawn) > MOST_DRAWN:
                    reader.drawn.clear()
                points = reader.points(figure, x)
                if even_out > 0 and figure != "eval" and len(points) > 2:
                    width = max(2, round(len(points) * min(0.5, even_out)))
                    points = smooth(points, width, every=max(1, len(points) // MOST_POINTS))
                reader.drawn[asked] = columns(thin(points, MOST_POINTS))
            found.append({"run": name, **reader.drawn[asked]})
        return found

    def differences(self, names: Sequence[str]) -> dict[str, Any]:
        """Keys of the recipes that differ, each with its value in every run."""
        return differing([self._started(self.reader(name)).recipe for name in names[:MOST_OVER_EACH_OTHER]])

    def against(self, name: str, recipe: Recipe) -> dict[str, Any]:
        """The same of a run and of a recipe that is being written."""
        return differing([self._started(self.reader(name)).recipe, recipe.model_dump(mode="json")])

    @staticmethod
    def _started(reader: LogReader) -> RunStats:
        if not reader.events:
            reader.glance()
        return reader.stats()

    def _reader_of(self, folder: Path) -> LogReader:
        with self._lock:
            if folder not in self._readers:
                self._readers[folder] = LogReader(folder)
            return self._readers[folder]


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys that differ, each with its value in every recipe."""
    values = [flat(recipe) for recipe in recipes]
    rows = {key: [one.get(key) for one in values] for key in sorted({key for one in values for key in one} - {"output"})}
    return {key: plain(row) for key, row in rows.items() if any(one != row[0] for one in row)}


def columns(points: Sequence[Point]) -> dict[str, list[float]]:
    found = [(float(f"{x:.8g}"), float(f"{y:.6g}")) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    return {"x": [x for x, _ in found], "y": [y for _, y in found]}


def jsonable(values: Iterable[float]) -> list[float | None]:
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in values]


def read_notes(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(folder / NOTES))
    except (OSError, ValueError, RecursionError):
        found = {}
    found = found if isinstance(found, dict) else {}
    note, tags = found.get("note"), found.get("tags")
    return {
        "note": note[:MOST_NOTE] if isinstance(note, str) else "",
        "tags": [one[:LONGEST_TAG] for one in tags if isinstance(one, str)][:MOST_TAGS] if isinstance(tags, list) else [],
    }


def write_notes(folder: Path, note: object, tags: object) -> dict[str, Any]:
    """What was written."""
    if not isinstance(note, str) or not isinstance(tags, list) or not all(isinstance(one, str) for one in tags):
        raise RequestError("a note is text, and tags are a list of texts")
    clean = list(dict.fromkeys(" ".join(one.split())[:LONGEST_TAG] for one in tags if one.strip()))[:MOST_TAGS]
    beside = folder / f".{NOTES}.tmp"
    try:
        beside.write_text(json.dumps({"note": note[:MOST_NOTE], "tags": clean}, ensure_ascii=False), encoding="utf-8")
        beside.replace(folder / NOTES)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"cannot write {NOTES}: {error}", status=409) from None
    return read_notes(folder)
