"""Rows shared out to one process a core, and watched: a worker that is killed or stopped ends in a sentence, not in silence.

While it waits for rows, the parent looks at its workers once a second. When none of them has used any CPU time for a minute,
they are not slow, they stand still (stopped by a signal, or waiting for something that never comes): the rows under way, the
process and its state are named, and the workers are ended.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronghorn.data.encode.encode import Encoder, Told
from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.read.reading import Chunk
from pronghorn.data.read.source_files import BadRow
from pronghorn.digests import cores as usable_cores
from pronghorn.errors import EnvironmentFault

CHUNK = 256  # rows a worker takes at once: about 0.1 s of work, and one record batch of the file
ROWS_WORTH_A_POOL = 2000  # 2,000 rows take about a second in one process; starting the others takes 0.1 s
LOOK_EVERY = 1.0  # seconds
STANDING_STILL = 60  # looks in a row without any CPU time of any worker. Looks, not the clock: a parent that was stopped with
# its workers, by Ctrl-Z, has not looked meanwhile
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for disk I/O", "Z": "ended", "S": "waiting"}

Encoded = tuple[Any, list[BadRow], Told]  # a record batch, the rows that are not in it, and how many are not as they were
NOTHING: Encoded = (None, [], {})


class EncodingPool:
    """Chunks in, record batches out, in the same order; on one process a core once there are enough rows. `waiting` is called
    about once a second while there is nothing to do but wait."""

    def __init__(self, encoder: Encoder, cores: int | None = None, waiting: Callable[[], None] = lambda: None) -> None:
        self._encoder = encoder
        self._cores = cores or usable_cores()
        self._tell = waiting
        self._given = 0
        self._executor: ProcessPoolExecutor | None = None
        self._workers: list[multiprocessing.process.BaseProcess] = []
        self._waiting: deque[tuple[Chunk, Future[Encoded]]] = deque()

    def __enter__(self) -> EncodingPool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._executor is not None:
            if kind is not None:  # a worker that was stopped would never end by itself
                for worker in self._workers:
                    worker.kill()
            self._executor.shutdown(wait=True, cancel_futures=True)

    def give(self, chunk: Chunk) -> Iterator[tuple[Chunk, Encoded]]:
        """Take one chunk; returns what is ready, waiting only while more than two chunks a core are under way."""
        if chunk.groups:
            self._encoder.prepare_for(chunk.groups[0].answers[0])
        self._given += len(chunk.groups)
        if self._executor is None and self._given > ROWS_WORTH_A_POOL and self._cores > 1 and _fork_is_safe():
            self._executor = ProcessPoolExecutor(
                self._cores, multiprocessing.get_context("fork"), initializer=_start_worker, initargs=(self._encoder,)
            )
            others = set(multiprocessing.active_children())
            try:
                with _signals_waiting():  # all workers are forked now
                    self._submit(self._executor, chunk)
            finally:
                self._workers = [child for child in multiprocessing.active_children() if child not in others]
        elif self._executor is None:
            yield chunk, self._encoder.encode_many(chunk.groups) if chunk.groups else NOTHING
        else:
            self._submit(self._executor, chunk)
        while self._waiting and (self._waiting[0][1].done() or len(self._waiting) > 2 * self._cores):
            yield self._result()

    def _submit(self, executor: ProcessPoolExecutor, chunk: Chunk) -> None:
        future: Future[Encoded] = Future()
        try:
            if chunk.groups:
                future = executor.submit(_encode_in_worker, chunk.groups)
            else:
                future.set_result(NOTHING)
        except BrokenProcessPool as error:
            raise self._killed() from error
        self._waiting.append((chunk, future))

    def rest(self) -> Iterator[tuple[Chunk, Encoded]]:
        while self._waiting:
            yield self._result()

    def _result(self) -> tuple[Chunk, Encoded]:
        chunk, future = self._waiting[0]
        still, before = 0, self._cpu_ticks()
        while True:
            try:
                found = future.result(timeout=LOOK_EVERY)
            except TimeoutError:
                self._tell()
                now = self._cpu_ticks()
                still, before = still + 1 if now == before else 0, now
                if still >= STANDING_STILL:
                    raise self._stand_still(_rows(chunk)) from None
            except BrokenProcessPool as error:
                raise self._killed() from error
            else:
                self._waiting.popleft()
                return chunk, found

    def _cpu_ticks(self) -> list[int]:
        return [int(times[11]) + int(times[12]) for worker in self._workers if (times := _process(worker.pid))]

    def _stand_still(self, rows: str) -> EnvironmentFault:
        states = {worker.pid: times[0] for worker in self._workers if (times := _process(worker.pid))}
        stopped = [(pid, state) for pid, state in states.items() if state in "TtD"]
        pid, state = [*stopped, *states.items(), (0, "?")][0]
        seconds = STANDING_STILL * LOOK_EVERY
        return EnvironmentFault(
            f"tokenizing hangs: process {pid} is {STATES.get(state, 'in the state ' + state)}", where=rows,
            why=f"none of {len(self._workers)} workers made progress for {seconds:.0f} s", fix="run the same command again",
        )  # fmt: skip

    def _ended(self) -> list[tuple[int | None, int | None]]:
        """Workers that did not end by themselves, nor because the pool ended them."""
        return [(worker.pid, worker.exitcode) for worker in self._workers if worker.exitcode not in (None, 0, -signal.SIGTERM)]

    def _killed(self) -> EnvironmentFault:
        for _ in range(100):  # the pool is broken as soon as a pipe closes, and how its process ended is known a moment later
            if ended := self._ended():
                break
            time.sleep(0.01)
        who = f"tokenizer process {ended[0][0]} {_how(ended[0][1])}" if ended else ("a tokenizer process was killed")
        rows = f"{_rows(self._waiting[0][0])} and following rows" if self._waiting else ""
        return EnvironmentFault(
            who, where=rows, why="the usual cause is too little memory", fix="free memory and run the same command again"
        )


def _rows(chunk: Chunk) -> str:
    return f"{chunk.groups[0].where} to {chunk.groups[-1].where}" if chunk.groups else ""


def _process(pid: int | None) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state first, CPU times at 11 and 12. Empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _how(code: int | None) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with exit code {code}"


def _fork_is_safe() -> bool:
    """A forked worker starts at once and shares the tokenizer's memory; but CUDA does not survive a fork."""
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return False
    torch = sys.modules.get("torch")  # never imported for the question
    return torch is None or not torch.cuda.is_initialized()


SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} if hasattr(signal, "pthread_sigmask") else set()


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """While Python forks, whatever a signal raises is lost: functions that libraries want called after a fork swallow it. So
    signals wait until it is done."""
    if not SIGNALS:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker_encoder: Encoder | None = None


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder  # noqa: PLW0603 - the one thing a worker process holds
    _worker_encoder = encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if SIGNALS:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # they waited while this process was made
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # of this worker: the cores are taken
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    """A parent that is killed cannot tell its workers; they would wait for the next chunk forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(groups: Sequence[Group]) -> Encoded:
    assert _worker_encoder is not None
    return _worker_encoder.encode_many(groups)
