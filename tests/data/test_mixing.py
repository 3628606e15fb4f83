"""Sources with weights and numbers of rows of their own: how often a row comes, and that this is the same every time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronghorn.data.encode.tokens import TokenizerFiles
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.data.read.mixing import repeated
from pronghorn.data.read.reading import SourceCount
from pronghorn.data.read.splitting import apart
from pronghorn.recipe_parts import Data
from samples import make_tokenizer, write_rows


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save_pretrained(tmp_path / "model")
    for name in "ab":
        chats = [[{"role": "user", "content": f"{name}{n}"}, {"role": "assistant", "content": "ho"}] for n in range(10)]
        write_rows(tmp_path / f"{name}.jsonl", [{"messages": chat} for chat in chats])
    return tmp_path / "model"


def prepared(model: Path, *train: Any, **keys: Any) -> Prepared:
    spec = Data(train=train, **keys)
    return prepare(spec.train, spec, TokenizerFiles(str(model)))


def asked(found: Prepared) -> list[str]:
    return [found.example(i).messages[0]["content"] for i in range(len(found.tokens))]


def test_a_weight_says_how_often_each_row_comes(model: Path) -> None:
    plain = prepared(model, "a.jsonl", "b.jsonl")
    found = prepared(model, {"path": "a.jsonl", "weight": 2.5}, {"path": "b.jsonl", "weight": 0.3}, duplicates="drop-exact")
    times = Counter(asked(found))
    assert sorted(times[f"a{n}"] for n in range(10)) == [2] * 5 + [3] * 5
    assert sorted(times[f"b{n}"] for n in range(10)) == [0] * 7 + [1] * 3
    assert found.remarks == (
        "a.jsonl: weight 2.5, so 25 rows per epoch from 10",
        "b.jsonl: weight 0.3, so 3 rows per epoch from 10",
    )
    assert [(source.rows, source.weight) for source in found.counts.sources] == [(10, 2.5), (10, 0.3)]
    assert prepared(model, {"path": "a.jsonl"}, "b.jsonl").tokens.content == plain.tokens.content
    assert found.tokens.content != plain.tokens.content  # which is what a resumed run compares


def test_the_same_rows_every_time_and_none_tokenized_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepared(model, {"path": "a.jsonl", "weight": 0.5})
    monkeypatch.setattr(TokenizerFiles, "load", lambda self: pytest.fail("the tokenizer was loaded"))
    assert asked(prepared(model, {"path": "a.jsonl", "weight": 0.5})) == asked(first)
    assert len(prepared(model, {"path": "a.jsonl", "weight": 4}).tokens) == 40
    sides = apart(prepared(model, {"path": "a.jsonl", "weight": 4}), None, Data(train=("a.jsonl",), eval=0.2), seed=1)
    train, held = sides.train, sides.held
    assert held is not None
    assert (len(train), len(held)) == (32, 8)  # all copies of a row are on one side
    assert not {train.row(i) for i in range(32)} & {held.row(i) for i in range(8)}


def test_rows_left_out_before_are_not_counted_in() -> None:
    sources = [SourceCount("a", "text", 6, rows=4, weight=0.5), SourceCount("b", "text", 2, rows=2)]
    chosen, told = repeated(sources, np.array([True, False, True, False, True, True]))
    assert len(chosen) == 3
    assert set(chosen.tolist()) - {4, 5} < {0, 2}
    assert told == ["a: weight 0.5, so 1 row per epoch from 2"]
    chosen, told = repeated([SourceCount("a", "text", 4, rows=4, weight=0.001)], np.ones(4, np.bool_))
    assert (len(chosen), told) == (1, ["a: weight 0.001, so 1 row per epoch from 4"])


def test_rows_of_a_source_and_of_each_file(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "both"
    folder.mkdir()
    for name in "ab":
        (tmp_path / f"{name}.jsonl").rename(folder / f"{name}.jsonl")
    assert asked(prepared(model, {"path": "both", "max_rows": 12})) == [f"a{n}" for n in range(10)] + ["b0", "b1"]
    some = asked(prepared(model, {"path": "both", "max_rows": 3}, "both/b.jsonl"))
    assert some == ["a0", "a1", "a2"] + [f"b{n}" for n in range(10)]
    assert asked(prepared(model, "both", max_rows=2)) == ["a0", "a1", "b0", "b1"]
    assert asked(prepared(model, {"path": "both", "max_rows": 3}, max_rows=2)) == ["a0", "a1", "a2"]
