"""Which training rows `data.select` leaves out: those of a file, wherever they stand now, or all but a random share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.encode.cached_rows import no_stage, silent
from pronghorn.data.prepare import prepare
from pronghorn.data.read.selection import LeftOut, keys_of, selection_text
from pronghorn.data.read.splitting import Apart, read_apart
from pronghorn.errors import DataError
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Data
from samples import chat_rows, make_tokenizer, pair_rows, write_rows
from tables import table

TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))


def read(path: Path, seed: int = 1, objective: str = "supervised", **data: Any) -> Apart:
    values = {"train": str(path), "max_length": 512, **data}
    recipe = Recipe.model_validate({"model": "m", "data": values, "objective": objective, "train": {"seed": seed}})
    return read_apart(recipe, TOKENIZER, silent, no_stage)[2]


def lines(sides: Apart) -> list[int]:
    table = sides.train
    return [int(table.where(int(i)).rsplit(":", 1)[1]) for i in table.starts[:-1]]


def selection(path: Path, *numbers: int, wanted: Any = "documents") -> Path:
    """A file that names these rows, from 0."""
    spec = Data(train=(str(path),))
    keys = keys_of(prepare(spec.train, spec, TOKENIZER, wanted=wanted).rows)
    rows = [LeftOut(keys[at], "odd" if at % 2 else "even", f"{path}:{at + 1}") for at in numbers]
    file = path.with_name("select.json")
    file.write_text(selection_text(rows))
    return file


def test_rows_are_known_by_their_content_wherever_they_stand(tmp_path: Path) -> None:
    rows = chat_rows(20, seed=3)
    path = write_rows(tmp_path / "a.jsonl", [*rows, rows[4], rows[4]])
    file = str(selection(path, 2, 7, 8, 20))  # 20: the second of three equal rows
    found = read(path, select=file)
    assert lines(found) == [line for line in range(1, 23) if line not in (3, 8, 9, 21)]
    assert found.remarks == (f"left out 3 rows: even ({file})", f"left out 1 row: odd ({file})")
    assert found.selection is not None
    assert found.selection.key == {"select": hashlib.sha256(Path(file).read_bytes()).hexdigest()}
    lengths = read(path).train.lengths
    assert found.selection.left_out == {"even": (3, lengths[[2, 8, 20]].sum()), "odd": (1, lengths[7])}
    moved = write_rows(tmp_path / "b.jsonl", [rows[4], *reversed(rows), rows[4]])
    assert len(lines(read(moved, select=file))) == 18
    assert sorted(set(range(1, 23)) - set(lines(read(moved, select=file)))) == [13, 14, 17, 19]
    more = write_rows(tmp_path / "c.jsonl", rows[:8])
    assert read(more, select=file).remarks[-1] == f"2 rows of {file} are not in data.train"


def test_weights_pieces_and_groups_go_whole(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(10, seed=3))
    file = str(selection(path, 1, 4))
    twice = read(path, select=file, train=[{"path": str(path), "weight": 2}])
    assert sorted(lines(twice)) == sorted(2 * [1, 3, 4, 6, 7, 8, 9, 10])
    pieces = read(path, select=file, max_length=32, long="split", loss_on="all")
    assert len(lines(pieces)) > 10
    assert set(lines(pieces)) == {1, 3, 4, 6, 7, 8, 9, 10}
    pairs = write_rows(tmp_path / "pairs.jsonl", pair_rows(10, seed=3))
    file = str(selection(pairs, 1, 4, wanted="pairs"))
    assert lines(read(pairs, objective="dpo", select=file)) == [1, 3, 4, 6, 7, 8, 9, 10]


def test_a_random_share_follows_from_the_seed_and_leaves_the_held_out_rows_as_they_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": f"{n} is a number, and no other row says {n * 7}"} for n in range(200)])
    whole, half, again, other, less = (
        read(path, seed, eval=0.1, select=share)
        for seed, share in ((1, None), (1, {"random": 0.5}), (1, {"random": 0.5}), (2, {"random": 0.5}), (1, {"random": 0.2}))
    )
    assert (len(lines(whole)), len(lines(half)), len(lines(less))) == (180, 90, 36)
    assert lines(half) == lines(again)
    assert lines(half) != lines(other)
    assert set(lines(less)) < set(lines(half)) < set(lines(whole))
    assert half.held is not None
    assert whole.held is not None
    assert half.held.content == whole.held.content
    assert half.selection is not None
    assert half.selection.key == {}  # the recipe says it all
    assert "left out 90 rows: not in the random 0.5 of all rows" in half.remarks[0]


@table(("content", "said"), [
    ("", "this is not a selection"), ("[]", "this is not a selection"), ('{"version": 2, "left_out": []}', "this is not"),
    ('{"version": 1, "left_out": [{"key": 3, "reason": "a", "row": ""}]}', "this is not a selection"),
    ('{"version": 1, "left_out": [{"key": "ab", "reason": "a", "row": ""}]}', "belongs to other data"),
])  # fmt: skip
def test_files_that_are_no_selection_of_these_rows(content: str, said: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(5))
    (tmp_path / "select.json").write_text(content)
    with pytest.raises(DataError, match=said) as caught:
        read(path, select=str(tmp_path / "select.json"))
    assert "data audit" in caught.value.fix


def test_no_file_and_no_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(5))
    with pytest.raises(DataError, match="cannot read the selection"):
        read(path, select=str(tmp_path / "missing.json"))
    with pytest.raises(DataError, match="leaves no row"):
        read(path, select=str(selection(path, *range(5))))
    file = selection(path)
    assert json.loads(file.read_text()) == {"version": 1, "left_out": []}


def test_a_selection_that_takes_nothing_out_is_told(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", chat_rows(5))
    file = str(selection(path))
    assert read(path, select=file).remarks == (f"data.select ({file}) changes nothing: it leaves out none of 5 rows",)
    told = ("data.select (random) changes nothing: it leaves out none of 5 rows",)
    assert read(path, select={"random": 0.99}).remarks == told
