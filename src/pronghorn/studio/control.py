"""A run's own process: whether there is one, and asking it to stop. The lock on `run.lock` is the run's as long as it lives, so
a process that took over the number of one that ended is never asked."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
from contextlib import suppress
from pathlib import Path

from pronghorn.serve.asked import RequestError
from pronghorn.small_files import read_small
from pronghorn.train.run.run_folder import LOCK_NAME

CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def holder(folder: Path) -> int | None:
    """The process that holds the folder; 0 on another machine, where it cannot be asked; None if there is none."""
    place = folder / LOCK_NAME
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None  # nobody holds it
    except BlockingIOError:
        pass
    except OSError:
        return None
    finally:
        os.close(descriptor)
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(place))
        pid = found.get("pid") if isinstance(found, dict) else None
        if isinstance(pid, int) and not isinstance(pid, bool) and pid > 1:
            return pid if found.get("host") == socket.gethostname() else 0
    return None


def paused(pid: int) -> bool:
    """By SIGSTOP or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def stop(folder: Path) -> int:
    """Ctrl-C for the run: it finishes its step, saves and ends. The process is held while the lock is looked at once more."""
    pid = holder(folder)
    if pid is None:
        raise RequestError("the run is not running", status=409)
    if pid == 0:
        raise RequestError("the run is on another machine; stop it there", status=409)
    try:
        process = os.pidfd_open(pid)
        try:
            if holder(folder) != pid:
                raise RequestError("the run has just ended", status=409)
            signal.pidfd_send_signal(process, signal.SIGINT)
        finally:
            os.close(process)
    except ProcessLookupError:
        raise RequestError("the run has just ended", status=409) from None
    except PermissionError:
        raise RequestError(f"process {pid} is somebody else's", status=403) from None
    return pid


def checkpoints(folder: Path) -> list[int]:
    """Steps of whole checkpoints: the manifest is written last."""
    try:
        names = [(found, one) for one in os.listdir(folder) if (found := CHECKPOINT.fullmatch(one))]  # noqa: PTH208
    except OSError:
        return []
    return sorted(int(found[1]) for found, one in names if (folder / one / "manifest.json").is_file())
