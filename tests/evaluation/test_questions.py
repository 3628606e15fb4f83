"""Held-out rows as questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.prepare import prepare
from pronghorn.errors import DataError
from pronghorn.evaluation.questions import held_out_questions
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows

TOOLS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}[{{ call['function']['name'] }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def said(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def row(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))

    def make(rows: list[dict[str, Any]], tokenizer: Any = None) -> TokenTable:
        path = write_rows(tmp_path / "rows.jsonl", rows)
        return prepare((str(path),), Data(train=(str(path),)), tokenizer or make_tokenizer()).tokens

    return make


def test_the_question_is_all_before_the_last_answer(table: Any, tmp_path: Path) -> None:
    messages = [said("user", "one"), said("assistant", "two"), said("user", "three"), said("assistant", "four")]
    tokenizer = make_tokenizer()
    (one,) = held_out_questions(table([row(*messages)]), tokenizer, 5)
    assert tokenizer.decode(one.ids) == tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert (one.prompt, one.expected, one.answer_tokens) == ("three", "four", 5)
    assert one.where == f"{tmp_path / 'rows.jsonl'}:1"


def test_a_system_message_takes_the_place_of_the_rows_own(table: Any) -> None:
    rows = [
        row(said("system", "old"), said("user", "a"), said("assistant", "b")),
        row(said("user", "c"), said("assistant", "d")),
    ]
    tokenizer = make_tokenizer()
    for question, asked in zip(held_out_questions(table(rows), tokenizer, 2, system="new"), "ac", strict=True):
        text = tokenizer.apply_chat_template(
            [said("system", "new"), said("user", asked)], tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.decode(question.ids) == text


def test_prompts_are_asked_as_they_are_and_have_no_system_message(table: Any) -> None:
    rows = table([{"prompt": "2+2=", "completion": "4"}])
    tokenizer = make_tokenizer()
    (one,) = held_out_questions(rows, tokenizer, 1)
    assert (tokenizer.decode(one.ids), one.expected) == ("2+2=", "4")
    with pytest.raises(DataError, match=r"eval\.system"):
        held_out_questions(rows, tokenizer, 1, system="new")


def test_plain_text_asks_nothing(table: Any) -> None:
    assert held_out_questions(table([{"text": "plain"}]), make_tokenizer(), 2) == []


def test_fewer_than_all_are_drawn_from_everywhere_and_always_the_same(table: Any) -> None:
    rows = table([row(said("user", f"question {i}"), said("assistant", str(i))) for i in range(60)])
    tokenizer = make_tokenizer()
    asked = [int(one.expected) for one in held_out_questions(rows, tokenizer, 12)]
    assert asked == sorted(asked) == [int(one.expected) for one in held_out_questions(rows, tokenizer, 12)]
    assert len(asked) == len(set(asked)) == 12
    assert max(asked) > 40
    assert min(asked) < 20
    assert [int(one.expected) for one in held_out_questions(rows, tokenizer, 100)] == list(range(60))


def test_a_call_of_a_tool_is_expected_as_the_template_writes_it(table: Any) -> None:
    call = {"type": "function", "function": {"name": "wake_up", "arguments": {}}}
    tokenizer = make_tokenizer(TOOLS)
    rows = [row(said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", None, tool_calls=[call]))]
    (one,) = held_out_questions(table(rows, tokenizer), tokenizer, 1)
    assert one.expected == "[wake_up]"
