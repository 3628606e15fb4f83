"""The rows of a recipe's sources, tokenized: from the cache, or read and tokenized once and put there.

The cache's key is all that decides the tokens: the content of the sources, the tokenizer's files and template, format, loss_on,
bad_rows, names of columns and roles, max_rows. (Not the date: a template that writes today's date keeps the day of the first
tokenizing, so that a resumed run sees the same tokens.) What lies there is checked before it is used (token_cache.py); damaged,
it is made again, and that is told.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pronghorn.data import clean, sources
from pronghorn.data.encode import Encoder
from pronghorn.data.encoding_pool import CHUNK, EncodingPool
from pronghorn.data.formats import Example, detect_format, to_example
from pronghorn.data.renaming import Renaming, cache_key
from pronghorn.data.source_files import BadRow, Source
from pronghorn.data.sources import RawRow
from pronghorn.data.token_cache import (
    DamagedError,
    Seal,
    bytes_digest,
    cannot_write,
    open_table,
    read_note,
    write_note,
    write_table,
)
from pronghorn.data.tokens import TokenTable, fingerprint, loaded
from pronghorn.errors import DataError, EnvironmentFault, counted
from pronghorn.folders import cache_folder
from pronghorn.recipe import Data

CACHE_VERSION = 4  # raise it when the same input is tokenized or laid out differently
ROWS_TO_KNOW_A_FORMAT = 100

Progress = Callable[[str, int, int], None]
Stage = Callable[[str], AbstractContextManager[Any]]


def silent(label: str, done: int, total: int) -> None:
    pass


def no_stage(name: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True)
class SourceCount:
    name: str
    format: str
    read: int


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of the sources that could be tokenized, before anything is dropped."""

    table: TokenTable
    path: Path  # of the cached table; its sidecars stand beside it
    read: int
    bad: int
    empty: int  # with an answer that says nothing: junk, whether it is dropped or not
    sources: tuple[SourceCount, ...]
    remarks: tuple[str, ...] = ()  # what became of the cache, if there is something to tell

    @property
    def bad_rows_file(self) -> Path | None:
        return self.path.with_suffix(".bad.jsonl") if self.bad else None

    @property
    def format(self) -> str:
        return ", ".join(dict.fromkeys(source.format for source in self.sources))


def tokenized_rows(
    names: Sequence[str], spec: Data, tokenizer: Any, *, progress: Progress = silent, stage: Stage = no_stage
) -> Rows:
    remarks: tuple[str, ...] = ()
    with stage("read"):
        found = [source for name in names for source in sources.resolve(name)]
        states = [sources.state(source) for source in found]
        path = cache_folder() / "tokens" / f"{_key(found, spec, fingerprint(tokenizer))}.arrow"
        try:
            cached = _open(path)
        except DamagedError as damage:
            cached, remarks = None, (f"the cached tokens were damaged ({damage}) and are made again: {path}",)
    if cached is not None:
        return cached
    with stage("load"):
        encoder = Encoder(loaded(tokenizer), spec.loss_on)
    work = _Tokenizing(found, states, spec, encoder, progress, stage)
    seal = write_table(path, work.batches())
    aside = path.with_suffix(".bad.jsonl")
    if work.bad:
        lines = (json.dumps(asdict(row), ensure_ascii=False) for row in work.bad)
        _write_text(aside, "".join(f"{line}\n" for line in lines))
    meta = {"read": work.read, "bad": len(work.bad), "empty": work.empty, "sources": list(map(asdict, work.counts)),
            "seal": asdict(seal), "aside": bytes_digest(aside) if work.bad else ""}
    write_note(path.with_suffix(".json"), json.dumps(meta))
    try:
        rows = _open(path)
    except DamagedError as error:
        raise EnvironmentFault("the tokenized rows cannot be read back", where=str(path), why=str(error),
                               fix="check the disk") from error
    if rows is None:
        raise EnvironmentFault("the tokenized rows are gone again", where=str(path), fix="check who else uses the cache")
    return replace(rows, remarks=remarks)


