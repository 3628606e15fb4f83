"""Where things that can be made again are kept between runs, whether a name is that of a folder here, and under which names
files are written before they are whole."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path

A_DAY = 86_400.0
PROCESS = re.compile(r"\.(?P<machine>[0-9a-f]{12})-(?P<process>\d+)\.(?:tmp|partial)$")


def cache_folder() -> Path:
    """`PRONGHORN_CACHE`, or `pronghorn` under the user's cache folder."""
    chosen = os.environ.get("PRONGHORN_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pronghorn"


def folder_of(name: str) -> Path | None:
    """The folder with this name, `~` opened. None: a hub name, then, or a mistake; also a name that is too long, one below a
    folder that may not be entered, and the `~` of nobody."""
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_dir() else None
    except (OSError, RuntimeError):
        return None


# Files on their way ------------------------------------------------------------------------------------------------------


def temporary(path: Path) -> Path:
    """A name beside `path`, to be written first and then renamed; it says which process of which machine writes there."""
    return path.with_name(f".{path.name}.{this_process()}.tmp")


def remove_left_behind(folder: Path) -> None:
    """Temporary files of processes that are no more. The numbers of processes on other machines, which may share the folder,
    say nothing here; whoever is still at it there touches its file more often than once a day."""
    for file in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if has_ended(file.name, then=time.time() - file.stat().st_mtime > A_DAY):
                file.unlink()


def this_process() -> str:
    """For names of files."""
    return f"{_machine()}-{os.getpid()}"


def has_ended(name: str, *, then: bool) -> bool:
    """Whether the process in this name is no more; `then`, where that cannot be known."""
    found = PROCESS.search(name)
    return not _runs(int(found["process"])) if found and found["machine"] == _machine() else then


@functools.cache
def _machine() -> str:
    """Differs wherever the same number is another process: on another machine, after a restart, in another container."""
    parts = [platform.node()]
    with suppress(OSError):
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it runs, for somebody else
        return True
    return True
