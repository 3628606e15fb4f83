"""Commands that were started here: each a process of its own session, which neither the browser nor this server can take along.

`.studio/jobs/ID/` has the command (job.json) and what it prints (output.txt). Only verbs of the table below are started, with
words that are built here: no shell reads them, and a name that begins with a dash is written as a path.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pronghorn.program import command, module
from pronghorn.serve.asked import RequestError
from pronghorn.small_files import read_small

FOLDER, ABOUT, OUTPUT = ".studio", "job.json", "output.txt"
VERBS = ("train", "check", "data audit", "sweep", "fork", "export", "eval", "serve", "demo")
MOST_OUTPUT = 64_000  # bytes of the end that are shown
MOST_JOBS = 200
NAME = re.compile(r"[0-9a-f-]{1,40}")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Jobs:
    def __init__(self, home: Path) -> None:
        self.home, self._folder, self._lock = home, home / FOLDER / "jobs", threading.Lock()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, verb: str, words: Sequence[str], about: str = "", queued: str = "") -> dict[str, Any]:
        """`about`: the folder that it writes to or reads. `queued`: the name it has in the queue; the child writes job.json
        itself before it becomes the command, so a worker that is killed meanwhile leaves either none or a whole one."""
        if verb not in VERBS:
            raise RequestError(f"{verb} is not started from here")
        name = queued or new_name()
        place = self._folder / name
        typed = [*verb.split(), *words]
        facts = {"id": name, "verb": verb, "command": command(*typed), "about": about, "exit": None, "began": time.time()}

        def write(pid: int) -> None:
            write_json(place / ABOUT, {**facts, "pid": pid, "born": _born(pid)})

        try:
            place.mkdir(parents=True, exist_ok=bool(queued))
            with (place / OUTPUT).open("ab") as output:
                child = subprocess.Popen(
                    [*module("pronghorn.cli"), *typed],
                    cwd=self.home,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # no Ctrl-C of this terminal, no hang-up
                    close_fds=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"},
                    preexec_fn=(lambda: write(os.getpid())) if queued else None,  # noqa: PLW1509 - that worker has one thread
                )
            if not queued:
                write(child.pid)
        except (OSError, subprocess.SubprocessError) as error:
            raise RequestError(f"cannot start it: {error}", status=500) from None
        with self._lock:
            self._children[name] = child
        return self.one(name)

    def all(self) -> list[dict[str, Any]]:
        """The newest first."""
        try:
            names = sorted((one.name for one in self._folder.iterdir()), reverse=True)[:MOST_JOBS]
        except OSError:
            return []
        found = [facts for name in names if (facts := self._read(name))]
        return sorted(found, key=lambda facts: -float(facts["began"]))  # names from the queue are older than their commands

    def one(self, name: object, *, with_output: bool = False) -> dict[str, Any]:
        facts = self._read(name) if isinstance(name, str) and NAME.fullmatch(name) else None
        if facts is None:
            raise RequestError("there is no such job", status=404)
        if with_output:
            facts["output"] = self.output(str(name))
        return facts

    def output(self, name: str) -> str:
        """The end of what it printed; lines that a progress display wrote over each other are told once."""
        try:
            with (self._folder / name / OUTPUT).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_OUTPUT))
                text = file.read(MOST_OUTPUT).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(line.rpartition("\r")[2] for line in ESCAPES.sub("", text).split("\n"))

    def stop(self, name: object) -> dict[str, Any]:
        """Ctrl-C for it, if the process under its number is still the one that was started."""
        facts = self.one(name)
        if not facts["running"]:
            raise RequestError("it has ended already", status=409)
        try:
            process = os.pidfd_open(facts["pid"])
            try:
                if _born(facts["pid"]) != facts["born"]:
                    raise RequestError("it has ended already", status=409)
                signal.pidfd_send_signal(process, signal.SIGINT)
            finally:
                os.close(process)
        except ProcessLookupError:
            raise RequestError("it has ended already", status=409) from None
        return self.one(name)

    def wait(self, name: str) -> None:
        """Until it has ended: a child, or a command that a worker before this one started."""
        facts = self.one(name)
        with suppress(ProcessLookupError):
            process = os.pidfd_open(facts["pid"])
            try:
                if _born(facts["pid"]) == facts["born"]:
                    select.select([process], [], [])
            finally:
                os.close(process)
        self.one(name)  # writes a child's exit code

    def _read(self, name: str) -> dict[str, Any] | None:
        place = self._folder / name / ABOUT
        with self._lock:  # around the reading too: else another thread notes an exit code after it, and this one tells of none
            try:
                facts = json.loads(read_small(place))
                pid, born, _ = int(facts["pid"]), facts["born"], float(facts["began"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                return None
            child = self._children.get(name)
            if child is not None and facts["exit"] is None and child.poll() is not None:
                facts["exit"] = child.returncode if child.returncode >= 0 else 128 - child.returncode
                with suppress(OSError):
                    write_json(place, facts)
                del self._children[name]
        mine = child is not None  # one that ends between these two lines still runs, until its code is known
        facts["running"] = facts["exit"] is None and (mine or (born != "" and _born(pid) == born))
        return dict(facts)


def new_name() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def write_json(path: Path, facts: dict[str, Any]) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_text(json.dumps(facts), encoding="utf-8")
    beside.replace(path)


def _born(pid: int) -> str:
    """When a process began, in ticks since the machine's start: with its number, its name for ever. Empty: it is no more."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state[0] in "ZX" else state[19]


# Calculations that answer a page: a process that keeps torch and tokenizers in memory ----------------------------------


class Worker:
    """Answers one question after the other in its own process (worker.py); one that takes too long is ended with it."""

    def __init__(self, home: Path) -> None:
        self._home, self._lock = home, threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: dict[str, Any], seconds: float = 180.0) -> dict[str, Any]:
        with self._lock:
            process = self._process
            if process is None or process.poll() is not None:
                process = self._process = subprocess.Popen(
                    module("pronghorn.studio.worker"),
                    cwd=self._home,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,
                )
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            finally:
                timer.cancel()
            if not line:
                process.kill()
                process.wait()
                return {
                    "unanswered": True,
                    "problems": [{"what": "no answer", "why": f"it ended, or took more than {seconds:.0f} s", "fix": ""}],
                }
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