def _key(found: Sequence[Source], spec: Data, tokenizer: str) -> str:
    parts: list[Any] = [CACHE_VERSION, version("transformers"), version("tokenizers"), tokenizer]
    parts += [spec.format, spec.loss_on, spec.bad_rows, *cache_key(spec)]
    parts += [[source.name, sources.fingerprint(source)] for source in found]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(path: Path) -> Rows | None:
    """The cached rows; None when they are not there (or not whole: whoever wrote them was stopped before the note)."""
    note = read_note(path.with_suffix(".json"))
    if note is None or not path.exists():
        return None
    meta = json.loads(note)
    if meta["bad"] and bytes_digest(path.with_suffix(".bad.jsonl")) != meta["aside"]:
        raise DamagedError("the file of bad rows is not what was written")
    counts = tuple(SourceCount(**source) for source in meta["sources"])
    return Rows(open_table(path, Seal(**meta["seal"])), path, meta["read"], meta["bad"], meta["empty"], counts)


def _write_text(path: Path, text: str) -> None:
    try:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise cannot_write(path, error) from error


class _Tokenizing:
    """One pass over the sources; what it counts is complete when `batches` is exhausted."""

    def __init__(self, found: Sequence[Source], states: Sequence[tuple[int, ...]], spec: Data, encoder: Encoder,
                 progress: Progress, stage: Stage) -> None:
        self._states = states
        self._found, self._spec, self._encoder, self._progress, self._stage = found, spec, encoder, progress, stage
        self._renaming = Renaming(spec)
        self.read, self.empty, self.counts, self.bad = 0, 0, list[SourceCount](), list[BadRow]()

    def batches(self) -> Iterator[Any]:
        with EncodingPool(self._encoder, waiting=lambda: self._progress("tokenizing", self.read, 0)) as pool:
            for source in self._found:
                for examples in self._examples(source):
                    # After a bad row that stops the run, the rest is only read, to count how many more there are.
                    if self.bad and self._spec.bad_rows == "stop":
                        continue
                    with self._stage("tokenize"):
                        done = list(pool.give(examples))
                    yield from self._good(done)
                    self._progress("tokenizing", self.read, 0)
            with self._stage("tokenize"):
                done = list(pool.rest())
            yield from self._good(done)
        for source, state in zip(self._found, self._states, strict=True):
            sources.require_unchanged(source, state)  # else the cache would have these rows under the digest of others
        if self.bad and (self._spec.bad_rows == "stop" or len(self.bad) == self.read):
            raise _bad_rows(self.bad, self.read)

    def _good(self, done: Sequence[tuple[Any, list[BadRow]]]) -> Iterator[Any]:
        for batch, bad in done:
            self.bad += bad
            if batch.num_rows:
                yield batch

    def _examples(self, source: Source) -> Iterator[list[Example]]:
        """The rows of a source as examples, in chunks; what is no example is kept in `bad`."""
        before, bad_before = self.read, len(self.bad)
        reader: Iterator[RawRow] = itertools.islice(sources.read(source, self.bad.append), self._spec.max_rows)
        with self._stage("read"):
            head = list(itertools.islice(reader, ROWS_TO_KNOW_A_FORMAT))
            unread = len(self.bad) - bad_before  # rows that are not even JSON
            if not head and unread:
                raise _bad_rows(self.bad, unread)
            if not self._renaming.nothing:
                self._renaming.require_columns(head, source.name)
                head, reader = [self._renaming(row) for row in head], map(self._renaming, reader)
            row_format = detect_format(head, source.name, self._spec.format)
        self.read += unread
        rows: Iterator[RawRow] = itertools.chain(head, reader)
        while True:
            with self._stage("read"):
                unread_before = len(self.bad)
                chunk = list(itertools.islice(rows, CHUNK))
                self.read += len(chunk) + len(self.bad) - unread_before
                made = [to_example(row, row_format) for row in chunk]
                self.bad += [item for item in made if isinstance(item, BadRow)]
            if not chunk:
                break
            examples = [item for item in made if isinstance(item, Example)]
            self.empty += sum(clean.says_nothing(example) for example in examples)
            yield examples
        self.counts.append(SourceCount(source.name, row_format, self.read - before))


def _bad_rows(bad: Sequence[BadRow], read: int) -> DataError:
    first, more = bad[0], len(bad) - 1
    others = f" ({counted(more, 'more bad row')}: {_some([row.where for row in bad[1:]])})" if more else ""
    fix = "correct the row, or set data.bad_rows: skip to set such rows aside in a file"
    if len(bad) == read:
        fix = "not one row can be used: check data.format, the columns and the chat template"
    return DataError(f"{first.why}{others}", where=first.where, why=f"the row is: {first.excerpt}", fix=fix)


def _some(places: Sequence[str]) -> str:
    return ", ".join(places[:3]) + (", ..." if len(places) > 3 else "")


