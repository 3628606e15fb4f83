"""The rows of a recipe's sources, tokenized: from the cache, or read and tokenized once and put there.

The cache's key is all that decides the tokens: the content of the sources, the tokenizer's files and template, format, loss_on,
bad_rows, names of columns and roles, max_rows. (Not the date: a template that writes today's date keeps the day of the first
tokenizing, so that a resumed run sees the same tokens.) What lies there is checked before it is used (token_cache.py); damaged,
it is made again, and that is told. An interrupted tokenizing goes on behind its last whole chunk of rows (partial_table.py):
the rows before it are read again, which takes a fiftieth of the time, and not tokenized.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pronghorn.data import clean, sources
from pronghorn.data.encode import Encoder
from pronghorn.data.encoding_pool import CHUNK, EncodingPool
from pronghorn.data.formats import Example, Format, detect_format, to_example
from pronghorn.data.partial_table import Note, PartialTable
from pronghorn.data.renaming import Renaming, cache_key
from pronghorn.data.row_counts import expected_rows
from pronghorn.data.source_files import BadRow, Source
from pronghorn.data.sources import RawRow
from pronghorn.data.token_cache import (
    DamagedError,
    Seal,
    bytes_digest,
    open_table,
    read_note,
    write_note,
)
from pronghorn.data.tokens import TokenTable, fingerprint, loaded
from pronghorn.errors import DataError, EnvironmentFault, counted
from pronghorn.folders import cache_folder
from pronghorn.recipe import Data

CACHE_VERSION = 5  # raise it when the same input is tokenized or laid out differently
ROWS_TO_KNOW_A_FORMAT = 100
FIRST_BAD_ROWS = 3  # named in an error, besides the first of all

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
    with PartialTable(path) as partial:
        work = _Tokenizing(found, states, spec, encoder, progress, stage)
        work.into(partial)
        counts, aside = work.counts, path.with_suffix(".bad.jsonl") if work.counts.bad else None
        meta = {"read": counts.read, "bad": counts.bad, "empty": counts.empty, "sources": list(map(asdict, counts.sources)),
                "seal": asdict(partial.finish()), "aside": bytes_digest(partial.aside) if aside else ""}
        write_note(path.with_suffix(".json"), json.dumps(meta))
        partial.publish(aside)
    if work.went_on:
        remarks += (f"went on behind the first {counted(work.went_on, 'row')}, tokenized before the last interruption",)
    try:
        rows = _open(path)
    except DamagedError as error:
        raise EnvironmentFault("the tokenized rows cannot be read back", where=str(path), why=str(error),
                               fix="check the disk") from error
    if rows is None:
        raise EnvironmentFault("the tokenized rows are gone again", where=str(path), fix="check who else uses the cache")
    return replace(rows, remarks=remarks)


def _key(found: Sequence[Source], spec: Data, tokenizer: str) -> str:
    parts: list[Any] = [CACHE_VERSION, CHUNK, version("transformers"), version("tokenizers"), tokenizer]
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


@dataclass(slots=True)
class _Counts:
    """What is known of all rows of the chunks that are written."""

    read: int = 0
    bad: int = 0
    empty: int = 0
    sources: list[SourceCount] = field(default_factory=list)

    def add(self, note: Note) -> None:
        """Of one chunk more."""
        self.read, self.bad, self.empty = self.read + note["read"], self.bad + note["bad"], self.empty + note["empty"]
        if len(self.sources) <= note["source"]:
            self.sources.append(SourceCount(note["name"], note["format"], 0))
        before = self.sources[note["source"]]
        self.sources[note["source"]] = replace(before, read=before.read + note["read"])


@dataclass(slots=True)
class _Chunk:
    """Rows of one source that are tokenized together."""

    source: int
    name: str
    format: Format
    read: int
    empty: int = 0
    examples: list[Example] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)  # that could not be read, or are no example

    def note(self, bad: int) -> Note:
        return {"source": self.source, "name": self.name, "format": self.format, "read": self.read, "empty": self.empty,
                "bad": bad}


class _Tokenizing:
    """One pass over the sources, behind what is there already. No more is held than the chunks under way."""

    def __init__(self, found: Sequence[Source], states: Sequence[tuple[int, ...]], spec: Data, encoder: Encoder,
                 progress: Progress, stage: Stage) -> None:
        self._states = states
        self._found, self._spec, self._encoder, self._tell, self._stage = found, spec, encoder, progress, stage
        self._renaming = Renaming(spec)
        self._expected = 0
        self._skip = self._skipped = 0  # chunks that are there already; rows of them that were read again
        self._any_bad = False
        self._waiting: deque[_Chunk] = deque()
        self.counts = _Counts()
        self.went_on = 0

    def into(self, partial: PartialTable) -> None:
        self._skip = len(partial.notes)
        for note in partial.notes:
            self.counts.add(note)
        self.went_on, self._any_bad = self.counts.read, self.counts.bad > 0
        with self._stage("read"):
            self._expected = expected_rows(self._found, self._spec.max_rows)
        with EncodingPool(self._encoder, waiting=self._progress) as pool:
            for number, source in enumerate(self._found):
                for chunk in self._chunks(number, source):
                    self._any_bad = self._any_bad or bool(chunk.bad)
                    self._waiting.append(chunk)
                    with self._stage("tokenize"):
                        done = list(pool.give(chunk.examples))
                    self._write(partial, done)
            with self._stage("tokenize"):
                done = list(pool.rest())
            self._write(partial, done)
        for source, state in zip(self._found, self._states, strict=True):
            sources.require_unchanged(source, state)  # else the cache would have these rows under the digest of others
        counts = self.counts
        if counts.bad and (self._spec.bad_rows == "stop" or counts.bad == counts.read):
            with partial.aside.open(encoding="utf-8") as lines:
                first = [BadRow(**json.loads(line)) for line in itertools.islice(lines, 1 + FIRST_BAD_ROWS)]
            raise _bad_rows(first, counts.bad, counts.read)
        self._tell("tokenizing", counts.read, counts.read)

    def _write(self, partial: PartialTable, done: Sequence[tuple[Any, list[BadRow]]]) -> None:
        """What is done comes in the order in which it was given; chunks without an example were not given."""
        results = iter(done)
        while self._waiting:
            chunk = self._waiting[0]
            result = next(results, None) if chunk.examples else (None, [])
            if result is None:
                break
            self._waiting.popleft()
            batch, bad = result
            self._any_bad = self._any_bad or bool(bad)
            note = chunk.note(len(chunk.bad) + len(bad))
            partial.add(batch, [*chunk.bad, *bad], note)
            self.counts.add(note)
        self._progress()

    def _progress(self) -> None:
        """The last row is told of when all is written: a bar that is full is taken away."""
        if not self._expected or self.counts.read < self._expected:
            self._tell("tokenizing", self.counts.read, self._expected)

    def _chunks(self, number: int, source: Source) -> Iterator[_Chunk]:
        """The rows of a source, without the chunks that are there already."""
        unread: list[BadRow] = []
        reader: Iterator[RawRow] = itertools.islice(sources.read(source, unread.append), self._spec.max_rows)
        with self._stage("read"):
            head = list(itertools.islice(reader, ROWS_TO_KNOW_A_FORMAT))
            if not head and unread:
                raise _bad_rows(unread, len(unread), len(unread))
            if not self._renaming.nothing:
                self._renaming.require_columns(head, source.name)
                head, reader = [self._renaming(row) for row in head], map(self._renaming, reader)
            row_format = detect_format(head, source.name, self._spec.format)
        rows: Iterator[RawRow] = itertools.chain(head, reader)
        while True:
            with self._stage("read"):
                taken = list(itertools.islice(rows, CHUNK))
                chunk = _Chunk(number, source.name, row_format, len(taken) + len(unread), bad=unread.copy())
                unread.clear()
                if not chunk.read:
                    return
                if self._skip:
                    self._skip -= 1
                    self._skipped += chunk.read
                    self._tell("reading what is tokenized already", self._skipped, self.went_on)
                    continue
                self._fill(chunk, taken)
            yield chunk

    def _fill(self, chunk: _Chunk, rows: Sequence[RawRow]) -> None:
        made = [to_example(row, chunk.format) for row in rows]
        chunk.bad += [item for item in made if isinstance(item, BadRow)]
        examples = [item for item in made if isinstance(item, Example)]
        chunk.empty = sum(clean.says_nothing(example) for example in examples)
        # After a bad row that stops the run, the rest is only read, to count how many more there are.
        if not (self._spec.bad_rows == "stop" and (self._any_bad or chunk.bad)):
            chunk.examples = examples


def _bad_rows(first: Sequence[BadRow], bad: int, read: int) -> DataError:
    """`first`: of the bad rows."""
    more = bad - 1
    others = f" ({counted(more, 'more bad row')}: {_some([row.where for row in first[1:]], more)})" if more else ""
    fix = "correct the row, or set data.bad_rows: skip to set such rows aside in a file"
    if bad == read:
        fix = "not one row can be used: check data.format, the columns and the chat template"
    return DataError(f"{first[0].why}{others}", where=first[0].where, why=f"the row is: {first[0].excerpt}", fix=fix)


def _some(places: Sequence[str], count: int) -> str:
    return ", ".join(places[:FIRST_BAD_ROWS]) + (", ..." if count > FIRST_BAD_ROWS else "")
