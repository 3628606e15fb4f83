"""`pronghorn serve`: its options, and the server until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from pronghorn.cli.output import displaying, say
from pronghorn.errors import CommandError, Interrupted, printable
from pronghorn.program import command

MOST_LINES = 1000  # of the log, not written yet
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of malloc.h

TEXT = "serve trained runs on this machine with OpenAI's API, to try them out"


def options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "runs", nargs="+", metavar="run", help="a run's output folder; several runs must be adapters of the same base model"
    )
    one.add_argument("--checkpoint", default="best", help="best, last or a step number (default: %(default)s)")
    one.add_argument("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: %(default)s)")
    one.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")


def serve(
    arguments: argparse.Namespace, base_of: Callable[[Path], str], loading: Callable[[str], AbstractContextManager[None]]
) -> None:
    if not 0 <= arguments.port <= 65535:
        raise CommandError(what=f"--port {arguments.port} is not a port", fix="use 0 to 65535")
    if arguments.own_process:
        _give_memory_back()
    folders = [Path(run) for run in arguments.runs]
    base = base_of(folders[0])
    with displaying(arguments, label="loading the model"):
        with loading(base):
            from pronghorn.serve.handler import Handler
            from pronghorn.serve.models import load
            from pronghorn.serve.server import Server
        models = load(folders, arguments.checkpoint)
    log = _Log()
    server = Server(models, arguments.host, arguments.port, Handler, told=log)
    if not server.local:
        log(f"warning: anyone who can reach {arguments.host} can use the model; there is no API key and no encryption")
    names = ", ".join(models.names)
    say(
        arguments,
        {"url": server.url, "models": models.names},
        f"serving {names}\nat {server.url}; Ctrl-C stops it\n"
        f"for many users: {command('export', arguments.runs[0], '--to', 'vllm')}",
    )
    sys.stdout.flush()
    received: list[int] = []
    with _ending(server.shutdown, received):
        server.serve_forever()
        server.end()
    log("stopped")
    code = 128 + received[0] if received and received[0] != signal.SIGINT else 0
    if not log.close() and arguments.own_process:
        os._exit(code)  # nobody reads standard error: a last message would wait for ever
    if code:
        name = signal.Signals(received[0]).name
        raise Interrupted(f"stopped by {name}; answers under way were ended", signal_number=received[0])


def _give_memory_back() -> None:
    """glibc keeps what a thread frees in one of 8 heaps a core, and after the first large block keeps large ones, too. With two
    heaps, and blocks of 4 MB that go back at once, the median memory of each third of 15 minutes of mixed load is
    574 MB (benchmarks/results/serve-load.json)."""
    import ctypes

    with suppress(OSError, AttributeError):  # another C library
        settings = ctypes.CDLL(None).mallopt
        settings(M_ARENA_MAX, 2)
        settings(M_MMAP_THRESHOLD, 4 << 20)


@contextmanager
def _ending(end: Callable[[], None], received: list[int]) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the server in order; the second one kills the process."""

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        for one in before:
            signal.signal(one, signal.SIG_DFL)
        threading.Thread(target=end, daemon=True).start()  # it waits for the loop that this thread is in

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    # What is ignored stays so: nohup, and background jobs of a shell without job control.
    before = {one: old for one in numbers if (old := signal.getsignal(one)) not in (signal.SIG_IGN, None)}
    for one in before:
        signal.signal(one, receive)
    try:
        yield
    finally:
        for one, old in before.items():
            signal.signal(one, old)


class _Log:
    """Lines for standard error. A thread writes them, so that no answer waits for a terminal that stands still; where it cannot
    write (a full disk, a reader that is gone), the lines are lost, and it says how many when it can write again."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue(MOST_LINES)
        self._lost = 0
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, line: str) -> None:
        try:
            self._lines.put_nowait(printable(line) + "\n")
        except queue.Full:
            self._lost += 1

    def close(self) -> bool:
        """Whether all is written, or was tried."""
        deadline = time.monotonic() + 1.0
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._lines.unfinished_tasks

    def _work(self) -> None:
        while True:
            line = self._lines.get()
            lost = self._lost
            try:
                _write(f"{lost} lines could not be written here\n{line}" if lost else line)
                self._lost -= lost
            except (OSError, ValueError):
                self._lost += 1
            self._lines.task_done()


def _write(text: str) -> None:
    """Past Python's buffer, whose lock a thread that waits would still hold when the process ends."""
    os.write(sys.stderr.fileno(), text.encode("utf-8", "replace"))
