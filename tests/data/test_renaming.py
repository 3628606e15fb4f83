"""Columns, message keys and roles with other names, through the real reader, formats and cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.encode.tokens import TokenizerFiles
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.errors import DataError
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def prepared(model: Path, rows: list[dict[str, Any]], **keys: Any) -> Prepared:
    path = write_rows(model.parent / "rows.jsonl", rows)
    return prepare([str(path)], Data(train=str(path), **keys), TokenizerFiles(str(model)))


def test_a_text_in_another_column_goes_before_the_column_text(model: Path) -> None:
    """benchmarks/layout_cases.py has the other formats with other names."""
    renamed, plain = (
        prepared(model, [{"body": "hi", "text": "not this"}], fields={"text": "body"}),
        prepared(model, [{"text": "hi"}]),
    )
    assert renamed.tokens.ids(0).tolist() == plain.tokens.ids(0).tolist()


def test_a_column_that_is_not_there_is_one_error(model: Path) -> None:
    with pytest.raises(DataError, match=r"data.fields.messages: no column `dialog`") as caught:
        prepared(model, [{"dialogue": []}] * 3, fields={"messages": "dialog"})
    assert "`dialogue`" in caught.value.why
