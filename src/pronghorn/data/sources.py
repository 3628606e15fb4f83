"""Files, folders and hub data sets into raw rows, one after the other, each with the place it came from.

JSON Lines, JSON, Parquet, CSV and TSV; `.gz` around the text kinds. A row that cannot be read goes to `on_bad` with
file, line and an excerpt; a file that cannot be read at all is a DataError (source_files.py).
"""

from __future__ import annotations

import csv
import difflib
import functools
import gzip
import json
import math
import os
import re
import shlex
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.data.source_files import (
    BadRow,
    Kind,
    Source,
    content_of,
    decodes,
    excerpt,
    known_content,
    not_utf8,
    opened,
    unreadable,
)
from pronghorn.digests import file_digest
from pronghorn.errors import CommandError, DataError, counted
from pronghorn.hub import quiet, require_data_set

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".tsv": "tsv",
}
SUPPORTED = ".jsonl, .ndjson, .json, .csv, .tsv (each also with .gz) and .parquet"
BATCH_ROWS = 1024  # rows turned into Python values at a time; bounds memory, and larger is no faster
HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:\[\]]+)(?=:))?(?::(?P<split>[^:\[\]]+(?:\[[^\[\]]*\])?))?"
)


@dataclass(frozen=True, slots=True)
class RawRow:
    fields: dict[str, Any]
    where: str  # data/train.jsonl:17 | x.parquet row 17 | org/name[17]


def resolve(name: str) -> list[Source]:
    """The sources behind a name: a file, every supported file of a folder, or a hub data set `name[:config][:split]`."""
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    try:
        if path.is_dir():
            return _folder(name, path)
        if path.exists():
            return [_file(name, path)]
        hub = HUB_NAME.fullmatch(name)
        if hub and not name.startswith((".", "~")) and _kind(path) is None:
            return [Source(name, "hub", hub=(hub["name"], hub["config"], hub["split"] or "train"))]
        raise DataError(what="no such file", where=name, fix=_neighbours(name, path))
    except OSError as error:
        raise unreadable(name, error) from error


def read(source: Source, on_bad: Callable[[BadRow], None]) -> Iterator[RawRow]:
    """Rows in file order. Raises DataError when the source is missing, empty, damaged or not UTF-8."""
    empty = True
    for row in _rows(source):
        empty = False
        if isinstance(row, BadRow):
            on_bad(row)
        else:
            yield row
    if empty:
        raise DataError(what="there is no row in it", where=source.name, why="the file is empty or holds only a header",
                        fix="check how it was written, or take it out of the recipe")


def fingerprint(source: Source) -> str:
    """Changes when the content does: SHA-256 of the file's bytes; a hub data set's own fingerprint."""
    if source.hub:
        return str(_hub_dataset(source)._fingerprint)
    try:
        return file_digest(source.path)
    except OSError as error:
        raise unreadable(source.name, error) from error


def state(source: Source) -> tuple[int, ...]:
    """Of a file: what changes when it is written to or replaced."""
    if source.hub:
        return ()
    try:
        stat = source.path.stat()
    except OSError as error:
        raise unreadable(source.name, error) from error
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def require_unchanged(source: Source, before: tuple[int, ...]) -> None:
    if state(source) != before:
        raise DataError(what="the file changed while it was read", where=source.name, why="its rows may be a mixture",
                        fix="wait until whoever writes it is done, then run the same command again")


def _rows(source: Source) -> Iterator[RawRow | BadRow]:
    """A reader's rows; troubles with the file itself become DataErrors. Nothing the caller does happens in here."""
    try:
        yield from READERS[source.kind](source)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(what=f"the gzip data is damaged or cut short: {error}", where=source.name,
                        fix=f"copy or download it again; `gzip -t {shlex.quote(source.name)}` tests it") from error
    except OSError as error:
        raise unreadable(source.name, error) from error


def _kind(path: Path) -> Kind | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] != [".gz"]:
        return KINDS.get(suffixes[-1]) if suffixes else None
    inner = KINDS.get(suffixes[-2]) if len(suffixes) > 1 else None
    return None if inner == "parquet" else inner  # Parquet is read from its end and compresses inside


