"""Files, folders and hub data sets into raw rows, one after the other, each with the place it came from.

JSON Lines, JSON, CSV, TSV and plain text, each also packed; Parquet and Arrow. A row that cannot be read goes to `on_bad` with
file, line and an excerpt; a file that cannot be read at all is a DataError (source_files.py).
"""

from __future__ import annotations

import csv
import gzip
import lzma
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pronghorn.data.read.arrow_rows import hub_fingerprint, read_arrow, read_hub, read_parquet
from pronghorn.data.read.json_rows import encodes, read_json, read_jsonl
from pronghorn.data.read.source_files import (
    SUPPORTED,
    BadRow,
    DamagedStreamError,
    Kind,
    RawRow,
    Source,
    decoded,
    decodes,
    excerpt,
    kind_of,
    known_content,
    neighbours,
    not_utf8,
    opened,
    packing_of,
    unreadable,
)
from pronghorn.digests import file_digest
from pronghorn.errors import DataError, counted
from pronghorn.recipe_parts import DataSource

HUB_NAME = re.compile(
    r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^:\[\]]+)(?=:))?(?::(?P<split>[^:\[\]]+(?:\[[^\[\]]*\])?))?"
)
ABOUT_DATA = {"dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json"}  # what `datasets` writes beside it
ABOUT_IT = {"readme", "license", "licence", "notice", "copying", "changelog", "requirements"}  # .txt files that are no data


def resolve(asked: str | DataSource) -> list[Source]:
    """The sources behind a name: a file, every supported file of a folder, or a hub data set `name[:config][:split]`."""
    wish = DataSource(path=asked) if isinstance(asked, str) else asked
    name, by_line = wish.path, wish.text_by == "line"
    path = Path(name).expanduser() if name.startswith("~/") else Path(name)
    try:
        if path.is_dir():
            found = _split_of(name, path, wish.split) if wish.split else _folder(name, path)
        elif path.exists():
            found = [_file(name, path)]
            if wish.split:
                raise _no_hub(name, "split")
        else:
            return [_hub(path, wish)]
    except OSError as error:
        raise unreadable(name, error) from error
    for key, given in (("name", wish.name), ("stream", wish.stream)):
        if given:
            raise _no_hub(name, key)
    if by_line and not any(source.kind == "txt" for source in found):
        raise DataError(what="text_by: line applies to .txt files only", where=name, fix="remove text_by")
    return [replace(source, by_line=by_line and source.kind == "txt") for source in found]


def _no_hub(name: str, key: str) -> DataError:
    return DataError(
        what=f"`{key}` applies to Hub datasets only, and this is a file or folder",
        where=name,
        fix=f"remove `{key}`" + ("; in a folder, `split` selects files" if key == "split" else ""),
    )


def _hub(path: Path, wish: DataSource) -> Source:
    name = wish.path
    hub = HUB_NAME.fullmatch(name)
    if not hub or name.startswith((".", "~")) or kind_of(path) is not None:
        raise DataError(what="no such file", where=name, fix=neighbours(name, path))
    if wish.text_by == "line":
        raise DataError(what="text_by: line applies to .txt files only", where=name, fix="remove text_by")
    for key, given, written in (("name", wish.name, hub["config"]), ("split", wish.split, hub["split"])):
        if given and written and given != written:
            raise DataError(what=f"two values of `{key}`: `{written}` and `{given}`", where=name, fix="keep one of them")
    config, split = hub["config"] or wish.name, hub["split"] or wish.split
    shown = ":".join([hub["name"], *([config] if config else []), *([split or "train"] if split or config else [])])
    shown = name if (config, split) == (hub["config"], hub["split"]) else shown
    return Source(shown, "hub", stream=wish.stream, hub=(hub["name"], config, split or "train"))


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
        raise source.error(
            "the file has no rows",
            why="it is empty or contains only a header",
            fix="check how it was written, or remove it from the recipe",
        )


def fingerprint(source: Source) -> str:
    """Changes when the content does: SHA-256 of the file's bytes; a hub data set's own fingerprint, or its revision."""
    if source.hub:
        return hub_fingerprint(source)
    try:
        return file_digest(source.path)
    except OSError as error:
        raise unreadable(source.name, error) from error


def state(source: Source) -> tuple[int, ...]:
    """Stat values of a file that change when it is written to or replaced."""
    if source.hub:
        return ()
    try:
        stat = source.path.stat()
    except OSError as error:
        raise unreadable(source.name, error) from error
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def require_unchanged(source: Source, before: tuple[int, ...]) -> None:
    if state(source) != before:
        raise source.error(
            "the file changed while it was being read",
            why="its rows may be a mixture of both versions",
            fix="wait until the file is complete, then run the same command again",
        )


def _rows(source: Source) -> Iterator[RawRow | BadRow]:
    """A reader's rows; troubles with the file itself become DataErrors. Nothing the caller does happens in here."""
    try:
        yield from READERS[source.kind](source)
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, DamagedStreamError) as error:
        raise _damaged(source, error) from error
    except OSError as error:
        if source.packing and error.errno is None:  # bzip2's
            raise _damaged(source, error) from error
        raise unreadable(source.name, error) from error


