"""A table that is being written. What is done stays when the process is interrupted, and the same command goes on behind it.

It grows in a folder of its own, `.KEY.partial`: the table, and a journal with one line for each chunk of rows: how far the
table reaches, SHA-256 of what the chunk added to it, the rows that are set aside, and what was counted. Each line carries its
own checksum. Whoever goes on reads all of it first, and whatever is not as the journal says is cut off, with all that follows.
So a process that is killed in the middle of a write, or a machine that loses its power, costs a few chunks.

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
from collections.abc import Iterator, Sequence
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

TABLE, JOURNAL = "table", "journal"
END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
A_WEEK = 7 * 86_400.0  # so long an interrupted table waits for its command
PATIENCE = 5.0  # seconds; the workers of a process that was killed hold its lock until they notice
HEX = 32

Note = dict[str, Any]


class PartialTable:
    """Chunks in order: `add` each, then `finish` and `publish`. `notes` are those of the chunks that were there already."""

    def __init__(self, path: Path, schema: pa.Schema = SCHEMA) -> None:
        """`path`: where the table will be."""
        self.path, self._schema = path, schema
        self.notes: list[Note] = []
        self._chunks = self._journal_size = 0
        self._blocks, self._content = BlockDigests(), ContentDigest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_left_behind(path.parent)
            _remove_interrupted(path.parent)
            self._folder, self._journal = _claimed(path)
            self._table = os.open(self._folder / TABLE, os.O_RDWR | os.O_CREAT, 0o666)
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
        for descriptor in (self._table, self._journal):
            os.close(descriptor)

    def add(self, batch: pa.RecordBatch | None, bad: Sequence[BadRow], note: Note) -> None:
        """A chunk: its record batch (None: no row of it is good), the rows set aside, and what was counted."""
        message = memoryview(batch.serialize() if batch is not None and batch.num_rows else b"")
        text = json.dumps([self._blocks.size + len(message), _digest(message), [asdict(row) for row in bad], note])
        line = f"{self._seal(text)} {text}\n".encode()
        try:
            _write(self._table, message)
            _write(self._journal, line)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._count(message, batch, line)

    def _count(self, message: memoryview, batch: pa.RecordBatch | None, line: bytes) -> None:
        """The chunk is in the table and in the journal."""
        self._blocks.add(message)
        if message:
            self._content.add(batch)
        self._journal_size += len(line)
        self._chunks += 1

    def _seal(self, line: str) -> str:
        """With the table's name: the folder of another table, whole as it is, is not this one's. 2: the form of a line."""
        return text_digest(f"2 {self.path.stem} {line}")[:HEX]

    def bad(self) -> Iterator[BadRow]:
        """The rows that were set aside, in order."""
        with (self._folder / JOURNAL).open(encoding="utf-8") as lines:
            for line in lines:
                yield from (BadRow(**row) for row in json.loads(line.partition(" ")[2])[2])

    def finish(self) -> Seal:
        """The end of the stream, and a file of the rows that were set aside; the files get their names by `publish`."""
        try:
            _write(self._table, END_OF_STREAM)
            self.aside.unlink(missing_ok=True)
            with self.aside.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in self.bad())
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._blocks.add(memoryview(END_OF_STREAM))
        return Seal(self._blocks.size, self._blocks.blocks, self._content.hexdigest())

    def publish(self, aside: Path | None) -> None:
        """Last of all: the table is there. Until then the folder still has everything."""
        try:
            if aside is not None:
                self.aside.replace(aside)
            (self._folder / TABLE).replace(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    @property
    def aside(self) -> Path:
        return self._folder / "bad.jsonl"

    # What is there already

    def _go_on(self) -> None:
        """Take over what the journal and the checksums agree on, and cut off the rest."""
        schema = memoryview(self._schema.serialize())
        self._blocks.add(schema)
        if os.pread(self._table, len(schema), 0) != bytes(schema):
            _write(self._table, schema)
        else:
            with os.fdopen(os.dup(self._journal), "rb") as lines:
                all(map(self._accept, lines))  # up to the first that is not accepted
        for descriptor, size in ((self._table, self._blocks.size), (self._journal, self._journal_size)):
            os.ftruncate(descriptor, size)
            os.lseek(descriptor, size, os.SEEK_SET)

    def _accept(self, line: bytes) -> bool:
        seal, _, text = line.decode("utf-8", "replace").rstrip("\n").partition(" ")
        if not line.endswith(b"\n") or seal != self._seal(text):
            return False
        size, digest, _, note = json.loads(text)
        message = os.pread(self._table, size - self._blocks.size, self._blocks.size)
        if _digest(message) != digest:
            return False
        batch = pa.ipc.read_record_batch(pa.py_buffer(message), self._schema) if message else None
        self._count(memoryview(message), batch, line)
        self.notes.append(note)
        return True


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:HEX]


def _write(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


# Folders and their locks --------------------------------------------------------------------------------------------------


def _claimed(path: Path) -> tuple[Path, int]:
    """The folder to write in, and its journal, locked."""
    folder = path.with_name(f".{path.stem}.partial")
    for name in (TABLE, JOURNAL):  # a link leads to other people's files, and a device has no end
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
