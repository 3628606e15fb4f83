"""How large exports would be is what they are, but for cards and the headers of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_parts import lines, write_recipe
from exports import export
from pronghorn.cli import main
from pronghorn.train.run.trained_run import TrainedRun

CARD = 12_000  # bytes of README.md, export.json, config.json and the headers of weight files


def test_they_are_told_before_anything_is_written(
    one_layer_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, run = write_recipe(tmp_path, one_layer_model), tmp_path / "runs" / "run"
    assert main(["train", str(recipe), "train.steps=1", "eval.generations=0"]) == 0
    before = sorted(run.rglob("*"))
    (told,) = lines(capsys, "export", str(run), "--sizes")
    assert sorted(run.rglob("*")) == before
    sizes = {one["to"]: one for one in told["sizes"]}
    assert "needs a run that trained on an FP8 base" in sizes["fp8:base"]["refused"]
    trained = TrainedRun(run, "last")
    for to in ("adapter", "merged", "fp8:merged", "nvfp4"):
        place = tmp_path / to.replace(":", "-")
        export(trained.path, trained.recipe, place, to)
        written = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
        assert 0 <= written - sizes[to]["bytes"] < CARD, to
        assert not sizes[to]["refused"]
        assert not sizes[to]["there"]
    export(trained.path, trained.recipe, Path(sizes["adapter"]["folder"]), "adapter")
    (told,) = lines(capsys, "export", str(run), "--sizes")
    assert [one["to"] for one in told["sizes"] if one["there"]] == ["adapter"]


def test_one_of_them_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path)])
    assert "--to" in capsys.readouterr().err
