"""The loggers of a run, seen from the run: started beside it, looked at now and then, and ended with it.

Nothing that they do reaches the run: each is a process that reads run.jsonl by itself (process.py). One that fails becomes a
notice; one that does not end is stopped, PATIENCE after the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from pronghorn.errors import PronghornError
from pronghorn.program import module
from pronghorn.report.run_log import RunLog

PROCESS = "pronghorn.report.loggers.process"
LONGEST_LINE = 1 << 16
PATIENCE = 20.0  # seconds after the end of the run, for what is still to be sent


@contextlib.contextmanager
def logging_to(names: Sequence[str], project: str | None, log: RunLog) -> Iterator[None]:
    """Keeps the loggers running around a run that writes this log."""
    loggers = [_LoggerProcess(name, project or "", log.path) for name in names]

    def tell(_event: dict[str, Any] | None = None) -> None:
        for text in [text for logger in loggers for text in logger.news()]:
            log.write("notice", text=text)

    log.listen(tell)
    try:
        yield
    finally:
        deadline = time.monotonic() + PATIENCE
        try:
            for logger in loggers:
                logger.ask_for_the_end()
            for logger in loggers:
                logger.wait(deadline)
        finally:
            for logger in loggers:
                logger.stop()
        with contextlib.suppress(PronghornError):  # a full disk ended the run, and takes no notice either
            tell()


class _LoggerProcess:
    """The process of one logger."""

    def __init__(self, name: str, project: str, log: Path) -> None:
        self._name, self._output = name, log.parent / f"{name}.log"
        self._news: SimpleQueue[str] = SimpleQueue()
        self._failed = False
        self._popen: subprocess.Popen[bytes] | None = None
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # it must find what we have found
        words = [name, str(log.parent), str(log.stat().st_size), project]
        try:
            with self._output.open("ab") as output:
                self._popen = subprocess.Popen(
                    [*module(PROCESS), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=os.environ | {"PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C goes to the whole group of the terminal: not to this one
                )
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        assert self._popen.stdout is not None  # it is a pipe
        self._reader = threading.Thread(target=self._read, args=(self._popen.stdout,), daemon=True)
        self._reader.start()

    def news(self) -> list[str]:
        """Notices since the last call."""
        if self._popen is not None and not self._failed and self._popen.poll() and not self._reader.is_alive():
            self._fail(f"its process ended with code {self._popen.returncode}")
        return [self._news.get() for _ in range(self._news.qsize())]

    def ask_for_the_end(self) -> None:
        if self._popen is not None and self._popen.stdin is not None:
            # `end` as well as a closed pipe: a data worker forked from this process still holds its end of it.
            with contextlib.suppress(OSError):
                self._popen.stdin.write(b"end\n")
                self._popen.stdin.close()

    def wait(self, deadline: float) -> None:
        if self._popen is None:
            return
        try:
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._failed = True
            self._news.put(
                f"{self._name} did not finish within {PATIENCE:g} s after the run ended and was stopped; it may lack the last"
                f" events, which are in run.jsonl ({self._output})"
            )
        self._reader.join(1.0)  # its last word

    def stop(self) -> None:
        """Kills it if it still runs, with the library's own processes, which are in its group."""
        if self._popen is not None and self._popen.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _read(self, answers: IO[bytes]) -> None:
        for line in iter(lambda: answers.readline(LONGEST_LINE), b""):
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if "failed" in said:
                    self._fail(said["failed"])
                elif "told" in said:
                    self._news.put(f"{self._name} {said['told']} ({self._output})")
                else:
                    self._news.put(f"{self._name}: {said['place']}")

    def _fail(self, why: str) -> None:
        self._failed = True
        self._news.put(f"{self._name} failed and has stopped logging: {why}; the run is not affected ({self._output})")
