"""The sources of a recipe as examples, in order and in chunks: names, columns and formats settled, everything counted.

A source is read as the recipe says for all, or as its own entry says: `data.train: [{path: a.jsonl, max_rows: 1000}]`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from pronghorn.data.preference.preference_rows import Group, detect_groups, to_groups, unused_in_groups
from pronghorn.data.read import sources
from pronghorn.data.read.prompt_rows import detect_prompts, to_prompt
from pronghorn.data.read.renaming import Renaming
from pronghorn.data.read.source_files import BadRow, RawRow, Source
from pronghorn.errors import DataError, counted
from pronghorn.recipe_objective import Rows as Wanted
from pronghorn.recipe_parts import Data, DataSource

ROWS_TO_KNOW_A_FORMAT = 100
TEXT = ("jsonl", "json", "csv", "tsv", "txt")  # kinds of files whose size tells their tokens
LONGEST_ROW = 10_000_000  # characters that are tokenized without having been asked for: half a minute
BLOCK = 1 << 20  # bytes read at once to count lines
FIRST_BAD_ROWS = 3  # named in an error, besides the first of all
Name = str | DataSource
Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class SourceCount:
    name: str
    format: str
    read: int
    rows: int = 0  # of the table, which holds the sources' rows one after the other
    unused: tuple[str, ...] = ()  # columns that hold something and are not trained on
    weight: float = 1.0  # how often each row comes in an epoch; not of the cache, but of the recipe

    def __str__(self) -> str:
        more = f", weight {self.weight:g}" if self.weight != 1 else ""
        return f"{self.name}: {counted(self.read, 'row')}, {self.format or 'none needed'}{more}"


@dataclass(frozen=True, slots=True)
class Part:
    """One file or data set, and how it is read."""

    source: Source
    entry: int  # the number of the entry of `data.train` that it belongs to
    format: str
    renaming: Renaming
    max_rows: int | None
    shared: bool  # `max_rows` are those of the whole entry, not of each of its files
    weight: float
    wanted: Wanted = "documents"
    any_length: bool = False  # the recipe says what becomes of long rows

    def key(self) -> list[Any]:
        """For the cache: all that decides its rows."""
        rows = [self.max_rows, self.entry if self.shared else None] if self.max_rows else []
        wanted = [] if self.wanted == "documents" else [self.wanted]
        return [self.source.name, sources.fingerprint(self.source), self.format, self.renaming.key(), rows, *wanted]


def parts_of(names: Sequence[Name], spec: Data, wanted: Wanted = "documents") -> list[Part]:
    """The files and data sets behind the names, each with what the recipe says of it."""
    found: list[Part] = []
    for entry, name in enumerate(names):
        own = name if isinstance(name, DataSource) else DataSource(path=name)
        keys = spec.message_fields if own.message_fields is None else own.message_fields
        renaming = Renaming(own.columns or spec.fields, keys, dict((own.roles or spec.roles).items()))
        most = own.max_rows or spec.max_rows
        found += [
            Part(
                source,
                entry,
                own.format or spec.format,
                renaming,
                most,
                own.max_rows is not None,
                own.weight,
                wanted,
                any_length=spec.long is not None,
            )
            for source in sources.resolve(own)
        ]
    return found


@dataclass(frozen=True, slots=True)
class Note:
    """What was counted in a chunk. Row counts, but for the first two."""

    part: int
    format: str
    read: int
    rows: int  # of the table
    bad: int
    empty: int = 0  # with an answer that says nothing: junk, whether it is dropped or not
    lost: int = 0  # of which the chat template left something out, which data.lost allowed
    controls: int = 0  # whose texts hold control tokens
    identical: int = 0  # of preference data: with a rejected answer that is the chosen one; these and empty ones are left out
    unused: tuple[str, ...] = ()


@dataclass(slots=True)
class Chunk:
    """Rows of one part that are tokenized together. Read only, until it is filled."""

    part: int
    format: str  # as of `detect_groups`
    read: int
    raw: list[RawRow]
    bad: list[BadRow] = field(default_factory=list)  # that could not be read, or are no example
    groups: list[Group] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    wanted: Wanted = "documents"

    def fill(self) -> None:
        layout: Any = self.format.partition(": ")[2]
        asks = self.wanted == "prompts"
        found = [to_prompt(row, layout) if asks else to_groups(row, self.format, self.wanted) for row in self.raw]
        self.bad += [item for item in found if isinstance(item, BadRow)]
        self.groups = [group for item in found if not isinstance(item, BadRow) for group in item]
        if not asks:  # rewards get every column
            self.unused.update(*(unused_in_groups(row.fields, self.format) for row in self.raw))

    def note(self, rows: int, bad: int, told: Mapping[str, int]) -> Note:
        """Once it is tokenized. `told`: how many rows are not as they were."""
        return Note(self.part, self.format, self.read, rows, len(self.bad) + bad, unused=tuple(sorted(self.unused)), **told)


def read_chunks(parts: Sequence[Part], size: int, stage: Stage) -> Iterator[Chunk]:
    """One pass over the parts; no more is held than a chunk."""
    left = {part.entry: part.max_rows for part in parts if part.shared}
    for number, part in enumerate(parts):
        most = left[part.entry] if part.shared else part.max_rows
        if most == 0:
            continue
        taken = 0
        for chunk in _chunks_of(number, part, most, size, stage):
            taken += len(chunk.raw)
            yield chunk
        if part.shared and most is not None:
            left[part.entry] = most - taken


def _chunks_of(number: int, part: Part, most: int | None, size: int, stage: Stage) -> Iterator[Chunk]:
    unread: list[BadRow] = []  # rows that are not even JSON
    reader: Iterator[RawRow] = itertools.islice(sources.read(part.source, unread.append), most)
    with stage("read"):
        head = list(itertools.islice(reader, ROWS_TO_KNOW_A_FORMAT))
        if not head and unread:
            raise bad_rows(unread, len(unread), len(unread))
        if not part.renaming.nothing:
            part.renaming.require_columns(head, part.source.name)
            head, reader = [part.renaming(row) for row in head], map(part.renaming, reader)
        if part.wanted == "prompts":
            row_format = detect_prompts(head, part.source.name)
        else:
            row_format = detect_groups(head, part.source.name, part.format, part.wanted)
    rows: Iterator[RawRow] = itertools.chain(head, reader)
    while True:
        with stage("read"):
            taken = list(itertools.islice(rows, size))
            if not part.any_length:
                _refuse_endless(taken)
            chunk = Chunk(number, row_format, len(taken) + len(unread), taken, unread.copy(), wanted=part.wanted)
            unread.clear()
        if not chunk.read:
            return
        yield chunk


def text_bytes(parts: Sequence[Part]) -> float | None:
    """Bytes of text in files, times their weights; None where sizes do not tell it, or only a part of the rows is used."""
    if any(part.source.kind not in TEXT or part.source.packing or part.max_rows for part in parts):
        return None
    return sum(part.source.path.stat().st_size * part.weight for part in parts)


def _refuse_endless(rows: Sequence[RawRow]) -> None:
    """Before minutes are spent on the tokens of a row that no model can take."""
    for row in rows:
        size = _size(row.fields)
        if size > LONGEST_ROW:
            raise DataError(
                f"the row has about {size / 1e6:.0f} million characters",
                where=row.where,
                why=f"more than {LONGEST_ROW / 1e6:.0f} million fit no model, and data.long does not say what to do with them",
                fix="cut it into several rows, remove it, or set data.long: drop, truncate or split",
            )


def _size(value: object) -> int:
    """About as many characters as it has as JSON."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 8 * len(value) + sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else 4