def _file(name: str, path: Path) -> Source:
    kind = _kind(path)
    if kind is None or not path.is_file():
        what = "not a kind of file that can be read as data"
        fix = "convert or unpack it, or give it the ending that its content has"
        if path.is_file() and (content := known_content(path)):
            what, fix = f"this is {content[0]}, which cannot be read as data", content[1]
        raise DataError(what=what, where=name, why=f"the kinds are {SUPPORTED}", fix=fix)
    # A name may be any bytes; those that are no UTF-8 are written as \xff, because each row carries the name of its file.
    return Source(os.fsencode(name).decode("utf-8", "backslashreplace"), kind, path, gzipped=path.suffix.lower() == ".gz")


def _folder(name: str, path: Path) -> list[Source]:
    files = sorted(f for f in path.iterdir() if _kind(f) and f.is_file() and not f.name.startswith("."))
    if not files:
        raise DataError(what="no data file in this folder", where=name, why=f"the kinds are {SUPPORTED}; folders below"
                        " it are not searched", fix="name the files, or the folder that holds them")
    return [_file(f"{name.rstrip('/')}/{file.name}", file) for file in files]


def _neighbours(name: str, path: Path) -> str:
    """What to do about a missing file."""
    if not path.parent.is_dir():
        return f"check the path: the folder {path.parent} does not exist in {Path.cwd()}"
    files = sorted(file.name for file in path.parent.iterdir() if file.is_dir() or _kind(file))
    close = difflib.get_close_matches(path.name, files, n=3, cutoff=0.6)
    if not close:
        return f"check the path, which counts from {Path.cwd()}: nothing there has a similar name"
    return "did you mean " + " or ".join(name.removesuffix(path.name) + match for match in close) + "?"


