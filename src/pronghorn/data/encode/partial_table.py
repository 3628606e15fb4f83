"""A table that is being written. What is done stays when the process is interrupted, and the same command goes on behind it.

It grows in a folder of its own, `.KEY.partial`: the table, the rows that are set aside, and a journal with one line for each
chunk of rows: how far both files reach, SHA-256 of what the chunk added to them, and what was counted of it. Each line carries
its own checksum. Whoever goes on reads all of it first, and whatever is not as the journal says is cut off, with all
that follows; so a process that is killed in the middle of a write, or a machine that loses its power, costs a few chunks.

The table is an Arrow stream: messages one after the other, nothing at its end that would have to know of all of them. So its
bytes are the same however often it was interrupted. The seal (token_cache.py) is made of what was written, not of what is
there afterwards: it notices on opening what a disk lost in between.

One process at a time writes there, held apart by a lock that ends with its process. A second one that wants the same rows
writes them in a folder of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from pronghorn.data.encode.token_cache import Seal, cannot_write
from pronghorn.data.encode.tokens import SCHEMA, ContentDigest
from pronghorn.data.read.source_files import BadRow
from pronghorn.digests import BlockDigests, text_digest
from pronghorn.errors import EnvironmentFault, PronghornError
from pronghorn.folders import has_ended, remove_left_behind, this_process

TABLE, ASIDE, JOURNAL = "table", "bad.jsonl", "journal"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
A_WEEK = 7 * 86_400.0  # so long an interrupted table waits for its command
PATIENCE = 5.0  # seconds; the workers of a process that was killed hold its lock until they notice
HEX = 32

Note = dict[str, Any]


class PartialTable:
    """Chunks in order: `add` each, then `finish` and `publish`. `notes` are those of the chunks that were there already."""

    def __init__(self, path: Path, schema: Any = SCHEMA) -> None:
        """`path`: where the table will be."""
        self.path, self._schema = path, schema
        self.notes: list[Note] = []
        self._chunks = 0
        self._blocks, self._content = BlockDigests(), ContentDigest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(path.parent)
            _remove_interrupted(path.parent)
            self._folder, self._journal = _claimed(path)
            self._table, self._aside = (os.open(self._folder / name, os.O_RDWR | os.O_CREAT, 0o666) for name in (TABLE, ASIDE))
            self._aside_size = self._journal_size = 0
            self._go_on()
        except OSError as error:
            raise cannot_write(path, error) from error

    def __enter__(self) -> PartialTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Kept for the same command, unless what stopped it will stop it again."""
        again = isinstance(error, PronghornError) and not isinstance(error, EnvironmentFault)
        if kind is None or again or not self._chunks:
            shutil.rmtree(self._folder, ignore_errors=True)
        for descriptor in (self._table, self._aside, self._journal):
            os.close(descriptor)

    def add(self, batch: Any, bad: Sequence[BadRow], note: Note) -> None:
        """A chunk: its record batch (None: no row of it is good), the rows set aside, and what was counted."""
        try:
            table = self._put(batch) if batch is not None and batch.num_rows else ""
            lines = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in bad).encode()
            _write(self._aside, self._aside_size, lines)
            self._aside_size += len(lines)
            self._line(table, _digest(lines) if lines else "", note)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _put(self, batch: Any) -> str:
        message = memoryview(batch.serialize())
        _write(self._table, self._blocks.size, message)
        self._blocks.add(message)
        self._content.add(batch)
        return _digest(message)

    def _line(self, table: str, aside: str, note: Note) -> None:
        text = json.dumps([self._blocks.size, table, self._aside_size, aside, note])
        line = f"{self._seal(text)} {text}\n".encode()
        _write(self._journal, self._journal_size, line)
        self._journal_size += len(line)
        self._chunks += 1

    def _seal(self, line: str) -> str:
        """With the table's name: the folder of another table, whole as it is, is not this one's."""
        return text_digest(f"{self.path.stem} {line}")[:HEX]

    def finish(self) -> Seal:
        """The end of the stream; the files get their names by `publish`."""
        try:
            _write(self._table, self._blocks.size, END_OF_STREAM)
            os.ftruncate(self._table, self._blocks.size + len(END_OF_STREAM))
        except OSError as error:
            raise cannot_write(self.path, error) from error
        sealed = self._blocks.copy()
        sealed.add(memoryview(END_OF_STREAM))
        return Seal(sealed.size, sealed.blocks, self._content.hexdigest())

    def publish(self, aside: Path | None) -> None:
        """Last of all: the table is there. Until then the folder still has everything."""
        try:
            if aside is not None:
                (self._folder / ASIDE).replace(aside)
            (self._folder / TABLE).replace(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    @property
    def aside(self) -> Path:
        return self._folder / ASIDE

    # What is there already

    def _go_on(self) -> None:
        """Take over what the journal and the checksums agree on, and cut off the rest."""
        schema = memoryview(self._schema.serialize())
        if os.pread(self._table, len(schema), 0) == bytes(schema):
            self._blocks.add(schema)
            with os.fdopen(os.dup(self._journal), "rb") as lines:
                lines.seek(0)
                for line in lines:
                    if not self._accept(line):
                        break
        else:
            _write(self._table, 0, schema)
            self._blocks.add(schema)
        sizes = ((self._table, self._blocks.size), (self._aside, self._aside_size), (self._journal, self._journal_size))
        for descriptor, size in sizes:
            os.ftruncate(descriptor, size)

    def _accept(self, line: bytes) -> bool:
        seal, _, text = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
        if not line.endswith(b"\n") or seal != self._seal(text):
            return False
        table_size, table_digest, aside_size, aside_digest, note = json.loads(text)
        message = os.pread(self._table, table_size - self._blocks.size, self._blocks.size)
        lines = os.pread(self._aside, aside_size - self._aside_size, self._aside_size)
        whole = self._blocks.size + len(message) == table_size and self._aside_size + len(lines) == aside_size
        if (
            not whole
            or (_digest(message) if message else "") != table_digest
            or ((_digest(lines) if lines else "") != aside_digest)
        ):
            return False
        if message:
            self._blocks.add(memoryview(message))
            self._content.add(pa.ipc.read_record_batch(pa.py_buffer(message), self._schema))
        self._aside_size, self._journal_size = aside_size, self._journal_size + len(line)
        self._chunks += 1
        self.notes.append(note)
        return True


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:HEX]


def _write(descriptor: int, at: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, at)
        at, rest = at + written, rest[written:]


# Folders and their locks --------------------------------------------------------------------------------------------------


def _claimed(path: Path) -> tuple[Path, int]:
    """The folder to write in, and its journal, locked."""
    folder = path.with_name(f".{path.stem}.partial")
    for name in (TABLE, ASIDE, JOURNAL):  # a link leads to other people's files, and a device has no end
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG((folder / name).lstat().st_mode):
                (folder / name).unlink()
    deadline = time.monotonic() + PATIENCE
    while (journal := _locked(folder, create=True)) is None:
        if time.monotonic() > deadline:
            own = path.with_name(f".{path.stem}.{this_process()}.partial")
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
