"""Raw rows into examples: which of the known formats a file has, and what each row of it says.

The format is found once a file, from its columns, so that a misspelt column is one error and not one for every row.
A row that does not fit its file's format comes back as a BadRow.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pronghorn.data.source_files import BadRow, excerpt
from pronghorn.data.sources import STRICT, RawRow
from pronghorn.errors import DataError

Format = Literal["messages", "completion", "text", "alpaca", "sharegpt"]  # the names of recipe.Data.format

CHAT_COLUMNS = ("messages", "conversations", "conversation")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
SPEAKERS = {  # ShareGPT's `from`, as exports and the tools that read them write it
    "human": "user", "user": "user",
    "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant", "model": "assistant", "bing": "assistant",
    "bard": "assistant", "claude": "assistant", "function_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
}
TRAIN_KEYS = ("train", "training")  # Axolotl's documentation writes the one, its default is the other
PARTS_KEY = "train_detail"  # there, offsets within a turn
KNOWN: dict[Format, str] = {
    "messages": "messages: [{role, content}, ...]",
    "sharegpt": "conversations: [{from, value}, ...]",
    "completion": "prompt, completion",
    "alpaca": "instruction, output (and input, system)",
    "text": "text",
}
COLUMNS = (*CHAT_COLUMNS, "prompt", "completion", "instruction", "output", "text")
OTHER_WORDS = {  # columns that mean one of ours; suggested, never assumed
    "question": "prompt", "query": "prompt", "response": "completion", "answer": "completion", "target": "completion",
    "chosen": "completion", "dialogue": "messages", "dialog": "messages", "chat": "messages", "content": "text",
}


@dataclass(frozen=True, slots=True)
class Example:
    """What one row teaches, whatever format it came in."""

    kind: Literal["chat", "completion", "text"]
    where: str
    messages: tuple[dict[str, Any], ...] = ()  # chat: role and content (None beside tool_calls), and what else was there
    tools: tuple[dict[str, Any], ...] | None = None
    prompt: str = ""
    completion: str = ""
    text: str = ""
    prompt_messages: int = 0  # chat: the first so many messages are a given prompt and never carry loss


def only_read(message: dict[str, Any]) -> bool:
    """Whether the message itself says that it is not trained on."""
    return message.get("weight") == 0 or any(message.get(key) is False for key in TRAIN_KEYS)


def asks_to_train(message: dict[str, Any]) -> bool:
    """By `train: true`; a `weight` of 1 is what every message has."""
    return any(message.get(key) is True for key in TRAIN_KEYS)


class _UnfitError(Exception):
    """Why a row does not fit; becomes a BadRow."""


def detect_format(rows: Sequence[RawRow], where: str, asked: Literal["auto"] | Format = "auto") -> Format:
    """The format most of these first rows of a source fit; `asked` is the recipe's own choice."""
    if asked != "auto":
        if any(_has_columns(row.fields, asked) for row in rows):
            return asked
    else:
        votes = Counter(found for row in rows if (found := _row_format(row.fields)))
        if votes:
            return max(KNOWN, key=lambda name: votes[name])  # the first of KNOWN where two have as many
    if not rows:
        raise DataError(what="no row could be read, so there is no format to find out", where=where, fix="repair the rows")
    columns = list(dict.fromkeys(column for row in rows for column in row.fields))
    formats = KNOWN if asked == "auto" else {asked: KNOWN[asked]}
    unmet = "fit no known format" if asked == "auto" else f"do not fit the format `{asked}`"
    raise DataError(
        what=f"the columns {unmet}; found " + ", ".join(f"`{column}`" for column in columns),
        where=where,
        why="; ".join(f"{name} needs {needs}" for name, needs in formats.items()),
        fix=_better_names(columns) or ("set data.format: auto, or " * (asked != "auto") + "rename the columns"),
    )


def to_example(row: RawRow, row_format: Format) -> Example | BadRow:
    """The example a row holds, or why it holds none."""
    try:
        return BUILDERS[row_format](row)
    except _UnfitError as error:
        return BadRow(row.where, str(error), excerpt(json.dumps(row.fields, ensure_ascii=False, default=str)))


