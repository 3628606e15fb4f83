"""What tests of processes share: whether one runs, and waiting for something to happen."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE = 120.0  # seconds, so that nothing hangs


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"  # a zombie that nobody reaps is gone
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until(found: Callable[[], object], what: str = "nothing happens") -> None:
    until = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < until, what
        time.sleep(0.01)
