"""Deadlines of reading, writes that wait for nobody, and the last words to a client that is still sending."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException

import pytest

from pronghorn.serve import wire
from pronghorn.serve.wire import Reader, Writer, linger


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, two = socket.socketpair()
    with one, two:
        yield one, two


def test_a_byte_now_and_then_does_not_extend_the_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.02):
            there.send(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    reader = Reader(here)
    reader.allow(0.3, 1 << 20)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        io.BufferedReader(reader).readline()
    over.set()
    thread.join()
    assert time.monotonic() - began < 20


def test_a_client_that_does_not_read_is_cut_off(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = ends
    monkeypatch.setattr(wire, "SEND_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        Writer(here).write(b"x" * 4_000_000)  # more than the system takes
    assert there.recv(10) == b"x" * 10


def test_lingering_takes_what_is_still_sent_and_ends(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    there.sendall(b"x" * 100_000)
    there.shutdown(socket.SHUT_WR)
    linger(here, seconds=20)
    assert there.recv(1) == b""
    one, two = socket.socketpair()
    with one, two:
        began = time.monotonic()
        linger(one, seconds=0.05)  # the client says nothing more, and does not leave
        assert time.monotonic() - began < 20


def test_headers_have_a_size(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    reader = Reader(here)
    reader.allow(20, 1000)
    there.sendall(b"a" * 2000)
    with pytest.raises(HTTPException, match="too long"):
        io.BufferedReader(reader).readline()
