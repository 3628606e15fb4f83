"""The table of tokenized rows on disk: an Arrow stream, memory-mapped, whose every block is checked before anything reads it.

The seal of a table (size, a SHA-256 for each 4 MB, and one over all tokens and loss marks) is made when the table is
(partial_table.py), and kept in a small file that carries its own checksum. On opening, all blocks are compared on all cores
before pyarrow sees a byte of them: its reader trusts lengths and offsets, so that a flipped bit there ends the process. That
takes 0.63 s a GB on one core, and reads what the run will need anyway. After that, nothing is checked again but that the file
was not written to or cut: a mapped page that is gone would end the process as well (SIGBUS). A page that is lost between that
look and its use still does.
"""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.digests import block_digests, read_sealed, write_sealed
from pronghorn.errors import EnvironmentFault


class DamagedError(Exception):
    """What is in the cache is not what was written; it can be made again."""


@dataclass(frozen=True, slots=True)
class Seal:
    size: int
    blocks: list[str]
    content: str  # `TokenTable.content_of_all`


def open_table(path: Path, seal: Seal) -> TokenTable:
    """The table, if every byte of it is what was written; else DamagedError."""
    try:
        if path.exists() and not path.is_file():
            raise DamagedError("it is not a regular file")
        with path.open("rb") as file:
            guard = _Guard(path, file.fileno())
            if guard.size != seal.size:
                raise DamagedError(f"it has {guard.size:,} bytes, expected {seal.size:,}")
            blocks = block_digests(file.fileno(), seal.size)
            if len(blocks) != len(seal.blocks):
                raise DamagedError(f"its note has {len(seal.blocks)} blocks, expected {len(blocks)}")
            wrong = [i for i, (now, then) in enumerate(zip(blocks, seal.blocks, strict=True)) if now != then]
            if wrong:
                raise DamagedError(f"block {wrong[0] + 1} of {len(blocks)} was changed")
            return _mapped(file.fileno(), guard, seal.content)
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error


def _mapped(descriptor: int, guard: _Guard, content: str) -> TokenTable:
    buffer = pa.py_buffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    return TokenTable.of_arrow(pa.ipc.open_stream(pa.BufferReader(buffer)).read_all(), guard, content)


class _Guard:
    """Called before mapped rows are read: raises when the file was cut or written to since it was checked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, os.dup(descriptor)
        weakref.finalize(self, os.close, self._descriptor)
        self._was = self._state()
        self.size = self._was[0]

    def _state(self) -> tuple[int, int]:
        stat = os.fstat(self._descriptor)
        return stat.st_size, stat.st_mtime_ns

    def __call__(self) -> None:
        if self._state() != self._was:
            raise EnvironmentFault(
                "the cached tokens changed while they were in use", where=str(self._path),
                why="another program changed or truncated the file",
                fix="run the same command again: the tokens are created again, and a run resumes from its last checkpoint",
            )  # fmt: skip


def cannot_write(path: Path, error: OSError, what: str = "the tokenized rows") -> EnvironmentFault:
    return EnvironmentFault.of(
        error, f"cannot write {what}", path, "free some disk space, or set PRONGHORN_CACHE to another folder"
    )


# Beside the table: what was counted, what was found -----------------------------------------------------------------------


def write_note(path: Path, text: str) -> None:
    try:
        write_sealed(path, text)
    except OSError as error:
        raise cannot_write(path, error) from error


def read_note(path: Path) -> str | None:
    """None: there is none. DamagedError: it is not what was written."""
    try:
        return read_sealed(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error
    except ValueError as error:
        raise DamagedError(str(error)) from error


def read_note_as(path: Path, kind: Any) -> Any:
    """The same, as what its JSON must be, in every part of it: a dataclass, or any other annotation."""
    note = read_note(path)
    try:
        return None if note is None else _adapter(kind).validate_json(note, strict=True)
    except ValidationError as error:
        raise DamagedError(f"{path.name} does not have the expected content") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def bytes_digest(path: Path) -> str:
    """SHA-256 of a regular file; "" where there is none."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
