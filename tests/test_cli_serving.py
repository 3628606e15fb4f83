"""`pronghorn serve` as a process: its end by a signal, and standard error that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_load import chat, post
from cli_parts import Place
from tables import first_of


def started(place: Place, stderr: Any) -> tuple[subprocess.Popen[bytes], tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pronghorn.cli", "serve", str(place.run), "--port", "0", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    return process, ("127.0.0.1", int(url.rsplit(":", 1)[1].split("/")[0]))


def ended(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(60)
    finally:
        process.kill()


@pytest.mark.usefixtures("imported_python")
@pytest.mark.parametrize("kind", first_of(["not read", "gone", "full disk"], 2))
def test_standard_error_that_cannot_be_written_is_nobodys_problem(place: Place, kind: str) -> None:
    """A reader that left, a full disk, and a reader that does not read: its pipe is full before the server starts."""
    reading, writing = os.pipe()
    if kind == "not read":
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
    if kind == "full disk":
        if not Path("/dev/full").exists():
            pytest.skip("this system has no /dev/full")
        os.close(writing)
        writing = os.open("/dev/full", os.O_WRONLY)
    process, where = started(place, writing)
    if kind == "gone":
        os.close(reading)
    for _ in range(3):
        with socket.create_connection(where, timeout=60) as connection:
            connection.sendall(post(chat("a", max_tokens=2)))
            assert b"".join(iter(lambda: connection.recv(65536), b"")).startswith(b"HTTP/1.1 200")
    process.send_signal(signal.SIGTERM)
    assert ended(process) == 143
    os.close(writing)
    if kind != "gone":
        os.close(reading)


@pytest.mark.usefixtures("imported_python")
def test_sigterm_lets_a_stream_end(place: Place) -> None:
    process, where = started(place, subprocess.PIPE)
    with socket.create_connection(where, timeout=60) as connection:
        connection.sendall(post(chat("a", stream=True, max_tokens=400, temperature=2)))
        data = connection.recv(10)
        process.send_signal(signal.SIGTERM)
        data += b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert ended(process) == 143
    assert process.stdout is not None
    assert process.stderr is not None
    assert b"stopped by SIGTERM" in process.stdout.read()
    said = process.stderr.read()
    assert said.endswith(b"stopped\n")
    assert b"Traceback" not in said
