"""The bytes of one connection: what is read has a deadline and a size, and a client that does not read holds up nobody."""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPException
from typing import Any

SEND_SECONDS = 30.0  # for an answer, or the rest of a stream, to be taken
PIECE = 1 << 16


class Reader(io.RawIOBase):
    """A deadline for all that is read since `allow`, not for each byte: a client that sends one byte a minute is cut off."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline = 0.0
        self._left = 0

    def allow(self, seconds: float, most: int) -> None:
        self._deadline, self._left = time.monotonic() + seconds, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise HTTPException("the headers are too long")
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request did not arrive in time")
        self._connection.settimeout(seconds)
        got = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= got
        return got


class Writer(io.BufferedIOBase):
    """A write returns when all is sent. Only the thread of this connection waits for its client."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        deadline, unsent = time.monotonic() + SEND_SECONDS, memoryview(data)
        while unsent:
            try:
                self._connection.settimeout(max(0.0, deadline - time.monotonic()))
                unsent = unsent[self._connection.send(unsent[:PIECE]) :]
            except (BlockingIOError, TimeoutError):
                raise TimeoutError("the client does not read its answer") from None
        return len(data)


def linger(connection: socket.socket, seconds: float = 2.0, most: int = 64 << 20) -> None:
    """Before closing with bytes unread: the system would answer them with a reset, and the client lose what we said."""
    deadline = time.monotonic() + seconds
    try:
        connection.shutdown(socket.SHUT_WR)
        while most > 0 and (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            got = len(connection.recv(PIECE))
            if not got:
                return
            most -= got
    except OSError:
        return
