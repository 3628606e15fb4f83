"""Finding out a file's format, and what each format's rows become."""

from __future__ import annotations

from typing import Any

import pytest

from pronghorn.data.read.formats import Format, detect_format, to_example
from pronghorn.data.read.source_files import BadRow
from pronghorn.data.read.sources import RawRow
from pronghorn.errors import DataError
from tables import table

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CHAT = (USER, ASSISTANT)


def row(**fields: Any) -> RawRow:
    return RawRow(fields, "x.jsonl:7")


def why_not(row_format: Format, **fields: Any) -> str:
    made = to_example(row(**fields), row_format)
    assert isinstance(made, BadRow), made
    assert made.where == "x.jsonl:7"
    assert 0 < len(made.excerpt) <= 80
    return made.why


SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@table(
    ("messages", "why"),
    [
        ([], "`messages` is empty"),
        (None, "`messages` is not a list of objects"),
        ("hello", "`messages` is not a list of objects"),
        ("[NaN]", "`messages` is not a list of objects"),
        (r'[{"role": "assistant", "content": "\ud800"}]', "`messages` is not a list of objects"),
        ([USER, {"role": "asistant", "content": "a"}], "message 2 has the role `asistant`; did you mean `assistant`?"),
        ([{"role": ["user"], "content": "q"}], "message 1 has the role `['user']`"),
        ([{"rol": "user", "content": "q"}], "message 1 has no `role`; its keys are rol, content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "message 2 (assistant) has no `content`"),
        ([USER, {"role": "assistant", "tool_calls": "f()"}], "message 2: `tool_calls` is not a list of objects"),
    ],
)
def test_messages_that_do_not_fit(messages: Any, why: str) -> None:
    assert why_not("messages", messages=messages).startswith(why)


def refused(columns: dict[str, Any], asked: Any = "auto") -> DataError:
    with pytest.raises(DataError) as caught:
        detect_format([row(**columns)] * 5, "data/x.jsonl", asked)
    assert caught.value.where == "data/x.jsonl"
    assert all(f"`{column}`" in caught.value.what for column in columns)
    return caught.value


@table(
    ("columns", "hint"),
    [
        ({"mesages": [USER]}, "did you mean `messages` instead of `mesages`? Then set data.fields: {messages: mesages}"),
        ({"promt": "q", "completion": "a"}, "did you mean `prompt` instead of `promt`? Then set data.fields: {prompt: promt}"),
        (
            {"question": "q", "answer": "a"},
            "did you mean `prompt` instead of `question`, `completion` instead of `answer`?"
            " Then set data.fields: {prompt: question, completion: answer}",
        ),
        ({"a": 1, "b": 2}, "name the columns: data.fields: {prompt: COLUMN, completion: COLUMN}, or rename them"),
    ],
)
def test_unknown_columns_are_one_error_with_a_suggestion(columns: dict[str, Any], hint: str) -> None:
    error = refused(columns)
    assert error.fix == hint
    assert all(name in error.why for name in ("messages", "sharegpt", "completion", "alpaca", "text"))


def test_a_forced_format_must_fit() -> None:
    assert detect_format([row(messages=[USER, ASSISTANT], text="t")], "x", "text") == "text"
    error = refused({"text": "t"}, "messages")
    assert "the columns do not match the format `messages`" in error.what
    assert "data.format: auto" in error.fix
    assert "instead of `promt`" in refused({"promt": "q", "completion": "a"}, "completion").fix


def test_most_rows_decide_and_the_others_are_bad() -> None:
    rows = [row(mesages=[]), *[row(text="t")] * 2, *[row(messages=[USER, ASSISTANT])] * 3]
    assert detect_format(rows, "x") == "messages"
    assert [isinstance(to_example(each, "messages"), BadRow) for each in rows] == [True] * 3 + [False] * 3


def test_no_rows_have_no_format() -> None:
    with pytest.raises(DataError, match="no row can be read"):
        detect_format([], "x.jsonl")
