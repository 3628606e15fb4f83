"""Every input layout of benchmarks/layout_cases.py is read as was written down by hand, or refused with its fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.input_layouts import TABLE, make_tokenizer, outcome
from benchmarks.layout_cases import LAYOUTS, Layout
from tables import table


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@table("layout", LAYOUTS)
def test_a_layout_is_read_as_expected_or_refused_with_a_fix(layout: Layout, tokenizer: Any, tmp_path: Path) -> None:
    assert not outcome(layout, tokenizer, tmp_path)["wrong"]


def test_the_table_has_them_all() -> None:
    names = [layout.name for layout in LAYOUTS]
    assert len(set(names)) == len(names) >= 60
    text = TABLE.read_text(encoding="utf-8")
    assert not [name for name in names if name not in text], "python -m benchmarks.input_layouts --write"
    assert ", 0 differ from what is expected" in TABLE.read_text(encoding="utf-8")


@table(
    ("changed", "wrong"),
    [
        (Layout("x", {"x.txt": b"hi"}, ("«hi<end>»",)), ""),
        (Layout("x", {"x.txt": b"hi"}, ("hi<end>",)), "trained ['«hi<end>»']"),
        (Layout("x", {"x.txt": b"hi"}, ("«hi<end>»",), unused="id"), "unused columns []"),
        (Layout("x", {"x.txt": b"hi"}, ("«hi<end>»",), told="nothing"), "told ["),
        (Layout("x", {"x.txt": b"hi"}, what="no", fix="no"), "trained"),
        (Layout("x", {"x.txt": b""}, ("",)), "refused: x.txt: the file has no rows"),
        (
            Layout("x", {"x.txt": b""}, what="the file has no rows", fix="no such words"),
            "not in the refusal: ['no such words']",
        ),
        (Layout("x", {"x.txt": b""}), "not in the refusal"),
    ],
)
def test_the_judge_sees_what_is_wrong(changed: Layout, wrong: str, tokenizer: Any, tmp_path: Path) -> None:
    found = outcome(changed, tokenizer, tmp_path)["wrong"]
    assert found.startswith(wrong) if wrong else not found