def _row_format(fields: dict[str, Any]) -> Format | None:
    """The first format of KNOWN that the row's columns allow: a `text` beside Alpaca's columns repeats them, rendered."""
    return next((name for name in KNOWN if _has_columns(fields, name)), None)


def _has_columns(fields: dict[str, Any], wanted: Format) -> bool:
    if wanted == "completion":
        return "prompt" in fields and "completion" in fields
    if wanted == "alpaca":
        return "instruction" in fields and "output" in fields
    if wanted == "text":
        return "text" in fields
    column = _chat_column(fields)
    if column is None:
        return False
    turns = _json(fields[column]) if isinstance(fields[column], str) else fields[column]
    first = turns[0] if isinstance(turns, list) and turns else None
    speaks_sharegpt = isinstance(first, dict) and "from" in first and "role" not in first
    return speaks_sharegpt == (wanted == "sharegpt")


def _chat_column(fields: dict[str, Any]) -> str | None:
    return next((column for column in CHAT_COLUMNS if column in fields), None)


def _better_names(columns: Sequence[str]) -> str:
    missing = [column for column in COLUMNS if column not in columns]
    hints = []
    for column in columns:
        close = difflib.get_close_matches(column.lower(), missing, n=1, cutoff=0.7)
        meant = OTHER_WORDS.get(column.lower(), close[0] if close else "")
        if meant in missing and column not in COLUMNS:
            hints.append(f"`{meant}` instead of `{column}`")
    return f"did you mean {', '.join(hints)}?" if hints else ""


def _from_messages(row: RawRow) -> Example:
    column = _chat_column(row.fields)
    if column is None:
        raise _UnfitError("no column `messages`")
    messages = _messages(row.fields[column], column)
    return _chat(row, messages)


def _from_sharegpt(row: RawRow) -> Example:
    column = _chat_column(row.fields)
    if column is None:
        raise _UnfitError("no column `conversations`")
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(_objects(row.fields[column], column), start=1):
        speaker, value = turn.get("from"), turn.get("value")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise _UnfitError(f"turn {number} is from `{speaker}`{_did_you_mean(speaker, SPEAKERS)}")
        if not isinstance(value, str):
            raise _UnfitError(f"turn {number} has no text in `value`")
        marks = _marks(turn, f"turn {number}")
        if speaker == "function_call":
            call = {"type": "function", "function": _function_call(value, number)}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call], **marks})
        else:
            messages.append({"role": SPEAKERS[speaker], "content": value, **marks})
    return _chat(row, _system(row) + messages)


def _function_call(value: str, number: int) -> dict[str, Any]:
    call = _json(value)
    if not isinstance(call, dict) or "name" not in call:
        raise _UnfitError(f"turn {number} is a function call, but not JSON with `name` and `arguments`")
    return call


def _from_alpaca(row: RawRow) -> Example:
    instruction, answer = _text(row, "instruction"), _text(row, "output")
    given = _text(row, "input", optional=True)
    question = f"{instruction}\n\n{given}" if given else instruction
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _chat(row, _system(row) + turns)


def _from_completion(row: RawRow) -> Example:
    if not _has_columns(row.fields, "completion"):
        raise _UnfitError("no column `prompt` or no column `completion`")
    if isinstance(row.fields["prompt"], str) or isinstance(row.fields["completion"], str):
        return Example("completion", row.where, prompt=_text(row, "prompt"), completion=_text(row, "completion"))
    prompt, completion = (_messages(row.fields[column], column) for column in ("prompt", "completion"))
    if not any(message["role"] == "assistant" for message in completion):
        raise _UnfitError("no assistant turn in the completion: nothing to learn from")
    return _chat(row, prompt + completion, prompt_messages=len(prompt))


def _from_text(row: RawRow) -> Example:
    return Example("text", row.where, text=_text(row, "text"))


