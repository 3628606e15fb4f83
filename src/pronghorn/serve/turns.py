"""Queues: for the model, which answers one request at a time, and for memory of large requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pronghorn.serve.asked import RequestError

LOOK = 0.5  # seconds between two looks at whether a waiting client is still there
MOST_WAITING = 400  # requests for the model


class Turns:
    """First come, first served."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most, self._lock = most, threading.Lock()
        self._line: deque[threading.Event] = deque()

    @contextmanager
    def one(self, leave: Callable[[], None]) -> Iterator[None]:
        """`leave` is called while waiting, and at the end of it; it raises where nobody wants the answer any more."""
        mine = threading.Event()
        with self._lock:
            if len(self._line) >= self._most:
                raise RequestError(f"{len(self._line)} requests are waiting already; try again later", status=503, retry=1)
            self._line.append(mine)
            self._line[0].set()
        try:
            while not mine.wait(LOOK):
                leave()
            leave()
            yield
        finally:
            with self._lock:
                self._line.remove(mine)
                if self._line:
                    self._line[0].set()


class Room:
    """Memory for bodies of requests. Small ones always fit; there are only so many connections."""

    def __init__(self, most: int, small: int) -> None:
        self._small, self._left, self._lock = small, most, threading.Lock()
        self._one = threading.Lock()

    @contextmanager
    def for_body(self, length: int) -> Iterator[None]:
        taken = length if length > self._small else 0
        with self._lock:
            if taken > self._left:
                raise RequestError("too many large requests at once; try again later", status=503, retry=1)
            self._left -= taken
        try:
            yield
        finally:
            with self._lock:
                self._left += taken

    @contextmanager
    def to_read(self, length: int) -> Iterator[None]:
        """A large body takes up to 40 times its size while it is parsed: one at a time. Small ones do not wait for it."""
        if length <= self._small:
            yield
            return
        with self._one:
            yield
