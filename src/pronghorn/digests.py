"""What a file holds, as SHA-256: of all of its bytes, at the speed of the disk; and small files that carry their own.

A file is hashed in blocks of 4 MB on as many threads as there are cores, up to 8: at 1.6 GB/s a core,
16 GB of weights take 1.3 s on 8 cores once they are in memory. The digest of a large file is remembered beside
the caches, by path, device, inode, size, and the times of the last change of its content (mtime) and of its entry (ctime).
Those do not tell of a second change within one tick of the file system's clock, so, as git does, a digest is remembered only if
the last change was more than two seconds ago when it was read: whatever changes the file afterwards gets other times. Nobody
can set a ctime back without setting the machine's clock. What no time can show, and only reading can: a disk that gives other
bytes by itself. To have all files read again, remove the folder `digests` in the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pronghorn.folders import cache_folder, remove_left_behind, temporary
from pronghorn.small_files import read_small

BLOCK = 4 << 20
MOST_THREADS = 8
WORTH_REMEMBERING = 64 << 20  # bytes; a smaller file is read in 40 ms
SURE_AFTER = 2 * 10**9  # nanoseconds; the coarsest clock of a file system in use (FAT) ticks every 2 s
HEX = 32  # of a digest among others: 128 bits
LARGEST_SEALED = 1 << 30  # bytes; the copies among ten million rows take half of it
SEAL = 65  # bytes that a seal takes, with the end of its line


def digests_between(descriptor: int, borders: Sequence[int]) -> list[str]:
    """SHA-256 of each part of an open file, from border to border; a file that ends early has other digests. Raises OSError."""

    def between(start: int, stop: int) -> str:
        digest = hashlib.sha256()
        for at in range(start, stop, BLOCK):
            digest.update(os.pread(descriptor, min(BLOCK, stop - at), at))
        return digest.hexdigest()

    pool = ThreadPoolExecutor(min(MOST_THREADS, cores()))
    try:
        return list(pool.map(between, borders[:-1], borders[1:]))
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the rest of a large file


def file_digest(path: Path) -> str:
    """SHA-256 of a whole file; raises OSError when it cannot be read."""
    now = time.time_ns()
    with path.open("rb") as file:
        before = _state(file.fileno())
        place = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:HEX]
        name = cache_folder() / "digests" / f"{place}.json"
        worth = before[2] >= WORTH_REMEMBERING
        if worth and (known := _remembered(name, before)):
            return known
        blocks = digests_between(file.fileno(), [*range(0, before[2], BLOCK), before[2]])
        digest = hashlib.sha256("".join([str(before[2]), *(block[:HEX] for block in blocks)]).encode()).hexdigest()
        if worth and _state(file.fileno()) == before and now - max(before[3:]) > SURE_AFTER:
            try:
                name.parent.mkdir(parents=True, exist_ok=True)
                remove_left_behind(name.parent)
                write_sealed(name, json.dumps({"state": before, "digest": digest}).encode())
            except OSError:
                pass  # nothing is lost but the time to read it again
    return digest


def _state(descriptor: int) -> list[int]:
    stat = os.fstat(descriptor)
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _remembered(name: Path, state: list[int]) -> str:
    try:
        known = json.loads(read_sealed(name))
        return str(known["digest"]) if known["state"] == state else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""  # it is read again


def cores() -> int:
    """Cores this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Small files that carry their digest ------------------------------------------------------------------------------------


def write_sealed(path: Path, content: bytes) -> None:
    """The content under a line with the SHA-256 of it and of the file's name; appears whole or not at all. Raises OSError."""
    beside = temporary(path)
    try:
        with beside.open("wb") as file:
            file.writelines([seal_of(path.name, content), b"\n", content])
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_sealed(path: Path, most: int = LARGEST_SEALED) -> bytes:
    """The content; OSError or ValueError when it is not what was written under this name. Another sealed file in its place,
    whole as it may be, is not."""
    seal, _, content = read_small(path, most + SEAL).partition(b"\n")
    if seal != seal_of(path.name, content):
        raise ValueError("its checksum does not match")
    return content


def seal_of(name: str, content: bytes) -> bytes:
    """With the name: what belongs elsewhere, whole as it may be, is not sealed here."""
    digest = hashlib.sha256(name.encode() + b"\n")
    digest.update(content)
    return digest.hexdigest().encode()


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
