"""What an audit makes of the losses of rows: those of an earlier run, found by their tokens, and those of one forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pronghorn.data.audit.audit import Audit, collect
from pronghorn.data.audit.scores import FILE_NAME, RowScores, names_of, of_losses, of_run
from pronghorn.errors import DataError
from pronghorn.recipe import Recipe
from samples import chat_rows, make_tokenizer, random_table, write_rows

ROWS = 40


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))


def written(folder: Path, table: Any, losses: dict[int, list[list[float]]]) -> Path:
    """A rows.jsonl: by step, row, loss per token and tokens of each."""
    lines: list[dict[str, Any]] = [{"step": 0, "rows": [], "losses": [], "tokens": [], "names": names_of(table)}]
    for step, rows in losses.items():
        tokens = [tokens for _, _, tokens in rows]
        sums = [loss * tokens for _, loss, tokens in rows]
        lines.append({"step": step, "rows": [row for row, _, _ in rows], "losses": sums, "tokens": tokens})
    folder.mkdir(exist_ok=True)
    (folder / FILE_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_losses_of_a_run_are_found_by_tokens_and_compared_with_their_time(tmp_path: Path) -> None:
    table: Any = random_table(4)
    run = written(
        tmp_path / "run",
        table,
        {step: [[3, 0.0, 0]] for step in range(1, 41)}  # a row without a label
        | {
            1: [[0, 4.0, 10], [1, 2.0, 30]],  # mean 2.5
            20: [[0, 1.0, 10], [1, 0.5, 10]],  # 0.75
            40: [[2, 3.0, 10], [1, 0.1, 10]],  # 1.55
        },
    )
    found = of_run(run, table)
    assert found.loss_R == pytest.approx([1.0, 0.1, 3.0, np.nan], nan_ok=True)
    assert found.first_R == pytest.approx([4 / 2.5, 2 / 2.5, 3 / 1.55, np.nan], nan_ok=True)
    assert found.last_R == pytest.approx([1 / 0.75, 0.1 / 1.55, 3 / 1.55, np.nan], nan_ok=True)
    assert found.times_R.tolist() == [2, 3, 1, 37]
    near = of_run(written(tmp_path / "near", table, {1: [[0, 4.0, 10]], 5: [[1, 1.0, 10]]}), table)
    assert near.first_R[:2] == pytest.approx([4 / 2.5, 1 / 2.5])  # steps next to each other have one mean

    class Reversed:
        def __len__(self) -> int:
            return 4

        def ids(self, i: int) -> Any:
            return table.ids(3 - i)

    other: Any = Reversed()
    assert of_run(run, other).loss_R == pytest.approx(found.loss_R[::-1], nan_ok=True)
    with pytest.raises(DataError, match="losses of other rows"):
        of_run(run, random_table(4, seed=9))
    (run / FILE_NAME).write_text((run / FILE_NAME).read_text().split("\n", 1)[1])
    with pytest.raises(DataError, match="does not name its rows"):
        of_run(run, table)
    with pytest.raises(DataError, match="cannot read the losses"):
        of_run(tmp_path, table)


def audited(path: Path, scores: RowScores | None, **leave_out: float) -> Audit:
    data = {
        "train": str(write_rows(path, chat_rows(ROWS, seed=5))),
        "eval": str(write_rows(path.with_name("e.jsonl"), chat_rows(9))),
    }
    recipe = Recipe.model_validate({"model": "m", "data": data})
    scoring = None if scores is None else lambda table, held: scores
    return collect(recipe, make_tokenizer(), scoring=scoring, leave_out=leave_out)


def lines(found: Audit, reason: str) -> list[int]:
    named = [one for one in json.loads(found.select)["left_out"] if one["reason"] == reason]
    return [int(one["row"].rsplit(":", 1)[1]) - 1 for one in named]


def test_scored_rows_are_shown_and_left_out_only_if_asked(tmp_path: Path) -> None:
    losses = np.ones(ROWS)
    losses[:4], losses[7] = 0.01, 9.0
    scores = of_losses(losses, np.ones(ROWS), alike_R=np.linspace(1, 0, ROWS), source="here", seconds=2.5)
    assert scores.first_R[5] == pytest.approx(ROWS / losses.sum())
    plain, found = audited(tmp_path / "a.jsonl", None), audited(tmp_path / "a.jsonl", scores)
    assert [one["name"] for one in found.facts["reasons"]][5:] == ["off_task", "known", "suspect"]
    assert {one["name"]: one["rows"] for one in found.facts["reasons"][5:]} == {"off_task": 2, "known": 4, "suspect": 1}
    assert json.loads(found.select)["left_out"] == json.loads(plain.select)["left_out"]
    assert (plain.scores, plain.facts["scores"]) == ("", None)
    assert found.facts["scores"] == {"source": "here", "rows": ROWS, "seconds": 2.5}
    first, *_ = [json.loads(line) for line in found.scores.splitlines()]
    assert (first["row"].rsplit(":", 1)[1], first["loss"], first["times"]) == ("8", 9.0, 1)
    assert len(found.scores.splitlines()) == ROWS
    asked = audited(tmp_path / "a.jsonl", scores, off_task=0.2, known=0.5)
    taken = set(lines(plain, "copy")) | set(lines(plain, "near copy")) | set(lines(plain, "leak"))
    assert set(lines(asked, "off_task")) == set(range(ROWS - 8, ROWS)) - taken
    assert json.loads(asked.select)["scored_seconds"] == 2.5
    reasons = {one["name"]: one for one in asked.facts["reasons"]}
    assert (reasons["off_task"]["rows"], reasons["known"]["rows"], reasons["suspect"]["leaves_out"]) == (8, 4, False)


def test_a_row_that_fell_beside_the_others_is_no_suspect(tmp_path: Path) -> None:
    nothing = np.full(ROWS, np.nan)
    first, last, times = nothing.copy(), nothing.copy(), np.zeros(ROWS, np.int64)
    first[:3], last[:3], times[:3] = (2.5, 4.0, 1.0), (3.0, 3.5, 1.0), 2
    scores = RowScores(last, first, last, times, None, "there")
    found = {one["name"]: one for one in audited(tmp_path / "a.jsonl", scores).facts["reasons"]}
    assert (found["suspect"]["rows"], "off_task" in found) == (1, False)
    assert found["suspect"]["examples"][0]["note"] == "3.0 times the mean loss, 2.5 times when it was first seen"
