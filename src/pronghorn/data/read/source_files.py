"""A data file: its kind by its ending, its bytes unpacked, from behind a byte order mark, and refused when they are plainly
something else.

Text is UTF-8 and nothing else, because a guessed encoding trains on garbled letters without a word.
"""

from __future__ import annotations

import bz2
import codecs
import difflib
import gzip
import io
import json
import lzma
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from pronghorn.errors import DataError

Kind = Literal["jsonl", "json", "parquet", "arrow", "csv", "tsv", "txt", "hub"]
Packing = Literal["", "gzip", "zstd", "xz", "bzip2"]  # also the name of the program that packs and tests
KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".arrow": "arrow",
    ".feather": "arrow",
}
PACKINGS: dict[str, Packing] = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bzip2"}
SUPPORTED = ".jsonl, .ndjson, .json, .csv, .tsv and .txt (each also with .gz, .zst, .xz or .bz2), .parquet and .arrow"

# How files begin that people take for data, what they are, and what to do with them.
UNPACK = "unpack it and use the files inside"
CONTENT: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip file (Excel's .xlsx is one, too)", f"{UNPACK}; save a spreadsheet as CSV"),
    (b"PK\x05\x06", "an empty zip file", UNPACK),
    (b"\x1f\x8b", "a gzip file", "rename it after its content: .jsonl.gz"),
    (b"BZh", "a bzip2 file", "rename it after its content: .jsonl.bz2"),
    (b"\xfd7zXZ\x00", "an xz file", "rename it after its content: .jsonl.xz"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "rename it after its content: .jsonl.zst"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z file", UNPACK),
    (b"Rar!\x1a\x07", "a rar file", UNPACK),
    (b"PAR1", "a Parquet file", "rename it to .parquet"),
    (b"ARROW1", "an Arrow file", "rename it to .arrow"),
    (b"\xff\xff\xff\xff", "an Arrow stream (`datasets` cache)", "rename it to .arrow"),
    (b"SQLite format 3\x00", "an SQLite database", "export the table as CSV or JSON Lines"),
    (b"%PDF-", "a PDF", "extract its text"),
    (b"\xd0\xcf\x11\xe0", "an old Office file (.xls, .doc)", "save it as CSV"),
    (b"\x80\x04", "a pickle", "write it as JSON Lines; Pronghorn never opens a pickle"),
    (b"\x80\x05", "a pickle", "write it as JSON Lines; Pronghorn never opens a pickle"),
    (b"\x89HDF", "an HDF5 file", "write it as Parquet or JSON Lines"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one split of a hub data set."""

    name: str  # as the user wrote it; every message repeats it
    kind: Kind
    path: Path = Path()  # of a file
    packing: Packing = ""
    by_line: bool = False  # of a text file: a document a line, not one of the whole file
    stream: bool = False  # of the hub: read as it comes, without a copy on the disk
    hub: tuple[str, str | None, str] | None = None  # data set, config, split
    folder: str = ""  # that it is one of the files of
    beside: tuple[str, ...] = ()  # files of that folder that are not read

    def error(self, what: str, *, why: str = "", fix: str = "", at: str = "") -> DataError:
        """`at`: a place in it, such as `:17`."""
        return DataError(what, where=self.name + at, why=why, fix=fix)


@dataclass(frozen=True, slots=True)
class RawRow:
    fields: dict[str, Any]
    where: str  # data/train.jsonl:17 | x.parquet row 17 | org/name[17]


@dataclass(frozen=True, slots=True)
class BadRow:
    where: str
    why: str
    excerpt: str  # at most EXCERPT characters, printable, on one line
    fix: str = ""  # what to do about this row


class UnfitError(ValueError):
    """Why a row does not fit, and what to do about it; becomes a BadRow."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix

    def bad(self, row: RawRow) -> BadRow:
        return BadRow(row.where, str(self), excerpt(json.dumps(row.fields, ensure_ascii=False, default=str)), self.fix)


EXCERPT = 80


def kind_of(path: Path) -> Kind | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if not suffixes or suffixes[-1] not in PACKINGS:
        return KINDS.get(suffixes[-1]) if suffixes else None
    inner = KINDS.get(suffixes[-2]) if len(suffixes) > 1 else None
    return None if inner in ("parquet", "arrow") else inner  # which are read from their end, and compress inside


def packing_of(path: Path) -> Packing:
    return PACKINGS.get(path.suffix.lower(), "")


def neighbours(name: str, path: Path) -> str:
    """What to do about a missing file."""
    if not path.parent.is_dir():
        return f"check the path: the folder {path.parent} does not exist in {Path.cwd()}"
    files = sorted(file.name for file in path.parent.iterdir() if file.is_dir() or kind_of(file))
    close = difflib.get_close_matches(path.name, files, n=3, cutoff=0.6)
    if not close:
        return f"check the path relative to {Path.cwd()}: no similar name found"
    return "did you mean " + " or ".join(name.removesuffix(path.name) + match for match in close) + "?"


def excerpt(text: str, around: int = 0) -> str:
    """Up to EXCERPT characters of `text` near position `around`, safe to print on one line."""
    start = max(0, min(around - EXCERPT // 2, len(text) - EXCERPT))
    cut = text[start : start + EXCERPT]
    printable = "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in cut)
    before, after = start > 0, start + EXCERPT < len(text)
    return "…" * before + printable[before : len(printable) - after] + "…" * after


def unreadable(name: str, error: OSError) -> DataError:
    fix = f"chmod u+r {shlex.quote(name)}" if isinstance(error, PermissionError) else "check that the file still exists"
    return DataError(what=f"cannot read the file: {error.strerror or error}", where=name, fix=fix)


def content_of(head: bytes) -> tuple[str, str] | None:
    """What a file that begins so is, and what to do with it; None: it may be text."""
    return next(((name, fix) for mark, name, fix in CONTENT if head.startswith(mark)), None)


def known_content(path: Path) -> tuple[str, str] | None:
    """As `content_of`, for a file that may not be readable at all."""
    try:
        with path.open("rb") as file:
            return content_of(file.read(32))
    except OSError:
        return None


@contextmanager
def opened(source: Source) -> Iterator[BinaryIO]:
    """The file's bytes, unpacked, from behind a byte order mark; refuses what its first bytes show is not UTF-8."""
    with UNPACKERS[source.packing](source.path) as file:
        head = file.read(4096)
    if other := content_of(head):
        raise source.error(f"this is {other[0]}", fix=other[1])
    if guess := _wide_encoding(head):
        raise _wrong_encoding(source, source.name, guess)
    with UNPACKERS[source.packing](source.path) as file:  # again: not all of them go back
        if head.startswith(codecs.BOM_UTF8):
            file.read(len(codecs.BOM_UTF8))
        yield file


class DamagedStreamError(Exception):
    """A packed file that cannot be unpacked to its end."""


class _Zstd(io.RawIOBase):
    """Unpacked by Arrow, which every installation has. Frames that follow one another are one text."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._errors = (pa.ArrowException, OSError)
        path.open("rb").close()  # what the system says about a file that cannot be read is said as for any other
        self._stream = pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except self._errors as error:
            raise DamagedStreamError(str(error).split("\n", 1)[0]) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


UNPACKERS: dict[Packing, Callable[[Path], BinaryIO]] = {
    "": lambda path: path.open("rb"),
    "gzip": lambda path: cast(BinaryIO, gzip.open(path)),  # noqa: SIM115
    "bzip2": lambda path: cast(BinaryIO, bz2.open(path)),  # noqa: SIM115
    "xz": lambda path: cast(BinaryIO, lzma.open(path)),  # noqa: SIM115
    "zstd": lambda path: cast(BinaryIO, io.BufferedReader(_Zstd(path), 1 << 16)),
}


def decoded(source: Source, data: bytes) -> str:
    """All of a file, as text."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        where = f"{source.name}:{data.count(10, 0, error.start) + 1}"
        bad = not_utf8(source, where, data[data.rfind(10, 0, error.start) + 1 :].partition(b"\n")[0])
        raise DataError(what=bad.why, where=where, why=bad.excerpt, fix="fix or remove these characters") from error


def _wide_encoding(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):  # asked first: UTF-16's mark is how UTF-32's begins
        return "UTF-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    # Without a mark: the ASCII letters of keys and commas leave zeros in every second byte, or nearly.
    even, odd = head[::2].count(0), head[1::2].count(0)
    return None if 10 * max(even, odd) <= len(head) else "UTF-16BE" if even > odd else "UTF-16LE"


def _wrong_encoding(source: Source, where: str, guess: str) -> DataError:
    name = Path(source.name)
    stem, ending = name.name.split(".", 1)
    old, new = shlex.quote(source.name), shlex.quote(str(name.with_name(f"{stem}.utf8.{ending}")))
    convert = f"iconv -f {guess} -t UTF-8"
    pack = source.packing
    command = f"{pack} -dc {old} | {convert} | {pack} > {new}" if pack else f"{convert} {old} > {new}"
    return DataError(
        what=f"not UTF-8 text; it looks like {guess}", where=where, why="only UTF-8 is supported", fix=f"convert it: {command}"
    )


def not_utf8(source: Source, where: str, line: bytes) -> BadRow:
    """One damaged row of a UTF-8 file; raises when the file as a whole has another encoding."""
    with opened(source) as file:
        sample = [other for other in file.read(1 << 20).split(b"\n")[:-1] if not other.isascii()]
    sound = sum(decodes(other, "utf-8") for other in sample)
    if sound <= max(1, len(sample) - sound):
        raise _wrong_encoding(source, where, "WINDOWS-1252" if decodes(line, "cp1252") else "GB18030")
    text = line.decode("utf-8", "replace")
    return BadRow(
        where, "invalid UTF-8", excerpt(text, text.find("\N{REPLACEMENT CHARACTER}")), "write these characters as UTF-8"
    )


def decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True
