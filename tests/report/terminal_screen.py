"""A process on a pseudo-terminal of its own, which is its controlling terminal: Ctrl-C is a byte that is typed, not a signal.
And what its screen shows: as much of a terminal as rich's live display uses."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from typing import Self

CTRL_C = b"\x03"
PARTS = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Screen:
    def __init__(self) -> None:
        self.rows, self.row, self.column = [""], 0, 0

    def feed(self, text: str) -> None:
        for numbers, command, control, letters in PARTS.findall(text):
            if control == "\r":
                self.column = 0
            elif control == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif letters:
                line = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = line[: self.column] + letters + line[self.column + len(letters) :]
                self.column += len(letters)
            elif command == "A":
                self.row = max(0, self.row - int(numbers or 1))
            elif command == "K":
                self.rows[self.row] = ""

    def __str__(self) -> str:
        return "\n".join(self.rows)


class Terminal:
    """`with Terminal(code) as terminal`: the process is killed at the end."""

    def __init__(self, *words: str, width: int = 80) -> None:
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - one system call
            env=environment | {"TERM": "xterm-256color"},
        )
        os.close(follower)
        self.screen, self.printed, self._ended = Screen(), "", False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._leader)

    def type(self, letters: bytes) -> None:
        os.write(self._leader, letters)

    def frames(self, until: Callable[[str], bool], seconds: float = 60.0) -> list[str]:
        """What stood on the screen whenever nothing was printed for a moment; until one of them is what is waited for, or the
        process has ended."""
        seen, deadline = list[str](), time.monotonic() + seconds
        while time.monotonic() < deadline and not self._ended:
            if select.select([self._leader], [], [], 0.08)[0]:
                try:
                    block = os.read(self._leader, 65536)
                except OSError:  # how Linux says that the other end is closed
                    block = b""
                self._ended = not block
                text = block.decode("utf-8", "replace")
                self.printed += text
                self.screen.feed(text)
                continue
            seen.append(str(self.screen))
            if until(seen[-1]):
                return seen
        assert self._ended, f"it did not come:\n{self.screen}"
        return [*seen, str(self.screen)]
