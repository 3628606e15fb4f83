"""JSON and JSON Lines into rows, under stricter rules than Python's: no key twice, no NaN, no half of a character.

A JSON file is a list of objects, an object that holds one list, or one object a line after all. A conversation that is a bare
list of messages is a row with one column, `messages`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

from pronghorn.data.read.source_files import BadRow, RawRow, Source, UnfitError, decoded, decodes, excerpt, not_utf8, opened
from pronghorn.errors import DataError


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise UnfitError(f"the key `{excerpt(key)}` appears twice in one object", "keep one of the two")
    return fields


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # NaN, Infinity, 1e999
        missing = "write null, as pandas' to_json does for a missing value, or leave the key out"
        raise UnfitError(
            f"{excerpt(text)} is not a finite number", missing if text == "NaN" else "write a finite number, or null"
        )
    return number


STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_number)
LENIENT = json.JSONDecoder(parse_int=str, parse_float=str)  # finds the end of an object that STRICT refuses
SPACE = re.compile(r"[ \t\n\r]*")
ONE_ROW = {"messages", "conversations", "conversation", "text"}  # an object with such a key is a row, not a list of rows
HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # escapes that may be a surrogate on its own


def encodes(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_jsonl(source: Source) -> Iterator[RawRow | BadRow]:
    with opened(source) as file:
        first = True
        for number, line in enumerate(file, start=1):
            stripped = line.strip()
            if not stripped:
                continue
            where = f"{source.name}:{number}"
            if first and (stripped in (b"[", b"{") or (stripped.startswith(b"[{") and not _is_conversation(stripped))):
                raise DataError(what="JSON, but not one object per line", where=where, fix="rename the file to .json")
            first = False
            yield _json_row(where, stripped.decode()) if decodes(stripped, "utf-8") else not_utf8(source, where, stripped)


def _not_json(error: json.JSONDecodeError) -> str:
    return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"  # "Unterminated string starting at"


def _is_conversation(line: bytes) -> bool:
    try:
        return speaks(STRICT.decode(line.decode()))
    except (ValueError, RecursionError):
        return False


def speaks(value: object) -> bool:
    """Whether it is a list of messages without a column around it."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)
    )


def _json_row(where: str, text: str) -> RawRow | BadRow:
    try:
        fields = STRICT.decode(text)
    except json.JSONDecodeError as error:
        return BadRow(where, _not_json(error), excerpt(text, error.pos), "write the row again as one JSON object")
    except UnfitError as error:
        return BadRow(where, str(error), excerpt(text), error.fix)
    except (RecursionError, ValueError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else "an integer with more than 4,300 digits"
        return BadRow(where, why, excerpt(text), "write a simpler row")
    if speaks(fields):
        fields = {"messages": fields}
    if not isinstance(fields, dict):
        return BadRow(where, "not an object with columns", excerpt(text), 'write an object, such as {"text": "..."}')
    half = HALF_OF_A_PAIR.search(text)
    if half and not encodes(fields):
        return BadRow(
            where,
            "half of a surrogate pair, which is not a character",
            excerpt(text, half.start()),
            "write both halves (\\ud83d\\ude00), or remove it",
        )
    return RawRow(fields, where)


def read_json(source: Source) -> Iterator[RawRow | BadRow]:
    """A list of objects, an object that holds one list, or, as hub files often have it, one object a line after all."""
    with opened(source) as file:
        data = file.read()
    text = decoded(source, data)
    del data
    start = _after_space(text, 0)
    try:
        if start == len(text):
            return
        if text.startswith("[", start):
            end = _after_space(text, (yield from _list_rows(source, text, start)))
            if end < len(text):
                raise json.JSONDecodeError("content after the end of the list", text, end)
            return
        value, end = LENIENT.raw_decode(text, start)
        if _after_space(text, end) < len(text) and "\n" not in text[start:end]:
            yield from read_jsonl(source)
            return
        if not isinstance(value, dict) or _after_space(text, end) < len(text):
            raise source.error(
                "neither a list of objects nor an object that contains one",
                fix='write [{...}, {...}], {"data": [{...}]} or one object per line',
            )
        if value.keys() & ONE_ROW:
            yield _json_row(f"{source.name}:{text.count(chr(10), 0, start) + 1}", text[start:end])
            return
        lists = _lists_inside(text, start)
        columns = [set(column) if isinstance(column, dict) else None for column in value.values()]
        if columns and columns[0] and all(rows == columns[0] for rows in columns):
            raise source.error(
                "the file has an object for each column, as pandas' to_json writes by default",
                fix='write an object for each row: to_json(PATH, orient="records", lines=True), with PATH ending in .jsonl',
            )
        if len(lists) != 1:
            found = ", ".join(f"`{key}`" for key in lists) or "none"
            raise source.error(
                "the object must contain exactly one list of rows",
                why=f"lists found: {found}",
                fix="keep one list in the file, or write one file per list",
            )
        yield from _list_rows(source, text, next(iter(lists.values())))
    except json.JSONDecodeError as error:
        near = excerpt(text, error.pos)
        raise source.error(
            _not_json(error), why=f"near: {near}", fix="fix it; the rest of the file cannot be read", at=f":{error.lineno}"
        ) from error
    except RecursionError as error:
        raise source.error("the JSON is nested too deeply", fix="write simpler rows") from error


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
