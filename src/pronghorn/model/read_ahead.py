"""Reads weight files into the page cache while modules are imported and data is prepared.

Importing torch and transformers takes some 5 s, preparing new data longer; the disk is idle meanwhile, and loading then waits
for it. So a thread reads the weight files in loading order. 2 uncached GB took 2.1 s to load, and 0.01 s after reading ahead;
the imports took as long as before (two cores, a disk of 1 GB/s). POSIX_FADV_WILLNEED had no effect.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pronghorn.errors import PronghornError
from pronghorn.model.fingerprint import local_files
from pronghorn.model.weight_files import files_to_load

PIECE = 4 * 2**20  # bytes
MEMORY = Path("/proc/meminfo")


def read_ahead(name: str) -> threading.Thread | None:
    """For a folder or a cached hub model; does nothing without a name, or if the files exceed free memory. Loading reports
    damaged files."""
    with suppress(PronghornError, OSError):
        if name and (folder := local_files(name)):
            files = files_to_load(folder)
            if sum(file.stat().st_size for file in files) < free_memory():
                thread = threading.Thread(target=_read, args=(files,), daemon=True, name="read ahead")
                thread.start()
                return thread
    return None


def free_memory() -> int:
    """Available memory in bytes, cache included; 0 if unknown."""
    lines = MEMORY.read_text().splitlines() if MEMORY.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _read(files: Sequence[Path]) -> None:
    buffer = bytearray(PIECE)
    with suppress(OSError):
        for file in files:
            with file.open("rb", buffering=0) as opened:
                for at in range(0, file.stat().st_size, PIECE):
                    if not _in_cache(opened.fileno(), at):
                        opened.seek(at)
                        opened.readinto(buffer)


def _in_cache(file: int, at: int) -> bool:
    """Whether the page is cached; False if the system cannot tell."""
    try:
        return hasattr(os, "RWF_NOWAIT") and os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:  # that it would have to wait is one
        return False