def _damaged(source: Source, error: Exception) -> DataError:
    test = f"{source.packing} -t {shlex.quote(source.name)}"
    return source.error(
        f"the {source.packing} data is damaged or truncated: {error}", fix=f"copy or download it again; check it with `{test}`"
    )


def _file(name: str, path: Path) -> Source:
    kind = kind_of(path)
    if kind is None or not path.is_file():
        what = "unsupported file type"
        fix = "decompress or convert it, or rename it to match its real format"
        if path.is_file() and (content := known_content(path)):
            what, fix = f"the file is {content[0]}, which does not match its name", content[1]
        raise DataError(what=what, where=name, why=f"supported: {SUPPORTED}", fix=fix)
    # A name may be any bytes; those that are no UTF-8 are written as \\xff, because each row carries the name of its file.
    return Source(os.fsencode(name).decode("utf-8", "backslashreplace"), kind, path, packing_of(path))


def _is_data(file: Path) -> bool:
    about = kind_of(file) == "txt" and file.name.split(".")[0].lower() in ABOUT_IT
    return bool(kind_of(file)) and file.is_file() and _is_shown(file) and not about


def _folder(name: str, path: Path) -> list[Source]:
    files = sorted(file for file in path.iterdir() if _is_data(file))
    if not files:
        below = sorted(folder.name for folder in path.iterdir() if folder.is_dir() and any(map(_is_data, folder.iterdir())))
        fix = f"name the right one: {name.rstrip('/')}/{below[0]}" if below else "name the files or their folder"
        raise DataError(
            what="the folder has no data files", where=name, why=f"supported: {SUPPORTED}; subfolders are not searched", fix=fix
        )
    beside = sorted(file.name for file in path.iterdir() if file.is_file() and file not in files and _is_shown(file))
    return [replace(_file(f"{name.rstrip('/')}/{file.name}", file), folder=name, beside=tuple(beside)) for file in files]


def _is_shown(file: Path) -> bool:
    return not file.name.startswith(".") and file.name not in ABOUT_DATA


def _split_of(name: str, path: Path, split: str) -> list[Source]:
    """A folder below of that name, or the files whose names are it: train.jsonl, train-00000-of-00002.parquet."""
    if (path / split).is_dir():
        return _folder(f"{name.rstrip('/')}/{split}", path / split)
    files = sorted(file for file in path.iterdir() if _is_data(file) and re.split(r"[.-]", file.name)[0] == split)
    if not files:
        there = ", ".join(sorted(file.name for file in path.iterdir())[:5])
        raise DataError(
            what=f"no split `{split}` in this folder",
            where=name,
            why=f"available: {there}",
            fix=f"name one of its subfolders, or files that start with it: {split}.jsonl",
        )
    return [_file(f"{name.rstrip('/')}/{file.name}", file) for file in files]


def _read_txt(source: Source) -> Iterator[RawRow | BadRow]:
    """The whole file is one document: a line need not be one, and where a text is cut changes what is learned."""
    with opened(source) as file:
        if not source.by_line:
            text = decoded(source, file.read())
            if text.strip():
                yield RawRow({"text": text}, source.name)
            return
        for number, line in enumerate(file, start=1):
            where = f"{source.name}:{number}"
            if not decodes(line, "utf-8"):
                yield not_utf8(source, where, line)
            elif line.strip():
                yield RawRow({"text": line.decode().rstrip("\r\n")}, where)


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
                yield BadRow(where, f"not CSV: {error}", excerpt(recent), "quote the value, and double the quotes inside it")
                continue
            if values is None:
                return
            if not values:
                continue
            joined = ",".join(values)
            if not joined.isascii() and not encodes(values):
                yield not_utf8(source, where, joined.encode("utf-8", "surrogateescape"))
            elif header is None:
                header = _header(source, values)
            elif len(values) != len(header):
                columns = counted(len(header), "column")
                yield BadRow(
                    where,
                    f"{counted(len(values), 'value')}, but the header has {columns}",
                    excerpt(joined),
                    "quote values that contain the separator, and give every row as many values as the header",
                )
            else:
                yield RawRow(dict(zip(header, values, strict=True)), where)


def _header(source: Source, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    names = [name or f"Unnamed: {i}" for i, name in enumerate(names)]  # as pandas calls the index that it writes
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise source.error(f"two columns are named `{twice[0]}`", fix="rename one of them", at=":1")
    other = next((mark for mark in (";", "\t", ",", "|") if len(names) == 1 and mark in names[0]), None)
    if other:
        raise source.error(
            f"the columns are separated by {other!r}",
            why="a .csv file is separated by commas, a .tsv file by tabs",
            fix="save it with commas (.csv) or tabs (.tsv)",
            at=":1",
        )
    return names


READERS: dict[Kind, Callable[[Source], Iterator[RawRow | BadRow]]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": _read_csv,
    "tsv": _read_csv,
    "txt": _read_txt,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "hub": read_hub,
}
