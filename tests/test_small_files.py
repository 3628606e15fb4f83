"""Reading files whole: no device, no pipe, nothing larger than expected."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from pronghorn.small_files import read_small, read_small_text
from tables import table


def test_a_regular_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x\r\ny\rz\n")
    assert read_small(file, 7) == b"x\r\ny\rz\n"
    assert read_small_text(file) == file.read_text()
    (tmp_path / "link").symlink_to(file)
    assert read_small(tmp_path / "link") == b"x\r\ny\rz\n"
    with pytest.raises(OSError, match="it has 7 bytes; the limit is 6 bytes") as error:
        read_small(file, 6)
    assert error.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "none")
    os.truncate(file, 1 << 40)  # sparse
    with pytest.raises(OSError, match="1,099,511,627,776 bytes"):
        read_small(file)


def test_a_file_that_says_it_is_empty_is_read_to_the_limit() -> None:
    """As those of /proc do."""
    status = Path("/proc/self/status")
    assert b"Pid" in read_small(status)
    with pytest.raises(OSError, match="more than 10 bytes"):
        read_small(status, 10)


@table("kind", ["zero", "random", "terminal", "pipe", "socket", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(file)  # nobody writes to it
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        import socket

        socket.socket(socket.AF_UNIX).bind(os.path.relpath(file))
    else:
        file.symlink_to({"zero": "/dev/zero", "random": "/dev/urandom", "terminal": "/dev/ptmx"}[kind])
    with pytest.raises(OSError) as error:  # noqa: PT011 - of which kind is the system's to say for some
        read_small(file)
    assert error.value.strerror


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    thread = threading.Thread(target=lambda: (os.write(writing, b"model: a"), os.close(writing)))
    thread.start()
    assert read_small(Path(f"/dev/fd/{reading}")) == b"model: a"
    thread.join()
    os.close(reading)
