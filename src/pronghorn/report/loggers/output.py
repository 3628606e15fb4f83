"""What a logger's library prints, kept in a file up to a limit: one that prints for ever filled 10 GB in 40 s."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

MOST = 1_000_000  # bytes of one session
PIECE = 1 << 16
SLOWED = 0.01  # seconds for each piece that is dropped: a library that prints without end gets little of the processor


@contextlib.contextmanager
def bounded(tell: Callable[[str], None]) -> Iterator[None]:
    """What this process and its children print goes to what standard error was; `tell` is called once, when it is too much."""
    kept = os.dup(2)
    reading, writing = os.pipe()
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    os.close(writing)
    thread = threading.Thread(target=_keep, args=(reading, kept, tell), daemon=True)
    thread.start()
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        for descriptor in (1, 2):
            os.dup2(kept, descriptor)  # where the library has left no process behind, the thread sees the end
        thread.join(1.0)


def _keep(reading: int, kept: int, tell: Callable[[str], None]) -> None:
    left = MOST
    while data := os.read(reading, PIECE):
        if left <= 0:
            time.sleep(SLOWED)
            continue
        with contextlib.suppress(OSError):  # a full disk
            os.write(kept, data[:left])
        left -= len(data)
        if left <= 0:
            with contextlib.suppress(OSError):
                os.write(kept, f"\n[more than {MOST:,} bytes; the rest is not kept]\n".encode())
                tell(f"printed more than {MOST:,} bytes; the rest of its output is not kept")
