"""Preference data, told from data that can be learned as it stands.

A supervised loss learns every answer it is given. Of a pair it would learn the worse answer too, or whichever column was taken;
of answers marked good or bad, the bad ones. So such rows are refused, with how to take the good answers out of them.
"""

from __future__ import annotations

import re
from typing import Any

from pronghorn.data.chat_messages import from_json
from pronghorn.errors import DataError

_KIND = "answer|response|completion|output|messages?|text"
REJECTED = re.compile(rf"(?:(?:{_KIND})_)?rejected(?:_(?:{_KIND}))?")
MARKS = ("label", "kto_tag")  # of KTO: whether the answer is a good one
TRUTHS = (True, False, "true", "false", "True", "False", "TRUE", "FALSE", "0", "1")  # 0 and 1 equal False and True
WHY = "a supervised loss trains on every answer, including the bad ones; preference training (DPO, KTO) uses other losses"


def preference(fields: dict[str, Any], *, chat: bool) -> tuple[str, str] | None:
    """(what the row is, how to train on its good answers), or None. `chat`: it has an answer, and is not plain text."""
    for column, worse in fields.items():
        if "rejected" in column.lower() and REJECTED.fullmatch(column.lower()) and _holds_answer(worse):
            chosen = next((other for other in fields if other.lower() == column.lower().replace("rejected", "chosen")), None)
            if chosen and _holds_answer(fields[chosen]):
                told = f"preference data: `{chosen}` is the better of two answers, `{column}` the worse one; a supervised loss"
                return f"{told} cannot use this", _take(fields, chosen)
    mark = next((column for column in MARKS if chat and _is_truth(fields.get(column))), None)
    if mark:
        told = f"preference data: `{mark}` marks good answers, and a supervised loss would also train on the bad ones"
        return (
            told,
            f"write the good rows to a separate file: jq -c 'select(.{mark}) | del(.{mark})' ROWS.jsonl > "
            f"good.jsonl; if `{mark}` means something else, rename the column",
        )
    return None


def refused(told: tuple[str, str], where: str) -> DataError:
    return DataError(told[0], where=where, why=WHY, fix=told[1])


def _holds_answer(value: Any) -> bool:
    return isinstance(value, str | list | dict) and bool(value)


def _is_truth(value: Any) -> bool:
    return isinstance(value, str | bool | int) and value in TRUTHS


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