class _NotAllowedError(ValueError):
    """JSON that parses and still says nothing certain."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _NotAllowedError(f"the key `{next(key for key in keys if keys.count(key) > 1)}` stands twice")
    return fields


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # NaN, Infinity, 1e999
        raise _NotAllowedError(f"{text} is not a finite number")
    return number


STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_number)
LENIENT = json.JSONDecoder(parse_int=str, parse_float=str)  # finds the end of an object that STRICT refuses
SPACE = re.compile(r"[ \t\n\r]*")
ONE_ROW = {"messages", "conversations", "conversation", "text"}  # an object with such a key is a row, not a list of rows
HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # escapes that may be a surrogate on its own


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_jsonl(source: Source) -> Iterator[RawRow | BadRow]:
    with opened(source) as file:
        first = True
        for number, line in enumerate(file, start=1):
            stripped = line.strip()
            if not stripped:
                continue
            where = f"{source.name}:{number}"
            if first and (stripped in (b"[", b"{") or stripped.startswith(b"[{")):
                raise DataError(what="JSON, but not one object a line", where=where, fix="give the file the ending .json")
            first = False
            yield _json_row(where, stripped.decode()) if decodes(stripped, "utf-8") else not_utf8(source, where, stripped)


def _not_json(error: json.JSONDecodeError) -> str:
    return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"  # "Unterminated string starting at"


def _json_row(where: str, text: str) -> RawRow | BadRow:
    try:
        fields = STRICT.decode(text)
    except json.JSONDecodeError as error:
        return BadRow(where, _not_json(error), excerpt(text, error.pos))
    except _NotAllowedError as error:
        return BadRow(where, str(error), excerpt(text))
    except (RecursionError, ValueError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else "a whole number of over 4,300 digits"
        return BadRow(where, why, excerpt(text))
    if not isinstance(fields, dict):
        return BadRow(where, "not an object with columns", excerpt(text))
    half = HALF_OF_A_PAIR.search(text)
    if half and not _encodes(fields):
        return BadRow(where, "half of a surrogate pair, which is no character", excerpt(text, half.start()))
    return RawRow(fields, where)


def _read_json(source: Source) -> Iterator[RawRow | BadRow]:
    """A list of objects, an object that holds one list, or, as hub files often have it, one object a line after all."""
    with opened(source) as file:
        data = file.read()
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        where = f"{source.name}:{data.count(10, 0, error.start) + 1}"
        bad = not_utf8(source, where, data[data.rfind(10, 0, error.start) + 1 :].partition(b"\n")[0])
        raise DataError(what=bad.why, where=where, why=bad.excerpt, fix="repair or remove these characters") from error
    del data
    start = _after_space(text, 0)
    try:
        if start == len(text):
            return
        if text.startswith("[", start):
            end = _after_space(text, (yield from _list_rows(source, text, start)))
            if end < len(text):
                raise json.JSONDecodeError("the list has ended, but there is more", text, end)
            return
        value, end = LENIENT.raw_decode(text, start)
        if _after_space(text, end) < len(text) and "\n" not in text[start:end]:
            yield from _read_jsonl(source)
            return
        if not isinstance(value, dict) or _after_space(text, end) < len(text):
            raise DataError(what="neither a list of objects nor an object that holds one", where=source.name,
                            fix='write [{...}, {...}], {"data": [{...}]} or one object a line')
        if value.keys() & ONE_ROW:
            yield _json_row(f"{source.name}:{text.count(chr(10), 0, start) + 1}", text[start:end])
            return
        lists = _lists_inside(text, start)
        if len(lists) != 1:
            found = ", ".join(f"`{key}`" for key in lists) or "none"
            raise DataError(what="an object must hold exactly one list of rows", where=source.name,
                            why=f"lists found: {found}", fix="keep one list in the file, or write one file for each")
        yield from _list_rows(source, text, next(iter(lists.values())))
    except json.JSONDecodeError as error:
        near = excerpt(text, error.pos)
        raise DataError(what=_not_json(error), where=f"{source.name}:{error.lineno}",
                        why=f"near: {near}", fix="correct it there; what follows cannot be read") from error
    except RecursionError as error:
        raise DataError(what="the JSON is nested too deep", where=source.name, fix="write plain rows") from error


def _list_rows(source: Source, text: str, start: int) -> Generator[RawRow | BadRow, None, int]:
    """The items of the list that opens at `start`, one at a time, each with its line, and its number where it shares the line
    with the one before it; returns where the list ends."""
    position, line, counted, last, number = _after_space(text, start + 1), 1, 0, 0, 0
    while not text.startswith("]", position):
        line, counted, number = line + text.count("\n", counted, position), position, number + 1
        _, end = LENIENT.raw_decode(text, position)
        yield _json_row(f"{source.name}:{line}" + f" row {number}" * (line == last), text[position:end])
        last = line
        position = _after_space(text, end)
        if text.startswith(",", position):
            position = _after_space(text, position + 1)
        elif not text.startswith("]", position):
            raise json.JSONDecodeError("expected `,` or `]`", text, position)
    return position + 1


def _lists_inside(text: str, start: int) -> dict[str, int]:
    """Keys of the (well-formed) object at `start` whose values are lists, and where those lists open."""
    lists: dict[str, int] = {}
    position = _after_space(text, start + 1)
    while not text.startswith("}", position):
        key, position = LENIENT.raw_decode(text, position)
        position = _after_space(text, _after_space(text, position) + 1)  # past the colon
        if text.startswith("[", position):
            lists[key] = position
        _, position = LENIENT.raw_decode(text, position)
        position = _after_space(text, position)
        if text.startswith(",", position):
            position = _after_space(text, position + 1)
    return lists


def _after_space(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    return found.end() if found else position


def _read_csv(source: Source) -> Iterator[RawRow | BadRow]:
    # The module's own limit of 131,072 characters a value is less than a long document; it can only be set for all.
    csv.field_size_limit(max(csv.field_size_limit(), 2**31 - 1))
    with opened(source) as file:
        recent = ""

        def lines() -> Iterator[str]:
            nonlocal recent
            for line in file:
                recent = line.decode("utf-8", "surrogateescape")  # what is not UTF-8 is found again in its row
                yield recent

        reader = csv.reader(lines(), delimiter="\t" if source.kind == "tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            where = f"{source.name}:{reader.line_num + 1}"
            try:
                values = next(reader, None)
            except csv.Error as error:
                yield BadRow(where, f"not CSV: {error}", excerpt(recent))
                continue
            if values is None:
                return
            if not values:
                continue
            joined = ",".join(values)
            if not joined.isascii() and not _encodes(values):
                yield not_utf8(source, where, joined.encode("utf-8", "surrogateescape"))
            elif header is None:
                header = _header(source, values)
            elif len(values) != len(header):
                columns = counted(len(header), "column")
                yield BadRow(where, f"{counted(len(values), 'value')}, but the header names {columns}", excerpt(joined))
            else:
                yield RawRow(dict(zip(header, values, strict=True)), where)


def _header(source: Source, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(what=f"two columns are called `{twice[0]}`", where=f"{source.name}:1", fix="rename one of them")
    other = next((mark for mark in (";", "\t", ",", "|") if len(names) == 1 and mark in names[0]), None)
    if other:
        raise DataError(what=f"the columns are separated by {other!r}", where=f"{source.name}:1",
                        why="a .csv file is separated by commas, a .tsv file by tabs", fix="save it again in that way")
    return names


def _read_parquet(source: Source) -> Iterator[RawRow | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with source.path.open("rb") as file:
        content = content_of(file.read(32))
        if content and content[0] != "a Parquet file":
            raise DataError(what=f"this is {content[0]}", where=source.name, fix=content[1])
        try:
            batches = pq.ParquetFile(file).iter_batches(BATCH_ROWS)
            yield from _arrow_rows(batches, lambda index: f"{source.name} row {index + 1}")
        except (pa.ArrowException, OSError) as error:
            reason = str(error).split("\n", 1)[0]
            raise DataError(what="this Parquet file is damaged, or is none", where=source.name, why=reason,
                            fix="copy or download it again, or write it again") from error


def _read_hub(source: Source) -> Iterator[RawRow | BadRow]:
    batches = _hub_dataset(source).with_format("arrow").iter(BATCH_ROWS)
    yield from _arrow_rows(batches, lambda index: f"{source.name}[{index}]")


def _arrow_rows(batches: Iterable[Any], where: Callable[[int], str]) -> Iterator[RawRow | BadRow]:
    """Rows of Arrow tables or record batches."""
    index = 0
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except UnicodeDecodeError as error:  # Arrow does not check the texts it is given
            raise DataError(what="a text is not UTF-8", where=f"{where(index)} or one of the {batch.num_rows - 1} after it",
                            fix="write the data again as UTF-8") from error
        for row in rows:
            yield RawRow({key: _without_nulls(value) for key, value in row.items()}, where(index))
            index += 1


def _without_nulls(value: Any) -> Any:
    """Arrow gives every object of a list all keys that any of them has, null where it had none: take those out again."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


