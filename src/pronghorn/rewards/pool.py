"""Processes that run a user's reward functions, with a limit on the time of an answer and on memory.

A process that exceeds its time is killed with all it started, and replaced; so is one that dies. The answer is then without
that file's rewards, which is counted and told, and never a reason to wait. Nothing is pickled: JSON lines go both ways.

    with RewardPool(Path("rewards.py"), workers=2, seconds=10.0, memory=4 << 30) as pool:
        pool.names                          # of its functions
        pool.score(rows)                    # of each row a number by function, None where it does not apply, or a `Fault`
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Self

from pronghorn.errors import CommandError

START_SECONDS = 60.0  # to import the file
FORM = "def reward(prompts, completions, **columns) -> list[float]"


@dataclass(frozen=True)
class Fault:
    """Why an answer has no reward of a function."""

    what: str


Reward = float | None | Fault


class Worker:
    module = "pronghorn.rewards.worker"

    def __init__(self, path: Path, memory: int, functions: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(path), str(memory), *functions],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that all it starts ends with it
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        os.set_blocking(self.output.fileno(), False)
        self.began, self.row, self._text = time.monotonic(), -1, b""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def give(self, number: int, row: Mapping[str, Any]) -> None:
        self.row, self.began = number, time.monotonic()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # what it died of is seen when its output ends
            self.process.stdin.write(json.dumps(row).encode() + b"\n")
            self.process.stdin.flush()

    def reply(self) -> dict[str, Any] | None:
        """The next line, if it is complete; EOFError where none will come."""
        while b"\n" not in self._text:
            found = self.output.read(1 << 16)
            if found is None:
                return None
            if not found:
                raise EOFError
            self._text += found
        line, _, self._text = self._text.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def end(self) -> str:
        """Kills it and what it started; returns how it had ended before, if it had."""
        code = self.process.poll()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                pipe and pipe.close()
        if code is None:
            return ""
        return f"its process ended with signal {-code}" if code < 0 else f"its process ended with exit code {code}"


class RewardPool:
    worker: ClassVar[type[Worker]] = Worker
    option: ClassVar[str] = "--reward-file"
    form: ClassVar[str] = FORM

    def __init__(
        self, path: Path, *, workers: int = 2, seconds: float = 30.0, memory: int = 0, functions: Sequence[str] = ()
    ) -> None:
        """`seconds`: of an answer. `memory`: bytes that a process may take beyond its imports; 0: no limit. `functions`: those
        to call; none: those that have the names of rewards (worker.py)."""
        if path.suffix != ".py" or not path.is_file():
            why = "it is not a .py file" if path.is_file() else "file not found"
            raise CommandError(
                what=f"{self.option}: not a Python file", where=str(path), why=why, fix=f"pass a file with {self.form}"
            )
        self.path, self.seconds, self.memory, self.functions = path.resolve(), seconds, memory, functions
        self.replaced = 0  # processes that were killed or died
        self._workers: list[Worker] = []
        try:
            self._workers = [self.worker(self.path, memory, functions) for _ in range(workers)]
            self.names, *_ = [self._names(worker) for worker in self._workers]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers = []

    def score(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Reward]]:
        """Rewards of each row by function. Rows are given out one at a time."""
        results: list[dict[str, Reward]] = [{} for _ in rows]
        waiting = deque(range(len(rows)))
        with selectors.DefaultSelector() as ready:
            for at in range(len(self._workers)):
                self._next(at, waiting, rows, ready)
            while ready.get_map():
                soonest = min(self._workers[key.data].began for key in ready.get_map().values()) + self.seconds
                ready.select(max(0.0, min(0.5, soonest - time.monotonic())))
                for key in list(ready.get_map().values()):
                    worker = self._workers[key.data]
                    if (found := self._heard(worker)) is not None:
                        results[worker.row] = found
                        ready.unregister(key.fileobj)
                        if worker.process.returncode is not None:
                            self._replace(key.data)
                        self._next(key.data, waiting, rows, ready)
        return results

    def _next(self, at: int, waiting: deque[int], rows: Sequence[Mapping[str, Any]], ready: selectors.BaseSelector) -> None:
        if waiting:
            number = waiting.popleft()
            self._workers[at].give(number, rows[number])
            ready.register(self._workers[at].output, selectors.EVENT_READ, at)

    def _heard(self, worker: Worker) -> dict[str, Reward] | None:
        """What it says of its row, or what befell it; None: it still works."""
        try:
            reply = worker.reply()
        except EOFError:
            worker.process.wait()
            return dict.fromkeys(self.names, Fault(worker.end()))
        if reply is not None:
            return {name: Fault(one["error"]) if isinstance(one, dict) else one for name, one in reply["rewards"].items()}
        if time.monotonic() - worker.began < self.seconds:
            return None
        worker.end()
        return dict.fromkeys(self.names, Fault(f"it took longer than {self.seconds:g} s"))

    def _replace(self, at: int) -> None:
        self.replaced += 1
        self._workers[at] = self.worker(self.path, self.memory, self.functions)
        self._names(self._workers[at])

    def _names(self, worker: Worker) -> list[str]:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            try:
                reply = worker.reply()
            except EOFError:
                raise self._bad(worker.end() or "its process ended") from None
            if reply is not None:
                if "failed" in reply:
                    raise self._bad(reply["failed"])
                self.unused: list[str] = reply["unused"]
                names: list[str] = reply["names"]
                return names
            time.sleep(0.01)
        raise self._bad(f"importing it took longer than {START_SECONDS:g} s")

    def _bad(self, why: str) -> CommandError:
        what = f"{self.option}: the file cannot be used"
        fix = f"fix the file: {self.form}" + (", or the names in the recipe's rewards" if self.functions else "")
        return CommandError(what=what, where=str(self.path), why=why, fix=fix)
