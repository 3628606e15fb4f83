"""Columns, message keys and roles with other names, through the real reader, formats and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.encode.tokens import TokenizerFiles
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.errors import DataError
from pronghorn.recipe import Data
from samples import make_tokenizer, write_rows
from tables import table

PLAIN = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prepared(model: Path, rows: list[dict[str, Any]], **keys: Any) -> Prepared:
    path = write_rows(model.parent / "rows.jsonl", rows)
    return prepare([str(path)], Data(train=str(path), **keys), TokenizerFiles(str(model)))


def same(model: Path, rows: list[dict[str, Any]], plain: dict[str, Any], **keys: Any) -> None:
    ours = prepared(model, [plain])
    renamed = prepared(model, rows, **keys)
    assert [(renamed.tokens.ids(i).tolist(), renamed.tokens.loss(i).tolist()) for i in range(len(renamed.tokens))] == [
        (ours.tokens.ids(0).tolist(), ours.tokens.loss(0).tolist())
    ] * len(rows)


def test_columns_keys_and_roles_have_other_names(model: Path) -> None:
    odd = {"dialogue": [{"who": "customer", "says": "hi"}, {"who": "bot", "says": "ho"}]}
    same(
        model,
        [odd],
        PLAIN,
        fields={"messages": "dialogue"},
        message_fields={"role": "who", "content": "says"},
        roles={"user": ["customer"], "assistant": ["bot"]},
    )


def test_a_sharegpt_file_may_have_speakers_of_its_own(model: Path) -> None:
    odd = {"conversations": [{"from": "Q", "value": "hi"}, {"from": "A", "value": "ho"}]}
    same(model, [odd], PLAIN, roles={"user": "Q", "assistant": "A"})


@table(
    ("odd", "fields", "plain"),
    [
        (
            {"question": "hi", "answer": "ho"},
            {"prompt": "question", "completion": "answer"},
            {"prompt": "hi", "completion": "ho"},
        ),
        ({"body": "hi", "text": "not this"}, {"text": "body"}, {"text": "hi"}),
        (
            {"q": "hi", "a": "ho", "sys": "be"},
            {"instruction": "q", "output": "a", "system": "sys"},
            {"instruction": "hi", "output": "ho", "system": "be"},
        ),
        ({"input": "hi", "target": "ho"}, {"instruction": "input", "output": "target"}, {"instruction": "hi", "output": "ho"}),
    ],
)
def test_every_format_may_have_other_columns(
    model: Path, odd: dict[str, str], fields: dict[str, str], plain: dict[str, str]
) -> None:
    same(model, [odd], plain, fields=fields)


def test_a_column_that_is_not_there_is_one_error(model: Path) -> None:
    with pytest.raises(DataError, match=r"data.fields.messages: no column `dialog`") as caught:
        prepared(model, [{"dialogue": []}] * 3, fields={"messages": "dialog"})
    assert "`dialogue`" in caught.value.why


def test_max_rows_are_the_first_of_each_file(model: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": str(n)}, {"role": "assistant", "content": "ho"}]} for n in range(120)]
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(model.parent / name, rows)
    names = [str(model.parent / name) for name in ("a.jsonl", "b.jsonl")]
    files = TokenizerFiles(str(model))
    some = prepare(names, Data(train=names, max_rows=3), files)
    assert [some.example(i).messages[0]["content"] for i in range(len(some.tokens))] == ["0", "1", "2"] * 2
    assert some.counts.read == 6
    assert len(prepare(names, Data(train=names), files).tokens) == 240  # not the cached six
    assert len(prepare(names, Data(train=names, max_rows=110), files).tokens) == 220  # more than tell the format
