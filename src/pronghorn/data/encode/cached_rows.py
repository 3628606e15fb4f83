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
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from pronghorn.recipe_objective import Rows as Wanted
from pronghorn.recipe_parts import Data

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
    with PartialTable(path, SCHEMA if wanted in ("documents", "prompts") else PAIR_SCHEMA) as partial:
        _tokenize(partial, found, states, spec, encoder, progress, stage)
        partial.finish()
    if there := sum(note.read for note in partial.there):
        remarks += (f"resumed after the first {counted(there, 'row')}, which were tokenized before the interruption",)
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


def _tokenize(
    partial: PartialTable,
    found: Sequence[Part],
    states: Sequence[tuple[int, ...]],
    spec: Data,
    encoder: Encoder,
    progress: Progress,
    stage: Stage,
) -> None:
    """One pass over the sources, behind what is there already. No more is held than the chunks under way."""
    counts, stops, skipped = _Counts.of(found, partial.there), spec.bad_rows == "stop", 0
    there, any_bad = counts.read, counts.bad > 0
    with stage("read"):
        expected = expected_rows(found)

    def tell() -> None:
        """The last row is told of when all is written: a bar that is full is taken away."""
        if not expected or counts.read < expected:
            progress("tokenizing", counts.read, expected)

    def write(results: Iterator[tuple[Chunk, Encoded]]) -> None:
        with stage("tokenize"):
            done = list(results)
        for chunk, (batch, bad, told) in done:
            note = chunk.note(batch.num_rows if batch is not None else 0, len(bad), told)
            partial.add(batch, [*chunk.bad, *bad], note)
            counts.add(note)
        tell()

    with EncodingPool(encoder, waiting=tell) as pool:
        for number, chunk in enumerate(read_chunks(found, CHUNK, stage)):
            if number < len(partial.there):  # only read, to get to what follows
                skipped += chunk.read
                progress("reading cached tokens", skipped, there)
                continue
            with stage("read"):
                chunk.fill()
            any_bad = any_bad or counts.bad > 0 or bool(chunk.bad)
            if any_bad and stops:
                chunk.groups = []  # the rest is only read, to count how many more bad rows there are
            write(pool.give(chunk))
        write(pool.rest())
    for part, state in zip(found, states, strict=True):
        sources.require_unchanged(part.source, state)  # else the cache would have these rows under the digest of others
    if counts.bad and (stops or counts.bad == counts.read):
        raise bad_rows(list(itertools.islice(partial.bad(), 1 + FIRST_BAD_ROWS)), counts.bad, counts.read)
    progress("tokenizing", counts.read, counts.read)
