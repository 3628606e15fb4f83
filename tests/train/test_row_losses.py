"""rows.jsonl: each document's loss is that of the document alone, each step is there once, and the run's bits are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from watching import RecipeFor, Silent, events_of, stop_at

from pronghorn.data.pack.batches import build_batch
from pronghorn.errors import Interrupted
from pronghorn.report.html import render_page
from pronghorn.report.run_log import read_log
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives.objective import document_losses
from pronghorn.train.run.row_losses import FILE_NAME, RowLosses
from samples import random_table

LINES = ['{"step":1,"rows":[0],"losses":[1.0],"tokens":[1]}', '{"step":3,"rows":[0],"losses":[1.0],"tokens":[1]}']


def lines_of(run: str | Path) -> list[dict[str, Any]]:
    """Without the first, which names the rows."""
    head, *lines = [json.loads(line) for line in (Path(run) / FILE_NAME).read_text().splitlines()]
    assert (head["step"], head["rows"]) == (0, [])
    assert len(set(head["names"])) == len(head["names"]) == 1 + max(row for line in lines for row in line["rows"])
    return lines


def test_losses_fall_to_the_documents_that_have_them() -> None:
    table = random_table(9)
    for capacity in (int(table.lengths.sum()), 4096):  # without padding, and with much
        batch = build_batch(table, torch.randperm(9).numpy(), capacity)
        own = torch.rand(len(batch.loss_rows))
        truth = [0.0] * 9
        for row, loss in zip(batch.loss_rows.tolist(), own.tolist(), strict=True):
            truth[max(i for i in range(9) if batch.cu_seqlens[i] <= row)] += loss
        assert document_losses(batch, own) == pytest.approx(truth)


@pytest.mark.parametrize("changes", [{}, {"checkpoint": {"every": 1}}], ids=["few checkpoints", "one each step"])
def test_each_step_is_in_the_file_once_wherever_the_run_was_stopped(
    changes: dict[str, Any], recipe_for: RecipeFor, tmp_path: Path
) -> None:
    changes = {"train": {"epochs": 2}, "eval": {"every": 100, "generations": 0}, "checkpoint": {"every": 3}} | changes
    whole = train(recipe_for(**changes, output=str(tmp_path / "whole")), display=Silent())
    lines, steps = lines_of(whole.folder), events_of(whole.folder, "step")
    assert [line["step"] for line in lines] == [step["step"] for step in steps] == list(range(1, whole.step + 1))
    for line, step in zip(lines, steps, strict=True):
        assert sum(line["tokens"]) == step["loss_tokens"]
        assert sum(line["losses"]) == pytest.approx(step["loss"] * step["loss_tokens"], rel=1e-4)
    for epoch in (0, 1):
        rows = [row for line in lines if line["epoch"] == epoch for row in line["rows"]]
        assert sorted(rows) == list(range(len(rows))) != []
    recipe = recipe_for(**changes, output=str(tmp_path / "parts"))
    for step in (2, 5):
        with pytest.raises(Interrupted):
            train(recipe, display=stop_at(step))
        with (tmp_path / "parts" / FILE_NAME).open("a") as file:  # what a kill leaves
            file.write(json.dumps(lines[step] | {"losses": []}) + "\n" + '{"step": 1')
    train(recipe, display=Silent())
    assert (tmp_path / "parts" / FILE_NAME).read_bytes() == (whole.folder / FILE_NAME).read_bytes()


def test_the_report_shows_the_hardest_rows(recipe_for: RecipeFor) -> None:
    result = train(recipe_for(train={"epochs": 2}), display=Silent())
    (event,) = events_of(result.folder, "rows")
    last = {row: loss / tokens for line in lines_of(result.folder) for row, loss, tokens in _each(line)}
    assert [one["losses"][-1] for one in event["worst"]] == sorted(last.values(), reverse=True)[:10]
    assert all(len(one["losses"]) == 2 for one in event["worst"])
    first = event["worst"][0]
    page = render_page(read_log(result.folder))
    assert "Hardest training rows" in page
    assert first["row"] in page
    assert first["row"].startswith(str(recipe_for().data.train[0]))


def _each(line: dict[str, Any]) -> list[tuple[int, float, int]]:
    return list(zip(line["rows"], line["losses"], line["tokens"], strict=True))


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (LINES, 1),
        ([LINES[0], '{"step":2,"rows":[0],"losses":[],"tokens":[1]}', LINES[0]], 1),
        ([LINES[0], "null", LINES[0]], 1),
        (["\0\0"], 0),
        ([], 0),
    ],
    ids=["a later step", "lengths that differ", "no step", "zeros", "an empty file"],
)
def test_what_follows_the_checkpoint_or_is_damaged_is_cut_off(left: list[str], kept: int, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("".join(line + "\n" for line in left))
    RowLosses(tmp_path, World(), None, 2)
    assert (tmp_path / FILE_NAME).read_text().splitlines() == left[:kept]
