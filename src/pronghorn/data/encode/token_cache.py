"""The table of tokenized rows on disk: written chunk by chunk, continued after an interruption, checked before it is read.

A folder has two files. `table` is an Arrow stream: messages one after the other, nothing at its end that would have to know of
all of them. So its bytes are the same however often it was interrupted. `journal` has a line for each message: how far the
table reaches with it, its SHA-256, the rows that are set aside, and what was counted. Each line carries its own checksum.

Until the end of the stream is written, the folder is `.KEY.partial`. Whoever goes on reads all of it first, and whatever is not
as the journal says is cut off, with all that follows. So a process that is killed in the middle of a write, or a machine that
loses its power, costs a few chunks. Then the folder gets its name. One process at a time writes there, held apart by a lock
that ends with its process. A second one that wants the same rows writes them in a folder of its own.

On opening, all messages are compared with the journal on all cores before pyarrow sees a byte of them: its reader trusts
lengths and offsets, so that a flipped bit there ends the process. That takes 0.63 s a GB on one core, and reads what the run
will need anyway. The journal is made of what was written, so a disk that lost some of it is noticed as well. After that,
nothing is checked again but that the file was not written to or cut: a mapped page that is gone would end the process as well
(SIGBUS). A page that is lost between that look and its use still does.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import mmap
import os
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from pronghorn.data.encode.tokens import SCHEMA, TokenTable
from pronghorn.data.read.arrow_rows import END_OF_STREAM
from pronghorn.data.read.reading import Note
from pronghorn.data.read.source_files import BadRow
from pronghorn.digests import LARGEST_SEALED, digests_between, read_sealed, seal_of, write_sealed
from pronghorn.errors import EnvironmentFault, PronghornError
from pronghorn.folders import has_ended, remove_left_behind, this_process
from pronghorn.small_files import read_small

TABLE, JOURNAL, BAD = "table", "journal", "bad.jsonl"
A_WEEK = 7 * 86_400.0  # so long an interrupted table waits for its command
PATIENCE = 5.0  # seconds; the workers of a process that was killed hold its lock until they notice

T = TypeVar("T")


class DamagedError(Exception):
    """What is in the cache is not what was written; it can be made again."""


class Entry(NamedTuple):
    """A line of the journal."""

    size: int  # of the table, with this message
    digest: str  # of the message
    note: Note | None = None  # of a chunk; None: the schema, which is first, or the end of the stream
    bad: tuple[BadRow, ...] = ()  # the rows of the chunk that are set aside
    content: str = ""  # at the end: `TokenTable.content_of_all`

    def line(self, name: str) -> bytes:
        text = json.dumps(self, default=asdict).encode()
        return seal_of(name, text) + b" " + text + b"\n"


def _read_journal(folder: Path, name: str) -> tuple[list[Entry], bool]:
    """Up to the first line that is not what was written; and whether that is all of it. Raises OSError."""
    entries: list[Entry] = []
    lines = read_small(folder / JOURNAL, LARGEST_SEALED).splitlines(keepends=True)
    for line in lines:
        seal, _, text = line.partition(b" ")
        if not text.endswith(b"\n") or seal != seal_of(name, text[:-1]):
            break
        try:
            entries.append(_adapter(Entry).validate_json(text, strict=True))
        except ValidationError:
            break
    return entries, len(entries) == len(lines)


def _intact(descriptor: int, entries: Sequence[Entry]) -> int:
    """How many of these messages, from the first on, are in the table as they were written. Raises OSError."""
    found = digests_between(descriptor, [0, *(entry.size for entry in entries)])
    return next((i for i, entry in enumerate(entries) if entry.digest != found[i]), len(entries))


# Reading ------------------------------------------------------------------------------------------------------------------


def open_table(path: Path) -> tuple[TokenTable, list[Entry]] | None:
    """The table in this folder, and its journal, if every byte is what was written; else DamagedError. None: there is none."""
    if not path.is_dir():
        return None
    try:
        if (path / TABLE).exists() and not (path / TABLE).is_file():
            raise DamagedError("it is not a regular file")
        entries, whole = _read_journal(path, path.name)
        with (path / TABLE).open("rb") as file:
            guard = _Guard(path / TABLE, file.fileno())
            if not whole or not entries or not entries[-1].content:
                raise DamagedError("its journal was changed")
            if guard.size != entries[-1].size:
                raise DamagedError(f"it has {guard.size:,} bytes, expected {entries[-1].size:,}")
            if (intact := _intact(file.fileno(), entries)) < len(entries):
                raise DamagedError(f"part {intact + 1} of {len(entries)} was changed")
            return _mapped(file.fileno(), guard, entries[-1].content), entries
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error


def _mapped(descriptor: int, guard: _Guard | None = None, content: str = "") -> TokenTable:
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


def write_bad_rows(path: Path, bad: Iterable[BadRow]) -> None:
    """The rows that were set aside, for people: in the table's folder, unless they are there."""
    file, text = path / BAD, "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in bad).encode()
    try:
        if not file.is_file() or file.read_bytes() != text:
            file.unlink(missing_ok=True)
            file.write_bytes(text)
    except OSError as error:
        raise cannot_write(file, error, "the bad rows") from error


# Writing ------------------------------------------------------------------------------------------------------------------


def cannot_write(path: Path, error: OSError, what: str = "the tokenized rows") -> EnvironmentFault:
    return EnvironmentFault.of(
        error, f"cannot write {what}", path, "free some disk space, or set PRONGHORN_CACHE to another folder"
    )


