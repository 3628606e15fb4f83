"""Weights come from the disk while modules are imported and data is prepared.

Importing torch and transformers takes some 5 s in which the disk is idle, preparing new data longer, and loading a model then
waits for the disk. So a thread reads the weight files meanwhile, in the order in which they are loaded, into the system's
cache. 2 GB that were not there took 2.1 s to load, and 0.01 s after they had been read ahead; the imports took as long as
before (two cores, a disk of 1 GB/s). Asking the system to do it (POSIX_FADV_WILLNEED) changed nothing.
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
    """Of a folder, or of a hub model as it lies in the cache; nothing without a name. Not what would not fit into memory: it
    would be gone before it is loaded. What is wrong with the files is told by who loads them."""
    with suppress(PronghornError, OSError):
        if name and (folder := local_files(name)):
            files = files_to_load(folder)
            if sum(file.stat().st_size for file in files) < _free_memory():
                thread = threading.Thread(target=_read, args=(files,), daemon=True, name="read ahead")
                thread.start()
                return thread
    return None


def _free_memory() -> int:
    """Bytes that the system could give, its cache included; none where it does not tell."""
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
    """Whether a byte there can be had without waiting; False where the system cannot tell."""
    try:
        return hasattr(os, "RWF_NOWAIT") and os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:  # that it would have to wait is one
        return False
