"""A run's output folder: made, locked against a second run, checked for space, set aside by --fresh, left clean.

The lock is `flock` on `run.lock`: the kernel drops it when the process ends, however it ends, so that a run killed with
kill -9 can be started again at once. The file's text (process id, host, start time) is for the message to the second run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Self

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.small_files import read_small

LOCK_NAME = "run.lock"
ANOTHER = "output=runs/NAME"
RECIPE_NAME = "recipe.yaml"  # in a folder that `pronghorn fork` made: the recipe that goes on
# Any of these says that a folder is a run's; --fresh renames nothing else, whatever `output` was set to by mistake.
_TRACES_OF_A_RUN = (LOCK_NAME, "run.jsonl", "checkpoint-*")
# How long a lock may be held by nobody: its holder was killed and a worker it had just forked has not run yet (see below),
# or the next holder has not yet written its name.
_PATIENCE_S = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

# flock belongs to the open file, which a forked data worker shares: a worker that outlives its killed parent (torch's
# look for their parent every 5 s) would keep the folder locked. So every fork closes these in the child.
_held: set[int] = set()


def _close_held_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_held_in_child)


class RunFolder:
    """`with RunFolder("runs/a") as run:` holds the folder; leaving it removes again what nothing was written into."""

    def __init__(self, path: str | Path, another: str = ANOTHER) -> None:
        """`another`: the words of the command that choose another folder."""
        self.path, self._another = Path(path), another
        self._process = os.getpid()
        self._lock = -1
        self._made: list[Path] = []  # folders that did not exist before, outermost first

    def __enter__(self) -> Self:
        try:
            real = _resolved(self.path)  # a link to a bigger disk stays a link
            self._make(real)
            with tempfile.TemporaryFile(dir=real):  # permission bits do not tell a read-only mount; writing does
                pass
            self._lock = _lock(self.path, self._another)
        except OSError as error:
            self._remove_made()
            raise _cannot_write(self.path, error, self._another) from error
        except CommandError:
            self._remove_made()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() != self._process:  # a forked child that unwinds has no say over its parent's folder
            return
        with contextlib.suppress(OSError):  # the disk may be gone; what went wrong before this is what to report
            (self.path / LOCK_NAME).unlink()
        self._remove_made()
        _unlock(self._lock)

    def _make(self, real: Path) -> None:
        missing = [folder for folder in (real, *real.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another run made the shared parent a moment ago
                folder.mkdir()
                self._made.append(folder)
        if not real.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(real))

    def _remove_made(self) -> None:
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:  # not empty: something was written, or a neighbour run lives here
                return


def set_aside(path: str | Path) -> Path | None:
    """For --fresh: rename a run's folder to `<name>.old-1`, -2, ... and return the new name; None if there was nothing."""
    path = Path(path)
    try:
        real = _resolved(path)
        if not real.exists():
            return None
        if not any(next(real.glob(trace), None) for trace in _TRACES_OF_A_RUN):
            if real.is_dir() and not any(real.iterdir()):
                return None
            raise CommandError(
                "--fresh renames run folders only, and this is not one",
                where=str(path),
                why=f"it contains no {LOCK_NAME}, run.jsonl or checkpoint",
                fix=f"choose another folder: {ANOTHER}",
            )
        if Path.cwd().is_relative_to(real):
            raise CommandError(
                "--fresh cannot rename the current working directory",
                where=str(path),
                why=f"{real} would be renamed while this command runs inside it",
                fix=f"choose another folder: {ANOTHER}",
            )
        lock = _lock(path)
        try:
            number = 1
            while os.path.lexists(aside := real.with_name(f"{real.name}.old-{number}")):
                number += 1
            (real / LOCK_NAME).unlink()
            real.rename(aside)
        finally:
            _unlock(lock)
        return aside
    except OSError as error:
        raise _cannot_write(path, error) from error


def require_free_disk(folder: Path, needed: int, what: str, *, then: str) -> None:
    """Raise with the missing amount when `folder`'s disk has fewer than `needed` bytes free; `then` ends the fix."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        missing = readable_bytes(needed - free)
        raise EnvironmentFault(
            f"not enough disk space for {what}: {missing} missing",
            where=str(folder),
            why=f"it needs {readable_bytes(needed)}, but only {readable_bytes(free)} are free",
            fix=f"free {missing} on this disk, then {then}",
        )


def readable_bytes(count: int) -> str:
    """1,234,567 -> `1.2 MB`; thousands, as disks and `df -H` count."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except RuntimeError as error:  # Python's word, until 3.12, for a link to itself
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def _lock(path: Path, another: str = ANOTHER) -> int:
    """The descriptor that holds the lock; CommandError when another run holds it."""
    file = path / LOCK_NAME
    patient_until = time.monotonic() + _PATIENCE_S
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            holder = _holder(file)
            if _is_alive(holder) or time.monotonic() > patient_until:
                raise _already_running(path, holder, another) from None
            time.sleep(0.02)
            continue
        except OSError as error:
            os.close(descriptor)
            raise CommandError(
                "cannot lock the run's folder",
                where=str(path),
                why=f"{error.strerror} (a network disk without flock?)",
                fix=f"choose a folder on a local disk: {another}",
            ) from error
        # The previous holder may have removed or renamed the file between our open and our lock: then we hold nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                break
        os.close(descriptor)
    _held.add(descriptor)
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
    except OSError:  # a full disk, as a rule
        file.unlink()
        _unlock(descriptor)
        raise
    return descriptor


def _unlock(descriptor: int) -> None:
    _held.discard(descriptor)
    os.close(descriptor)


def _holder(file: Path) -> dict[str, Any]:
    """What the lock's holder wrote into it; empty if it has not written yet."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        holder = json.loads(read_small(file))
        if isinstance(holder, dict):
            return holder
    return {}


def _is_alive(holder: dict[str, Any]) -> bool:
    if holder.get("host") != socket.gethostname():
        return bool(holder)  # on another machine: the lock is all that can be known
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's process
        return True
    return True


def _already_running(path: Path, holder: dict[str, Any], another: str) -> CommandError:
    process = holder.get("pid")
    return CommandError(
        f"another run uses this folder: process {process or 'unknown'} on {holder.get('host', 'this machine')}, started "
        f"{holder.get('started', 'just now')}",
        where=str(path),
        why="two runs in one folder would overwrite each other's checkpoints",
        fix=f"wait for it, stop it (kill {process or 'PID'}: it saves first), or choose another folder: {another}",
    )


def _cannot_write(path: Path, error: OSError, another: str = ANOTHER) -> CommandError | EnvironmentFault:
    if error.errno in _FULL:
        fix = "free some space, then run the same command again"
        return EnvironmentFault.of(error, "no disk space for the run's folder", path, fix)
    fix = f"choose a folder with write permission: {another}"
    return CommandError.of(error, "cannot write to the run's folder", path, fix)