@functools.lru_cache(maxsize=8)  # fingerprint and rows ask for the same one; it is memory-mapped, so keeping it is cheap
def _hub_dataset(source: Source) -> Any:
    assert source.hub is not None  # resolve() gives every hub source one
    name, config, split = source.hub
    try:
        import datasets
    except ImportError as error:
        raise CommandError(what="no file of this name, and data sets from the hub need the `datasets` library",
                           where=source.name, fix="check the path, or pip install 'pronghorn[hub]'") from error
    try:
        require_data_set(name)
        with quiet():
            return datasets.load_dataset(name, config, split=split)
    except DataError as error:
        fix = f"if it is a file: {_neighbours(name, Path(name))}; if it is a hub data set: {error.fix}"
        raise DataError(what=f"neither a file nor a hub data set: {error.what}", where=source.name, why=error.why,
                        fix=fix) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
        raise DataError(what=f"neither a file nor a hub data set whose split `{split}` loads", where=source.name,
                        why=reason, fix=f"if it is a file: {_neighbours(name, Path(name))}; if it is a hub data set, check"
                        " name:config:split, the network and your login") from error


READERS: dict[Kind, Callable[[Source], Iterator[RawRow | BadRow]]] = {
    "jsonl": _read_jsonl,
    "json": _read_json,
    "csv": _read_csv,
    "tsv": _read_csv,
    "parquet": _read_parquet,
    "hub": _read_hub,
}