def expected_rows(parts: Sequence[Part]) -> int:
    """Rows of all parts together; 0 where that is unknown without reading them."""
    total, of_entry = 0, dict[int, int]()
    for part in parts:
        count = _expected(part.source)
        if not count:
            return 0
        before = of_entry.get(part.entry, 0) if part.shared else 0  # `max_rows` are those of the whole entry
        count = min(count, part.max_rows - before) if part.max_rows else count
        of_entry[part.entry] = before + count
        total += count
    return total


def _expected(source: Source) -> int:
    """Rows of a source; 0 where nobody knows without reading them: packed files, JSON that is no line a row, hub data sets. For
    CSV an upper bound, since a row may have several lines."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if source.kind in ("jsonl", "csv", "tsv") and not source.packing:
            with source.path.open("rb") as file:
                count, last = 0, b"\n"
                while block := file.read(BLOCK):
                    count, last = count + block.count(b"\n"), block[-1:]
            return count + (last != b"\n") - (source.kind != "jsonl")
        if source.kind == "parquet":
            with source.path.open("rb") as file:
                return int(pq.ParquetFile(file).metadata.num_rows)
    except (OSError, pa.ArrowException):
        return 0  # whoever reads it says so
    return int(source.kind == "txt" and not source.by_line)


def bad_rows(
    first: Sequence[BadRow], bad: int, read: int, skipped: str = "to write such rows to a file and continue"
) -> DataError:
    """`first`: of the bad rows. `skipped`: what skip does with them."""
    row, more = first[0], bad - 1
    others = f" ({counted(more, 'more bad row')}: {_some([one.where for one in first[1:]], more)})" if more else ""
    fix = f"{row.fix or 'fix the row'}; or set data.bad_rows: skip {skipped}"
    if bad == read:  # then nothing would be left
        fix = row.fix or "no row can be used: check data.format, the columns and the chat template"
    return DataError(f"{row.why}{others}", where=row.where, why=f"the row is: {row.excerpt}", fix=fix)


def _some(places: Sequence[str], count: int) -> str:
    return ", ".join(places[:FIRST_BAD_ROWS]) + (", ..." if count > FIRST_BAD_ROWS else "")


def told_of(parts: Sequence[Part]) -> list[str]:
    """How files were taken, where that could be another way."""
    told = list(
        dict.fromkeys(
            f"files not read in {part.source.folder}: {_listed(part.source.beside, 5)}" for part in parts if part.source.beside
        )
    )
    texts = [part.source.name for part in parts if part.source.kind == "txt" and not part.source.by_line]
    if texts:
        by_line = f"{{path: {texts[0]}, text_by: line}}"
        told.append(f"each .txt file is one document: {_listed(texts, 3)}; for one document per line: {by_line}")
    return told


def told_of_columns(counts: Sequence[SourceCount]) -> list[str]:
    """Which columns are not trained on, a sentence for each set of them; sources with the same share one."""
    chats = [count.name for count in counts if count.format == "completion as chat"]
    told = []
    if chats:
        told.append(f"prompt and completion with a system message or tools are read as conversations: {_listed(chats, 3)}")
    found: dict[tuple[str, ...], list[str]] = {}
    for count in counts:
        if count.unused:
            found.setdefault(tuple(count.unused), []).append(count.name)
    return told + [f"unused columns: {_listed(columns, 10)} ({_listed(names, 3)})" for columns, names in found.items()]


def _listed(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def key_of(parts: Sequence[Part]) -> str:
    """Digest of everything that decides their rows."""
    return json.dumps([part.key() for part in parts])