class PartialTable:
    """Chunks in order: `add` each, then `finish`. `there`: notes on the chunks that an interrupted process left."""

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA) -> None:
        """`path`: the folder of the table, once it is whole."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(path.parent)
            _remove_interrupted(path.parent)
            self._folder, self._journal = _claimed(path)
            self._table = os.open(self._folder / TABLE, os.O_RDWR | os.O_CREAT, 0o666)
            entries, _ = _read_journal(self._folder, path.name)
            entries = [entry for entry in entries[: _intact(self._table, entries)] if not entry.content]
            self._size = entries[-1].size if entries else 0
            lines = sum(len(entry.line(path.name)) for entry in entries)
            for descriptor, size in ((self._table, self._size), (self._journal, lines)):
                os.ftruncate(descriptor, size)
                os.lseek(descriptor, size, os.SEEK_SET)
        except OSError as error:
            raise cannot_write(path, error) from error
        if not entries:
            self._append(memoryview(schema.serialize()))
        self.there = [entry.note for entry in entries if entry.note is not None]
        self._chunks = len(self.there)

    def __enter__(self) -> PartialTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Kept for the same command, unless what stopped it will stop it again."""
        again = isinstance(error, PronghornError) and not isinstance(error, EnvironmentFault)
        if kind is None or again or not self._chunks:
            shutil.rmtree(self._folder, ignore_errors=True)
        for descriptor in (self._table, self._journal):
            os.close(descriptor)

    def add(self, batch: pa.RecordBatch | None, bad: Sequence[BadRow], note: Note) -> None:
        """A chunk: its record batch (None: no row of it is good), the rows set aside, and what was counted."""
        message = memoryview(batch.serialize() if batch is not None and batch.num_rows else b"")
        self._append(message, note, tuple(bad))
        self._chunks += 1

    def _append(self, message: bytes | memoryview, *more: Any) -> None:
        """`more`: of `Entry`."""
        entry = Entry(self._size + len(message), hashlib.sha256(message).hexdigest(), *more)
        try:
            _write(self._table, message)
            _write(self._journal, entry.line(self.path.name))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._size = entry.size

    def bad(self) -> Iterator[BadRow]:
        """The rows that were set aside, in order."""
        for entry in _read_journal(self._folder, self.path.name)[0]:
            yield from entry.bad

    def finish(self) -> None:
        """The end of the stream; then the folder gets its name. Until then it can be gone on with."""
        self._append(END_OF_STREAM, None, (), _mapped(self._table).content_of_all)
        try:
            shutil.rmtree(self.path, ignore_errors=True)  # a damaged one
            self._folder.rename(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error


def _write(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _claimed(path: Path) -> tuple[Path, int]:
    """The folder to write in, and its journal, locked."""
    folder = path.with_name(f".{path.name}.partial")
    for name in (TABLE, JOURNAL):  # a link leads to other people's files, and a device has no end
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                (folder / name).unlink()
    deadline = time.monotonic() + PATIENCE
    while (journal := _locked(folder, create=True)) is None:
        if time.monotonic() > deadline:
            own = path.with_name(f".{path.name}.{this_process()}.partial")
            shutil.rmtree(own, ignore_errors=True)
            own.mkdir()
            return own, _locked(own, create=True) or os.open(own / JOURNAL, os.O_RDWR | os.O_CREAT, 0o666)
        time.sleep(0.05)
    return folder, journal


def _locked(folder: Path, *, create: bool) -> int | None:
    """The journal of a folder that nobody writes in; None: somebody does, or, not to be created, there is none."""
    try:
        if create:
            folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / JOURNAL, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except FileNotFoundError:
        return None  # its writer is just removing it
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Whoever held it may have removed the folder between our open and our lock: then we hold nothing.
        if os.path.samestat(os.fstat(descriptor), (folder / JOURNAL).stat()):
            return descriptor
    except OSError:  # held, removed, or a disk without locks
        pass
    os.close(descriptor)
    return None


def _remove_interrupted(folder: Path) -> None:
    """What nobody went on with for a week; a folder that a process had for its own, when that is gone."""
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(FileNotFoundError):
            old = time.time() - (partial / JOURNAL).stat().st_mtime > A_WEEK
            if has_ended(partial.name, then=old) and (journal := _locked(partial, create=False)) is not None:
                shutil.rmtree(partial, ignore_errors=True)
                os.close(journal)


# Notes beside the table: what was found in its rows ------------------------------------------------------------------------


def kept(path: Path, kind: object, look: Callable[[], T], fits: Callable[[T], bool] = lambda _: True) -> tuple[T, str]:
    """What is written there, or what a look finds, which is then written; and what is wrong with a note that is made again."""
    wrong = ""
    try:
        note: T | None = read_note(path, kind)
        if note is not None and fits(note):
            return note, ""
        wrong = "" if note is None else "it names rows that are not there"
    except DamagedError as damage:
        wrong = str(damage)
    write_note(path, found := look())
    return found, wrong


def write_note(path: Path, note: object) -> None:
    """As JSON."""
    try:
        write_sealed(path, json.dumps(note).encode())
    except OSError as error:
        raise cannot_write(path, error) from error


def read_note(path: Path, kind: object = Any) -> Any:
    """As what its JSON must be, in every part of it: a dataclass, or any other annotation. None: there is none. DamagedError:
    it is not what was written."""
    try:
        return _adapter(kind).validate_json(read_sealed(path), strict=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedError(error.strerror or str(error)) from error
    except ValidationError as error:
        raise DamagedError(f"{path.name} does not have the expected content") from error
    except ValueError as error:
        raise DamagedError(str(error)) from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
