"""Rows of prompts, as people have them: what is asked, what is expected, and what rewards get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.prepare import example_of, prepare
from pronghorn.data.read.formats import Example
from pronghorn.data.read.prompt_rows import detect_prompts, to_prompt
from pronghorn.data.read.source_files import BadRow, RawRow
from pronghorn.errors import DataError
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows
from tables import table

ASK = {"role": "user", "content": "2 + 2?"}
HINT = {"role": "system", "content": "Be brief."}


def read(row: dict[str, Any]) -> Example:
    layout: Any = detect_prompts([RawRow(row, "rows:1")], "rows").partition(": ")[2]
    found = to_prompt(RawRow(row, "rows:1"), layout)
    assert isinstance(found, list), found
    (group,) = found
    assert isinstance(group, Group)
    return group.answers[0]


@table(
    ("row", "asked", "expected", "columns"),
    [
        ({"prompt": "2 + 2 =", "answer": "4"}, "2 + 2 =", "4", {"expected": "4", "answer": "4"}),
        ({"prompt": "2 + 2 =", "solution": 4, "level": 3}, "2 + 2 =", "4", {"expected": "4", "solution": 4, "level": 3}),
        ({"prompt": "Go on"}, "Go on", "", {}),
        ({"prompt": [ASK], "answer": "4"}, [ASK], "4", {"expected": "4", "answer": "4"}),
        ({"prompt": [HINT, ASK]}, [HINT, ASK], "", {}),
        ({"prompt": "2 + 2?", "system": "Be brief.", "answer": "4"}, [HINT, ASK], "4", {"expected": "4", "answer": "4"}),
        ({"question": "2 + 2?", "answer": "#### 4"}, [ASK], "#### 4", {"expected": "#### 4", "answer": "#### 4"}),
        ({"problem": "2 + 2?", "answer": "4"}, [ASK], "4", {"expected": "4", "answer": "4"}),
        ({"messages": [ASK, {"role": "assistant", "content": "4"}], "id": 7}, [ASK], "4", {"expected": "4", "id": 7}),
        ({"messages": [ASK], "answer": "4"}, [ASK], "4", {"expected": "4", "answer": "4"}),
        (
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
            [ASK],
            "4",
            {"expected": "4"},
        ),
        ({"instruction": "2 + 2?", "output": "4"}, [ASK], "4", {"expected": "4", "output": "4"}),
        ({"prompt": "2 + 2 =", "completion": "4"}, "2 + 2 =", "4", {"expected": "4"}),
    ],
)
def test_what_is_asked_and_what_is_expected(row: dict[str, Any], asked: Any, expected: str, columns: dict[str, Any]) -> None:
    example = read(row)
    assert example.asks
    assert example.columns == columns
    if isinstance(asked, str):
        assert (example.prompt, example.completion) == (asked, expected)
    else:
        *turns, last = example.messages
        assert (turns, last["content"], example.prompt_messages) == (asked, expected, len(asked))
    again = Example.from_json(example.to_json(), example.where)
    assert (again.asks, again.columns, again.prompt_messages) == (True, columns, example.prompt_messages)


def test_rows_that_ask_nothing_are_refused() -> None:
    with pytest.raises(DataError, match="no prompts; found `text`"):
        detect_prompts([RawRow({"text": "a"}, "rows:1")], "rows")
    for row in ({"prompt": ""}, {"messages": [{"role": "assistant", "content": "4"}]}, {"prompt": None}):
        layout: Any = detect_prompts([RawRow(row, "rows:1")], "rows").partition(": ")[2]
        assert isinstance(to_prompt(RawRow(row, "rows:1"), layout), BadRow), row


def test_a_prompt_is_tokenized_as_the_model_is_asked_and_long_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tokenizer()
    rows = [{"prompt": [ASK], "answer": "4"}, {"prompt": [{"role": "user", "content": "x" * 90}], "answer": "?"}]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    spec = Data(train=[path], max_length=96, long="drop")
    found = prepare([path], spec, tokenizer, wanted="prompts", answer=32)
    assert len(found.tokens) == 1
    assert "dropped 1 of 2 rows: longer than 64 tokens" in " ".join(found.remarks)
    text = tokenizer.decode(found.tokens.ids(0))
    assert text == "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert not found.tokens.loss(0).any()
    assert example_of(found.tokens, 0).columns == {"expected": "4", "answer": "4"}
    with pytest.raises(
        DataError, match=r"more than 64 tokens, which is data.max_length less rollouts.max_new_tokens: 32"
    ) as error:
        prepare([path], Data(train=[path], max_length=96), tokenizer, wanted="prompts", answer=32)
    assert "data.max_length: 141 or more" in error.value.fix


def test_any_columns_can_be_the_question_and_the_expected_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prompt` would be given as it is, `instruction` is a user's message. Rewards get the answer as `expected`."""
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    path = str(write_rows(tmp_path / "rows.jsonl", [{"q": "2 + 2?", "gold": "4", "answer": "a guess"}]))
    spec = Data(train=[path], fields={"instruction": "q", "expected": "gold"})
    (row,) = [example_of(prepare([path], spec, make_tokenizer(), wanted="prompts", answer=32).tokens, 0)]
    assert row.messages[0] == ASK
    assert row.columns == {"expected": "4", "answer": "a guess"}


def test_control_tokens_in_a_prompt_are_refused_unless_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": [{"role": "user", "content": "Ignore<|im_end|>that"}], "answer": "4"}]
    path = str(write_rows(tmp_path / "rows.jsonl", rows))
    with pytest.raises(DataError, match=r"control token <\|im_end\|>"):
        prepare([path], Data(train=[path]), make_tokenizer(), wanted="prompts", answer=32)
    kept = prepare([path], Data(train=[path], control_tokens="keep"), make_tokenizer(), wanted="prompts", answer=32)
    assert len(kept.tokens) == 1
