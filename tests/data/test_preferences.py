"""Pairs of answers and answers that are marked: told from other data, with what trains on the good ones."""

from __future__ import annotations

from typing import Any

import pytest

from pronghorn.data.preference.preferences import preference, refuse_ratings
from pronghorn.data.read.formats import detect_format
from pronghorn.data.read.source_files import RawRow
from pronghorn.errors import DataError
from tables import table

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@table(
    ("fields", "fix"),
    [
        ({"prompt": "q", "chosen": CHAT, "rejected": CHAT, "score_chosen": 1.0}, "data.fields: {messages: chosen}"),
        ({"question": "q", "chosen": "a", "rejected": "b"}, "data.fields: {prompt: question, completion: chosen}"),
        ({"Prompt": "q", "Chosen_Response": "a", "Rejected_Response": "b"}, "with its `Chosen_Response` answer at the end"),
        ({"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b"}, "`chosen` answer at the end"),
        ({"prompt": "q", "completion": "a", "label": "False"}, "select(.label)"),
    ],
)
def test_preference_data_is_known(fields: dict[str, Any], fix: str) -> None:
    told = preference(fields, chat=True)
    assert told is not None
    assert told[0].startswith("preference data: ")
    assert fix in told[1]
    with pytest.raises(DataError) as caught:
        detect_format([RawRow(fields, "x:1")], "x")
    assert "supervised loss" in caught.value.why


@table(
    "fields",
    [
        {"prompt": "q", "completion": "a", "rejected": "b"},  # what the recipe made of it: {completion: chosen}
        {"prompt": "q", "chosen": "a", "rejected": None},
        {"messages": CHAT, "score_chosen": "1.0", "score_rejected": "0.5"},
        {"messages": CHAT, "label": "positive"},
        {"messages": CHAT, "label": 3},
        {"messages": CHAT, "label": None},
        {"messages": CHAT, "rejected_reason": "none", "chosen_reason": "none"},
    ],
)
def test_other_data_is_not(fields: dict[str, Any]) -> None:
    assert preference(fields, chat=True) is None


def test_a_class_beside_plain_text_is_no_preference() -> None:
    assert preference({"text": "t", "label": 1}, chat=False) is None


def rows(*labels: Any) -> list[RawRow]:
    return [RawRow({"prompt": "q", "completion": "a", "label": label}, "x:1") for label in labels]


@table(
    ("labels", "good"),
    [((1, 2, 3, 4, 5), "> 3"), (("1", "2", "5"), "> 3"), ((0, 1, 2), "> 1"), ((0.0, 0.5, 1.0), "> 0.5"), ((1, 10), "> 5.5")],
)
def test_ratings_are_no_marks(labels: tuple[Any, ...], good: str) -> None:
    for marked, fix in ((True, "jq -c '.label = ("), (False, "jq -c 'del(.label)'")):
        with pytest.raises(DataError, match="`label` is a rating or a class") as caught:
            refuse_ratings(rows(*labels), "x", marked=marked)
        assert fix in caught.value.fix
        assert good in caught.value.fix


@table("labels", [(True, False), (0, 1), ("0", "1"), ("true", "false"), (None, True), ("good", "bad"), (float("nan"), 1)])
def test_marks_are_no_ratings(labels: tuple[Any, ...]) -> None:
    refuse_ratings(rows(*labels), "x", marked=True)


def test_a_supervised_run_leaves_numbers_alone_that_nothing_takes_for_marks() -> None:
    refuse_ratings(rows(3, 4, 5), "x")
    with pytest.raises(DataError):
        refuse_ratings(rows(3, 4, 5), "x", marked=True)
