"""Preference data, told from data that can be learned as it stands.

A supervised loss learns every answer it is given. Of a pair it would learn the worse answer too, or whichever column was taken;
of answers marked good or bad, the bad ones. So such rows are refused, with how to take the good answers out of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from pronghorn.data.read.source_files import RawRow
from pronghorn.data.template.chat_messages import from_json
from pronghorn.errors import DataError

_KIND = "answer|response|completion|output|messages?|text"
REJECTED = re.compile(rf"(?:(?:{_KIND})_)?rejected(?:_(?:{_KIND}))?")
OPENAI = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
MARKS = ("label", "kto_tag")  # of KTO: whether the answer is a good one
TRUTHS = {True: True, False: False, "1": True, "0": False}  # 0 and 1 equal False and True
TRUTHS |= {word: word.lower() == "true" for word in ("true", "false", "True", "False", "TRUE", "FALSE")}
WHY = "a supervised loss trains on every answer, including the bad ones; objective: dpo or kto learns which are better"


def preference(fields: dict[str, Any], *, chat: bool) -> tuple[str, str] | None:
    """(what the row is, how to train on its good answers), or None. `chat`: it has an answer, and is not plain text."""
    columns = answer_columns(fields)
    if columns:
        told = f"preference data: `{columns[0]}` is the better of two answers, `{columns[1]}` the worse one; a supervised loss"
        return f"{told} cannot use this", f"set objective: dpo; {_take(fields, columns[0])}"
    mark = mark_column(fields) if chat else None
    if mark:
        told = f"preference data: `{mark}` marks good answers, and a supervised loss would also train on the bad ones"
        return (
            told,
            f"write the good rows to a separate file: jq -c 'select(.{mark}) | del(.{mark})' ROWS.jsonl > "
            f"good.jsonl; if `{mark}` means something else, rename the column",
        )
    return None


def answer_columns(fields: dict[str, Any], *, empty: bool = False) -> tuple[str, str] | None:
    """The columns of the better and of the worse answer, if the row has both. `empty`: also answers that say nothing."""
    if OPENAI.keys() <= fields.keys():
        return "preferred_output", "non_preferred_output"
    for column, worse in fields.items():
        if "rejected" in column.lower() and REJECTED.fullmatch(column.lower()) and _holds_answer(worse, empty):
            chosen = next((other for other in fields if other.lower() == column.lower().replace("rejected", "chosen")), None)
            if chosen and _holds_answer(fields[chosen], empty):
                return chosen, column
    return None


def mark_column(fields: dict[str, Any]) -> str | None:
    """The column that says whether the row's answer is a good one."""
    given = ((column, fields.get(column)) for column in MARKS)
    return next((column for column, mark in given if isinstance(mark, str | int | float) and mark in TRUTHS), None)


def refuse_ratings(rows: Sequence[RawRow], where: str, *, marked: bool = False) -> None:
    """Refuses a column by the name of a mark that holds other numbers than 0 and 1. `marked`: the objective learns from marks;
    else only where some of the numbers would be read as marks."""
    found = {column: {_number(row.fields.get(column)) for row in rows} - {None} for column in MARKS}
    column = next((column for column, given in found.items() if given - {0, 1}), None)
    if column is None or not (marked or {0, 1} & found[column]):
        return
    numbers = sorted(number for number in found[column] if number is not None)
    some = ", ".join(f"{number:g}" for number in numbers[:8]) + ", ..." * (len(numbers) > 8)
    good = f"(.{column} | tonumber) > {(numbers[0] + numbers[-1]) / 2:g}"
    fix = f"for example, jq -c '.{column} = ({good})' ROWS.jsonl > marked.jsonl"
    if not marked:
        fix = (
            f"remove the column to train on every row: jq -c 'del(.{column})' ROWS.jsonl > all.jsonl; to train on the better "
            f"ones: jq -c 'select({good}) | del(.{column})' ROWS.jsonl > good.jsonl"
        )
    raise DataError(
        f"`{column}` is a rating or a class, with the values {some}; good and bad answers are marked true and false",
        where=where,
        why="where a rating turns good, only you can say",
        fix=fix,
    )


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _holds_answer(value: object, empty: bool) -> bool:
    return isinstance(value, str | list | dict) and (bool(value) or empty)


def _take(fields: dict[str, Any], chosen: str) -> str:
    """The line of a recipe that trains on the better answers, where there is one."""
    answer = fields[chosen]
    answer = (from_json(answer) or answer) if isinstance(answer, str) and answer.lstrip().startswith("[") else answer
    target = ""
    if isinstance(answer, list):
        target = "messages" if len(answer) > 1 else "completion" if "prompt" in fields else ""
    elif isinstance(answer, str):
        target = "output" if "instruction" in fields else "completion" if "prompt" in fields else ""
        if not target and "\n\nHuman:" not in answer:
            question = next((column for column in ("question", "query", "input") if column in fields), None)
            if question:
                return f"to train on the better answers only, set data.fields: {{prompt: {question}, completion: {chosen}}}"
    if target:
        return f"to train on the better answers only, set data.fields: {{{target}: {chosen}}}"
    return f"to train on the better answers only, write each conversation with its `{chosen}` answer at the end, as messages"
