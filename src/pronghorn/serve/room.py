"""Memory for bodies of large requests."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pronghorn.serve.asked import RequestError


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
