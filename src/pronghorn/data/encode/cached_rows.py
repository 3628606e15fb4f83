"""The rows of a recipe's sources, tokenized: from the cache, or read and tokenized once and put there.

The cache's key is all that decides the tokens: the content of the sources, the tokenizer's files and template, loss_on,
bad_rows, and for each source its format, max_rows and names of columns and roles. (Not the date: a template that writes today's
date keeps the day of the first tokenizing, so that a resumed run sees the same tokens.) What lies there is checked before use
(token_cache.py); damaged, it is made again, and that is told. An interrupted tokenizing goes on behind its last whole chunk of
rows: the rows before it are read again, which takes a fiftieth of the time, and not tokenized.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from pronghorn.data.encode.encode import Encoder
from pronghorn.data.encode.encoding_pool import CHUNK, Encoded, EncodingPool
from pronghorn.data.encode.token_cache import BAD, DamagedError, PartialTable, open_table, write_bad_rows
from pronghorn.data.encode.tokens import PAIR_SCHEMA, SCHEMA, TokenTable, fingerprint, loaded
from pronghorn.data.read import sources
from pronghorn.data.read.reading import (
    FIRST_BAD_ROWS,
    Chunk,
    Name,
    Note,
    Part,
    SourceCount,
    Stage,
    bad_rows,
    expected_rows,
    key_of,
    parts_of,
    read_chunks,
    told_of,
)
from pronghorn.errors import EnvironmentFault, counted
from pronghorn.folders import cache_folder
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe import Data
from pronghorn.recipe_objective import Rows as Wanted

CACHE_VERSION = 10  # raise it when the same input is tokenized or laid out differently

Progress = Callable[[str, int, int], None]


def silent(label: str, done: int, total: int) -> None:
    pass


def no_stage(name: str) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(slots=True)
class _Counts:
    """What is known of all rows of the chunks that are written, counted as in `Note`."""

    read: int = 0
    bad: int = 0
    empty: int = 0
    lost: int = 0
    controls: int = 0
    identical: int = 0
    sources: list[SourceCount] = field(default_factory=list)  # of all parts, also of those without a row

    @classmethod
    def of(cls, found: Sequence[Part], notes: Iterable[Note], **more: Any) -> Self:
        counts = cls(sources=[SourceCount(part.source.name, "", 0, weight=part.weight) for part in found], **more)
        for note in notes:
            counts.add(note)
        return counts

    def add(self, note: Note) -> None:
        """Adds the counts of one more chunk."""
        for name in ("read", "bad", "empty", "lost", "controls", "identical"):
            setattr(self, name, getattr(self, name) + getattr(note, name))
        before = self.sources[note.part]
        self.sources[note.part] = replace(
            before,
            format=note.format,
            read=before.read + note.read,
            rows=before.rows + note.rows,
            unused=tuple(sorted({*before.unused, *note.unused})),
        )


@dataclass(slots=True)
class Rows(_Counts):
    """All rows of the sources that could be tokenized, before anything is dropped."""

    table: TokenTable = field(kw_only=True)
    path: Path = field(kw_only=True)  # the folder of the cached table; notes on its rows stand beside it
    remarks: tuple[str, ...] = field(default=(), kw_only=True)  # what became of the cache, if there is something to tell

    @property
    def bad_rows_file(self) -> Path | None:
        return self.path / BAD if self.bad else None

    @property
    def format(self) -> str:
        return ", ".join(dict.fromkeys(source.format for source in self.sources if source.format))


def tokenized_rows(
    names: Sequence[Name],
    spec: Data,
    tokenizer: Tokenizer,
    *,
    progress: Progress = silent,
    stage: Stage = no_stage,
    wanted: Wanted = "documents",
) -> Rows:
    remarks: tuple[str, ...] = ()
    with stage("read"):
        found = parts_of(names, spec, wanted)
        states = [sources.state(part.source) for part in found]
        path = cache_folder() / "tokens" / _key(found, spec, fingerprint(tokenizer))
        try:
            cached = _open(path, found)
        except DamagedError as damage:
            cached, remarks = None, (f"the cached tokens are damaged ({damage}) and are created again: {path}",)
    if cached is not None:
        return replace(cached, remarks=tuple(told_of(found)))
    with stage("load"):
        encoder = Encoder(loaded(tokenizer), spec.loss_on, spec.lost, spec.control_tokens)
    with PartialTable(path, SCHEMA if wanted == "documents" else PAIR_SCHEMA) as partial:
        work = _Tokenizing(found, states, spec, encoder, partial, progress, stage)
        work.run()
        partial.finish()
    if work.went_on:
        remarks += (f"resumed after the first {counted(work.went_on, 'row')}, which were tokenized before the interruption",)
    try:
        rows = _open(path, found)
    except DamagedError as error:
        raise EnvironmentFault(
            "cannot read back the tokenized rows", where=str(path), why=str(error), fix="check the disk"
        ) from error
    if rows is None:
        raise EnvironmentFault(
            "the tokenized rows disappeared", where=str(path), fix="check which other program uses the cache"
        )
    return replace(rows, remarks=(*remarks, *told_of(found)))


def _key(found: Sequence[Part], spec: Data, tokenizer: str) -> str:
    parts: list[Any] = [CACHE_VERSION, CHUNK, version("transformers"), version("tokenizers"), tokenizer]
    parts += [spec.loss_on, spec.bad_rows, spec.lost, spec.control_tokens, key_of(found)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _open(path: Path, found: Sequence[Part]) -> Rows | None:
    """The cached rows; None when they are not there."""
    opened = open_table(path)
    if opened is None:
        return None
    table, entries = opened
    notes = [entry.note for entry in entries if entry.note is not None]
    if any(not 0 <= note.part < len(found) for note in notes):
        raise DamagedError("its journal has other sources")
    rows = Rows.of(found, notes, table=table, path=path)
    if sum(source.rows for source in rows.sources) != len(table):
        raise DamagedError("its journal has another number of rows")
    if rows.bad:
        write_bad_rows(path, (row for entry in entries for row in entry.bad))
    return rows


class _Tokenizing:
    """One pass over the sources, behind what is there already. No more is held than the chunks under way."""

    def __init__(
        self,
        found: Sequence[Part],
        states: Sequence[tuple[int, ...]],
        spec: Data,
        encoder: Encoder,
        partial: PartialTable,
        progress: Progress,
        stage: Stage,
    ) -> None:
        self._found, self._states, self._spec, self._encoder = found, states, spec, encoder
        self._partial, self._tell, self._stage = partial, progress, stage
        self._expected = 0
        self._skip, self._skipped = len(partial.there), 0  # chunks that are there already; rows of them that were read again
        self._waiting: deque[Chunk] = deque()
        self.counts = _Counts.of(found, partial.there)
        self.went_on, self._any_bad = self.counts.read, self.counts.bad > 0

    def run(self) -> None:
        with self._stage("read"):
            self._expected = expected_rows(self._found)
        with EncodingPool(self._encoder, waiting=self._progress) as pool:
            for chunk in read_chunks(self._found, CHUNK, self._stage):
                if self._is_there(chunk):
                    continue
                with self._stage("read"):
                    chunk.fill()
                self._any_bad = self._any_bad or bool(chunk.bad)
                if self._any_bad and self._spec.bad_rows == "stop":
                    chunk.groups = []  # the rest is only read, to count how many more bad rows there are
                self._waiting.append(chunk)
                with self._stage("tokenize"):
                    done = list(pool.give(chunk.groups))
                self._write(done)
            with self._stage("tokenize"):
                done = list(pool.rest())
            self._write(done)
        for part, state in zip(self._found, self._states, strict=True):
            sources.require_unchanged(part.source, state)  # else the cache would have these rows under the digest of others
        counts = self.counts
        if counts.bad and (self._spec.bad_rows == "stop" or counts.bad == counts.read):
            raise bad_rows(list(itertools.islice(self._partial.bad(), 1 + FIRST_BAD_ROWS)), counts.bad, counts.read)
        self._tell("tokenizing", counts.read, counts.read)

    def _write(self, done: Sequence[Encoded]) -> None:
        """What is done comes in the order in which it was given; chunks without an example were not given."""
        results = iter(done)
        while self._waiting:
            chunk = self._waiting[0]
            result = next(results, None) if chunk.groups else (None, [], {})
            if result is None:
                break
            self._waiting.popleft()
            batch, bad, told = result
            self._any_bad = self._any_bad or bool(bad)
            note = chunk.note(batch.num_rows if batch is not None else 0, len(bad), told)
            self._partial.add(batch, [*chunk.bad, *bad], note)
            self.counts.add(note)
        self._progress()

    def _progress(self) -> None:
        """The last row is told of when all is written: a bar that is full is taken away."""
        if not self._expected or self.counts.read < self._expected:
            self._tell("tokenizing", self.counts.read, self._expected)

    def _is_there(self, chunk: Chunk) -> bool:
        """Whether an interrupted tokenizing wrote it already; then it is only read, to get to what follows."""
        if not self._skip:
            return False
        self._skip -= 1
        self._skipped += chunk.read
        self._tell("reading cached tokens", self._skipped, self.went_on)
        return True
