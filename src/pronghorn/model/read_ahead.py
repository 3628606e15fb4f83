"""Weights come from the disk while modules are imported.

Importing torch and transformers takes some 5 s in which the disk is idle, and loading a model then waits for it. So a thread
reads the weight files meanwhile, into the system's cache, and stops when the imports are done: from there on whoever loads them
reads in the same order. 2 GB that were not in the cache took 2.1 s to load, and 0.01 s after they had been read ahead; the
imports took as long as before (two cores, a disk of 1 GB/s). Asking the system to do it (POSIX_FADV_WILLNEED) changed nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pronghorn.errors import PronghornError
from pronghorn.model.fingerprint import local_files
from pronghorn.model.weight_files import files_to_load

PIECE = 4 * 2**20  # bytes


@contextmanager
def reading_ahead(name: str) -> Iterator[None]:
    """Of a folder, or of a hub model as it lies in the cache; of nothing, where no name is given. What is wrong with it is told
    by who loads it."""
    done = threading.Event()
    with suppress(PronghornError, OSError):
        if name and (folder := local_files(name)):
            threading.Thread(target=_read, args=(files_to_load(folder), done), daemon=True, name="read ahead").start()
    try:
        yield
    finally:
        done.set()


def _read(files: Sequence[Path], done: threading.Event) -> None:
    buffer = bytearray(PIECE)
    with suppress(OSError):
        for file in files:
            with file.open("rb", buffering=0) as opened:
                for at in range(0, file.stat().st_size, PIECE):
                    if done.is_set():
                        return
                    if not _in_cache(opened.fileno(), at):
                        opened.seek(at)
                        opened.readinto(buffer)


def _in_cache(file: int, at: int) -> bool:
    """Whether a byte there can be had without waiting; False where the system cannot tell."""
    try:
        return hasattr(os, "RWF_NOWAIT") and os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:  # that it would have to wait is one
        return False
