"""A queue for the GPU: commands that wait, one file each, and one worker that starts one after the other.

`.studio/queue/ID.json` has a command and its place. Once started it is the job `.studio/jobs/ID/`, and that job alone says that
it runs or has ended, so a worker that is killed leaves nothing half said. The lock `change` is held while the queue is read to
be changed, the lock `worker` while a worker lives. A child holds both until it has written its job.json and is its command,
so whoever comes next finds it either started or still waiting.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pronghorn.program import command, module
from pronghorn.report.run_log import FILE_NAME
from pronghorn.serve.asked import RequestError
from pronghorn.small_files import read_small
from pronghorn.studio.jobs import FOLDER, NAME, Jobs, new_name, write_json
from pronghorn.studio.log_reader import LogReader

VERBS = ("train", "sweep", "data audit", "export", "eval")  # what uses a GPU for long, asks nothing and ends by itself
PAGES = {"sweep": "sweep.html", "data audit": "audit.html"}  # in the folder that the command writes to
STATES = ("running", "waiting", "cancelled", "ended")
STORED = ("id", "verb", "words", "about", "command", "place", "added", "cancelled")
MOST_OVER = 100  # commands that are over and still listed
PAUSE = 1.0  # seconds between two looks at an empty queue
STARTING = 10.0  # seconds that a worker has to begin; it takes 0.5


class Queue:
    def __init__(self, home: Path, jobs: Jobs | None = None) -> None:
        self.home, self.jobs, self._folder = home, jobs or Jobs(home), home / FOLDER / "queue"

    def entries(self) -> list[dict[str, Any]]:
        """The running one, those that wait, in their order, and those that are over, the newest first."""
        found = [entry for path in self._folder.glob("*.json") if (entry := self._read(path))]
        sign = {"running": 1, "waiting": 1, "cancelled": -1, "ended": -1}
        return sorted(found, key=lambda one: (min(STATES.index(one["state"]), 2), sign[one["state"]] * one["place"], one["id"]))

    def one(self, name: str) -> dict[str, Any]:
        found = next((entry for entry in self.entries() if entry["id"] == name), None)
        if found is None:
            raise RequestError("nothing in the queue has this id", status=404)
        return found

    def listed(self) -> dict[str, Any]:
        """For people: also how far each is, which pages it has, and whether a worker is there."""
        entries = [entry | self._shown(entry) for entry in self.entries()]
        if not entries:
            return {"entries": [], "worker": False}
        with self._change():
            on_its_way = time.time() - max(entry["added"] for entry in entries) < STARTING
            return {"entries": entries, "worker": self._has_worker() or on_its_way}

    def add(self, verb: str, words: Sequence[str], about: str) -> dict[str, Any]:
        """At the end, and a worker where there is none. `about`: the folder that it writes to or reads."""
        if verb not in VERBS:
            raise RequestError(f"{verb} does not wait in the queue; these do: {', '.join(VERBS)}")
        with self._change():
            entries, name = self.entries(), new_name()
            for old in [entry for entry in entries if entry["state"] in STATES[2:]][MOST_OVER:]:
                self._file(old["id"]).unlink()
            self._write({
                "id": name, "verb": verb, "words": list(words), "about": about, "command": command(*verb.split(), *words),
                "place": max((entry["place"] for entry in entries), default=0) + 1, "added": time.time(), "cancelled": False,
            })  # fmt: skip
            if not self._has_worker():
                self._start_worker()
        return self.one(name)

    def move(self, name: str, to: int) -> dict[str, Any]:
        """`to`: its new place among those that wait, from 1; beyond the end is the end."""
        if to < 1:
            raise RequestError("the new place is not a whole number from 1")
        with self._change():
            moved = self.one(name)
            if moved["state"] != "waiting":
                raise RequestError("it does not wait any more", status=409)
            waiting = [entry for entry in self.entries() if entry["state"] == "waiting"]
            first = min(entry["place"] for entry in waiting)
            waiting.remove(moved)
            waiting.insert(to - 1, moved)
            for place, entry in enumerate(waiting, first):
                if entry["place"] != place:
                    self._write(entry | {"place": place})
        return self.one(name)

    def cancel(self, name: str) -> dict[str, Any]:
        """What waits is not started; what runs gets Ctrl-C, so a run saves first."""
        with self._change():
            entry = self.one(name)
            if entry["state"] in STATES[2:]:
                raise RequestError("it is over already", status=409)
            if entry["state"] == "running":
                self.jobs.stop(name)
            self._write(entry | {"cancelled": True})
        return self.one(name)

    # ---- the worker ------------------------------------------------------------------------------------------------------

    def work(self, *, keep: bool = False, tell: Callable[[str], None] = lambda _: None) -> bool:
        """One after the other, until none waits. In a process of one thread. False: another worker is there."""
        with self._change():
            worker = self._lock("worker", fcntl.LOCK_EX | fcntl.LOCK_NB)
        if worker is None:
            return False
        with worker:
            while True:
                with self._change():
                    name = self._begun()
                    if name is None and not keep:
                        worker.close()  # before anybody can add one and count on this worker
                        return True
                if name is None:
                    time.sleep(PAUSE)
                    continue
                tell(self.one(name)["command"])
                self.jobs.wait(name)
                ended = self.one(name)
                tell(f"{ended['state']}, exit code {'unknown' if ended['exit'] is None else ended['exit']}")

    def _begun(self) -> str | None:
        """The one that runs, which a worker before may have started, or else the first that waits, which is started."""
        entry = next(iter(self.entries()), None)
        if entry is None or entry["state"] in STATES[2:]:
            return None
        if entry["state"] == "waiting":
            self.jobs.start(entry["verb"], entry["words"], entry["about"], queued=entry["id"])
        return str(entry["id"])

    def _start_worker(self) -> None:
        with (self._folder / "worker.txt").open("ab") as output:
            subprocess.Popen(
                [*module("pronghorn.cli"), "queue", "run"],
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _has_worker(self) -> bool:
        """Under the lock `change`: so this look at the other lock keeps no worker from taking it."""
        found = self._lock("worker", fcntl.LOCK_SH | fcntl.LOCK_NB)
        if found is not None:
            found.close()
        return found is None

    # ---- files -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _change(self) -> Iterator[None]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            held = self._lock("change", fcntl.LOCK_EX)
        except OSError as error:
            raise RequestError(f"cannot write {self._folder}: {error.strerror}", status=500) from None
        assert held is not None
        with held:
            yield

    def _lock(self, name: str, how: int) -> IO[bytes] | None:
        file = (self._folder / f"{name}.lock").open("ab")
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            file.close()
            return None
        return file

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write(self, entry: dict[str, Any]) -> None:
        write_json(self._file(entry["id"]), {key: entry[key] for key in STORED})

    def _read(self, path: Path) -> dict[str, Any] | None:
        """None: a file that is none of ours, or damaged."""
        try:
            found = json.loads(read_small(path))
            entry = {key: found[key] for key in STORED}
            named = NAME.fullmatch(path.stem) and entry["id"] == path.stem and entry["verb"] in VERBS
            numbered = isinstance(entry["place"], int) and isinstance(entry["added"], float)
            texts = (*entry["words"], entry["about"], entry["command"])
            if not (named and numbered and all(isinstance(one, str) for one in texts)):
                return None
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        try:
            job = self.jobs.one(path.stem)
        except RequestError:
            return entry | {"state": "cancelled" if entry["cancelled"] else "waiting", "exit": None, "began": None}
        state = "running" if job["running"] else "cancelled" if entry["cancelled"] else "ended"
        return entry | {"state": state, "exit": job["exit"], "began": job["began"]}

    # ---- what people see of it -------------------------------------------------------------------------------------------

    def _shown(self, entry: dict[str, Any]) -> dict[str, Any]:
        """`page`: the file to read, `run`: the run's folder, where there is one already."""
        folder, page = self.home / entry["about"], PAGES.get(entry["verb"], "")
        return {
            "progress": _progress(entry["verb"], folder, entry["began"]) if entry["state"] == "running" else "",
            "page": f"{entry['about']}/{page}" if page and (folder / page).is_file() else None,
            "run": entry["about"] if not page and (folder / FILE_NAME).is_file() else None,
        }


def _progress(verb: str, folder: Path, began: float) -> str:
    """From what the command writes; empty, where it has not written since it began."""
    file = folder / {"train": FILE_NAME, "sweep": "sweep.json"}.get(verb, "")
    try:
        if not file.is_file() or file.stat().st_mtime < began:
            return ""
        if verb == "train":
            reader = LogReader(folder)
            reader.glance()
            run = reader.stats()
            return f"step {run.step:,} of {run.steps:,}"
        sweep = json.loads(read_small(file))
        rungs, left = len(sweep["rungs"]["shares"]), len(sweep["trials"]) - len(sweep["ended"])
        return f"rung {min(sweep['decided'] + 1, rungs)} of {rungs}, {left} of {len(sweep['trials'])} trials left"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