def _chat(row: RawRow, messages: list[dict[str, Any]], prompt_messages: int = 0) -> Example:
    if not any(message["role"] == "assistant" for message in messages):
        raise _UnfitError("no assistant turn: nothing to learn from")
    tools = _tools(row.fields.get("tools"))
    return Example("chat", row.where, messages=tuple(messages), tools=tools, prompt_messages=prompt_messages)


def _messages(value: Any, column: str) -> list[dict[str, Any]]:
    return [_message(message, number) for number, message in enumerate(_objects(value, column), start=1)]


def _message(message: dict[str, Any], number: int) -> dict[str, Any]:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role is None:
        raise _UnfitError(f"message {number} has no `role`; its keys are {', '.join(message)}")
    if role not in ROLES:
        raise _UnfitError(f"message {number} has the role `{role}`{_did_you_mean(role, ROLES)}")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise _UnfitError(f"message {number}: `tool_calls` is not a list of objects")
    _marks(message, f"message {number}")
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str) and not (content is None and calls):
        what = "no `content`" if content is None else "a `content` that is not text"
        raise _UnfitError(f"message {number} ({role}) has {what}")
    # Templates ask `'tool_calls' in message`, so a null that only fills a column must not stand there.
    return {key: item for key, item in message.items() if item is not None} | {"content": content}


def _marks(message: dict[str, Any], name: str) -> dict[str, Any]:
    """What the turn itself says about being trained on: `weight` 0 or 1, as in OpenAI's and Mistral's formats, or `train` or
    `training` false or true, as in Axolotl's."""
    marks = {key: message[key] for key in ("weight", *TRAIN_KEYS) if message.get(key) is not None}
    if marks.get("weight", 1) not in (0, 1):
        raise _UnfitError(f"{name} has the weight {marks['weight']!r}; a turn is trained on (1) or not (0)")
    for key in TRAIN_KEYS:
        if not isinstance(marks.get(key, True), bool):
            raise _UnfitError(f"{name} has `{key}` {marks[key]!r}; a turn is trained on (true) or not (false)")
    if message.get(PARTS_KEY) is not None:
        raise _UnfitError(f"{name} has `{PARTS_KEY}`; parts of a turn cannot be marked here, only a whole one: `train`")
    if len({bool(mark) for mark in marks.values()}) > 1:
        raise _UnfitError(f"{name} contradicts itself: " + ", ".join(f"`{key}` {mark!r}" for key, mark in marks.items()))
    return marks


def _part(part: Any, number: int) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise _UnfitError(f"message {number} has a part of type `{kind}`; only text can be trained on")
    return text


def _objects(value: Any, column: str) -> list[dict[str, Any]]:
    """A list of objects, which CSV can only hold as JSON text."""
    items = _json(value) if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _UnfitError(f"`{column}` is not a list of objects")
    if not items:
        raise _UnfitError(f"`{column}` is empty")
    return items


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    return tuple(_objects(value, "tools")) if value and value != "[]" else None


def _system(row: RawRow) -> list[dict[str, Any]]:
    system = _text(row, "system", optional=True)
    return [{"role": "system", "content": system}] if system else []


def _text(row: RawRow, column: str, *, optional: bool = False) -> str:
    value = row.fields.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise _UnfitError(f"`{column}` is not text" if column in row.fields else f"no column `{column}`")
    return value


def _json(text: str) -> Any:
    """What a text holds as JSON, under the rules of a JSON file; None where it is none."""
    try:
        value = STRICT.decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _did_you_mean(word: Any, known: Sequence[str] | dict[str, str]) -> str:
    meant = SPEAKERS.get(word.lower()) if isinstance(word, str) else None
    close = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.7)
    meant = meant if meant in known else close[0] if close else None
    return f"; did you mean `{meant}`?" if meant else f"; known are {', '.join(known)}"


BUILDERS: dict[Format, Callable[[RawRow], Example]] = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "completion": _from_completion,
    "alpaca": _from_alpaca,
    "text": _from_text,
}
