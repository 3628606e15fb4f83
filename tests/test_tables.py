"""The tests' own tables: no row is lost, none sees what another did, and few combinations still have every value."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tables import covering, table


def test_all_rows_run_and_all_that_fail_are_named() -> None:
    seen = []

    @table(("a", "b"), [(1, 1), (2, 3), pytest.param(4, 4), (5, 6), (7, 7)])
    def compare(a: int, b: int) -> None:
        seen.append(a)
        if a == 5:
            pytest.skip("a row may not")
        assert a == b

    with pytest.raises(ExceptionGroup, match="2 of 5 rows failed") as caught:
        compare()
    assert seen == [1, 2, 4, 5, 7]
    assert [error.__notes__ for error in caught.value.exceptions] == [["row: a=2, b=3"], ["row: a=5, b=6"]]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    (tmp_path / "shelf").mkdir()
    (tmp_path / "shelf" / "book").write_text("old")
    return tmp_path / "shelf"


@table("name", ["book", "other"])
def test_no_row_sees_what_another_did(name: str, tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(tmp_path.iterdir()) == []
    assert {path.name: path.read_text() for path in shelf.iterdir()} == {"book": "old"}
    assert not hasattr(itertools, "of_a_row")
    (tmp_path / "mine").write_text(name)
    (shelf / name).write_text("new")
    monkeypatch.setattr(itertools, "of_a_row", name, raising=False)


def test_few_rows_have_every_value_and_every_asked_for_combination() -> None:
    axes = ("abc", range(5), (False, True), "xyz")
    rows = covering(*axes, together=(0, 2))
    assert len(rows) == 6 < len(list(itertools.product(*axes)))
    assert {(a, c) for a, _, c, _ in rows} == set(itertools.product("abc", (False, True)))
    assert all({row[i] for row in rows} == set(axis) for i, axis in enumerate(axes))
    assert {(a, b) for a, b in covering("ab", range(7))} >= {("a", 0), ("b", 1)}
    assert len(covering("ab", range(7))) == 7
