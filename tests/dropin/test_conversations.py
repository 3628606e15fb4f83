"""Data sets as scripts prepare them."""

from __future__ import annotations

from typing import Any

import datasets
import pytest

from pronghorn.chat_templates import apply_chat_template, standardize_data_formats, standardize_sharegpt, to_sharegpt
from pronghorn.errors import DataError
from samples import make_tokenizer
from tables import table

SPOKEN = [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
SHAREGPT = [{"conversations": SPOKEN, "score": 1}]
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
ALPACA = [{"instruction": f"do {i}", "input": "" if i % 2 else f"with {i}", "output": f"done {i}"} for i in range(6)]


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    datasets.disable_progress_bars()


def data(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("function", [standardize_sharegpt, standardize_data_formats])
def test_other_names_become_role_and_content(function: Any) -> None:
    found = function(data(SHAREGPT))
    assert found[0] == {"conversations": MESSAGES, "score": 1}
    assert function(found)[0] == found[0]
    thinking = [{"role": "Human", "content": "q", "thinking": None}, {"role": "gpt", "content": "a", "thinking": "t"}]
    assert function(data([{"messages": thinking}]))[0]["messages"] == [
        {"role": "user", "content": "q", "thinking": None},
        {"role": "assistant", "content": "a", "thinking": "t"},
    ]
    splits = function(datasets.DatasetDict({"train": data(SHAREGPT), "test": data(SHAREGPT)}))
    assert splits["test"][0]["conversations"] == MESSAGES


def test_data_without_conversations_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = data([{"text": "x"}])
    assert standardize_sharegpt(rows) is rows
    assert "no conversation column among text" in capsys.readouterr().err
    with pytest.raises(DataError, match="messages have the keys who, what"):
        standardize_sharegpt(data([{"messages": [{"who": "me", "what": "hi"}]}]))
    with pytest.raises(DataError, match="expected a dataset, got list"):
        standardize_sharegpt(SHAREGPT)


def test_columns_are_merged_into_conversations() -> None:
    found = to_sharegpt(data(ALPACA), merged_prompt="{instruction}[[\nInput: {input}]]", output_column_name="output")
    assert found.column_names == ["conversations"]
    assert found[0]["conversations"] == [{"from": "human", "value": "do 0\nInput: with 0"}, {"from": "gpt", "value": "done 0"}]
    assert found[1]["conversations"][0]["value"] == "do 1"
    longer = to_sharegpt(data(ALPACA), merged_prompt="{instruction}", conversation_extension=3)
    assert len(longer) == 6
    chats = [[message["value"] for message in row["conversations"]] for row in longer]
    assert all(len(chat) == 6 and chat[0] == f"do {i}" for i, chat in enumerate(chats))
    assert all(chat[j].replace("do", "done") == chat[j + 1] for chat in chats for j in (0, 2, 4))
    assert len({chat[2] for chat in chats}) == 6, "every row is used"
    assert any(chat[0] != chat[2] != chat[4] for chat in chats)
    assert to_sharegpt(data(ALPACA), merged_prompt="{instruction}", conversation_extension=3)[2] == longer[2]
    assert to_sharegpt(data(ALPACA), remove_unused_columns=False)[0]["conversations"][0]["value"] == "do 0"
    assert to_sharegpt(data(SHAREGPT))[0] == SHAREGPT[0]


@table(("options", "words"), [
    ({"merged_prompt": "{instructon}"}, "did you mean `instruction`"), ({"output_column_name": "answer"}, "no column `answer`"),
    ({"conversation_extension": 0}, "conversation_extension=0"),
])  # fmt: skip
def test_columns_that_are_not_there(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        to_sharegpt(data(ALPACA), **options)
    assert words in str(caught.value)


def test_an_empty_column_outside_brackets_is_an_error() -> None:
    rows = data([{"age": 3.0, "output": "a"}, {"age": None, "output": "b"}])
    with pytest.raises(DataError, match="row 1: column `age` is empty"):
        to_sharegpt(rows, merged_prompt="Age {age}")
    assert to_sharegpt(rows, merged_prompt="Hi[[ of {age}]]")[1]["conversations"][0]["value"] == "Hi"


def test_a_format_of_ones_own_writes_texts_and_prompts() -> None:
    tokenizer = make_tokenizer(chat_template=None)
    rows = standardize_sharegpt(to_sharegpt(data(ALPACA), merged_prompt="{instruction}", conversation_extension=2))
    written = "Tasks.\n\n### Task:\n{INPUT}\n\n### Answer:\n{OUTPUT}"
    found = apply_chat_template(rows, tokenizer=tokenizer, chat_template=written)
    other = rows[0]["conversations"][2]["content"]
    assert found[0]["text"] == (
        f"Tasks.\n\n### Task:\ndo 0\n\n### Answer:\ndone 0<|im_end|>\n\n### Task:\n{other}\n\n"
        f"### Answer:\n{other.replace('do', 'done')}<|im_end|>"
    )
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    assert asked == "Tasks.\n\n### Task:\nx\n\n### Answer:\n"
    named = apply_chat_template(data(SHAREGPT), make_tokenizer(chat_template=None), chat_template="chatml")
    own = apply_chat_template(data(SHAREGPT), make_tokenizer())
    assert (
        named[0]["text"]
        == own[0]["text"]
        == ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n")
    )
    with pytest.raises(DataError, match="no conversation column"):
        apply_chat_template(data(ALPACA), make_tokenizer())
