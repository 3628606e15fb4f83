"""The bytes of one connection: what is read has a deadline and a size, and a client that does not read holds up nobody."""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPException
from typing import Any

SEND_SECONDS = 30.0  # for an answer, or the rest of a stream, to be taken
MOST_UNREAD = 1 << 20  # bytes of a stream that its client has not taken while it is generated
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
    """`waits`: whether a write returns only when all is sent. While an answer is generated it does not."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._unsent = connection, bytearray()
        self.waits = True

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._unsent += data
        self.send_rest() if self.waits else self._send(0.0)
        if len(self._unsent) > MOST_UNREAD:
            raise ConnectionAbortedError("the client does not read its stream")
        return len(data)

    def send_rest(self) -> None:
        if not self._send(SEND_SECONDS):
            raise TimeoutError("the client does not read its answer")

    def _send(self, seconds: float) -> bool:
        """Whether all is sent."""
        deadline = time.monotonic() + seconds
        while self._unsent:
            try:
                self._connection.settimeout(max(0.0, deadline - time.monotonic()))
                sent = self._connection.send(self._unsent[:PIECE])
            except (BlockingIOError, TimeoutError):
                return False
            del self._unsent[:sent]
        return True


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
