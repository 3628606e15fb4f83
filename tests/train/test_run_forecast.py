"""`pronghorn plan`: what a run would take, from config and recipe alone."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from watching import RecipeFor, Silent

from pronghorn.cli import main
from pronghorn.errors import CommandError
from pronghorn.report.run_log import read_log
from pronghorn.train.loop import train
from pronghorn.train.run.run_forecast import forecast
from pronghorn.train.source import TableSource


def test_a_forecast_needs_neither_gpu_nor_weights_nor_data(recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for()
    assert not TableSource.foreseen(recipe).rows
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((Path(recipe.model) / "config.json").read_bytes())
    (found,) = forecast(recipe_for(model=str(bare)), gpu="rtx4090", price=0.5, tokens=10**9)
    assert (found.gpu.name, found.price, found.tokens) == ("rtx4090", 0.5, 10**9)
    if not torch.cuda.is_available():
        assert {one.gpu.name for one in forecast(recipe, gpu=None)} >= {"rtx3090", "h100", "b200"}
    with pytest.raises(CommandError, match="unknown GPU 'rtx4091'") as caught:
        forecast(recipe, gpu="rtx4091")
    assert "did you mean rtx4090?" in caught.value.fix
    (small,), (large,) = (forecast(recipe, gpu="h200", host=host) for host in ("32GB", "256GB"))
    assert (small.plan.problem.host, large.plan.problem.host) == (19_200_000_000, 232_000_000_000)
    for wrong in ({"price": -1.0}, {"tokens": 0}, {"host": "32"}, {"host": "50%"}):
        with pytest.raises(CommandError):
            forecast(recipe, gpu="h200", **wrong)  # type: ignore[arg-type]


def test_rows_that_were_tokenized_before_are_counted(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(train={"epochs": 3})
    result = train(recipe, display=Silent())
    start = read_log(result.folder)[0]["data"]
    (found,) = forecast(recipe, gpu="h200")
    assert found.tokens == 3 * start["tokens"]
    assert TableSource.foreseen(recipe).rows["loss_share"] == pytest.approx(start["loss_tokens"] / start["tokens"])
    (steps,) = forecast(recipe_for(train={"steps": 7}), gpu="h200")
    assert steps.tokens == 7 * recipe.train.batch_tokens


def test_tokens_are_estimated_from_files_until_they_are_counted(recipe_for: RecipeFor, tmp_path: Path) -> None:
    rows = Path(recipe_for().data.train[0])  # type: ignore[arg-type]
    expected = rows.stat().st_size // 4
    (found,) = forecast(recipe_for(train={"epochs": 2}), gpu="h200")
    assert found.estimated
    assert found.tokens == pytest.approx(2 * expected, abs=2)
    assert found.hours is not None
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(rows.read_bytes()))
    for unknown in ({"train": [str(packed)]}, {"train": [str(rows)], "max_rows": 5}, {"train": [str(tmp_path / "none.jsonl")]}):
        (found,) = forecast(recipe_for(data=unknown), gpu="h200")
        assert (found.tokens, found.estimated) == (None, False)


def test_the_verb_says_it_to_people_and_to_machines(
    recipe_for: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe_for().model_dump(mode="json")), encoding="utf-8")
    assert main(["plan", str(file), "--gpu", "a100-80"]) == 0
    text = capsys.readouterr().out
    for part in ("A100 80 GB", "tokens/s", "peak", "USD", "█ keeps all", "estimated from 4 bytes per token", "fits: "):
        assert part in text
    assert "copy each way" not in text
    assert main(["plan", str(file), "--gpu", "a100-80", "--verbose", "--host", "32GB"]) == 0
    text = capsys.readouterr().out
    assert "copy each way" in text
    assert "19.2 GB" in text
    assert main(["plan", str(file), "--gpu", "h200", "--tokens", "1000000", "--price", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == 1_000_000
    assert told["cost"] == pytest.approx(told["hours"] * 2)
    assert main(["plan", str(file), "memory.budget=200MB", "--gpu", "h200", "--longest"]) == 0
    text = capsys.readouterr().out
    tokens = int(text.rpartition("train.capacity=")[2].split()[0])
    assert tokens % 1024 == 0
    assert f"one document of {tokens:,} tokens" in text
    if not torch.cuda.is_available():
        assert main(["plan", str(file), "--longest"]) == 2
        assert "name one with --gpu" in capsys.readouterr().err
        assert main(["plan", str(file)]) == 0
        shown = capsys.readouterr().out
        assert "b200" in shown
        assert "USD per hour" in shown
    assert main(["plan", str(file), "--gpu", "h20"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_several_gpus_are_a_forecast_of_their_own(
    recipe_for: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe_for().model_dump(mode="json")), encoding="utf-8")
    assert main(["plan", str(file), "--gpus", "8xh100", "--nodes", "4", "--link", "400gbit", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["forecast"], told["gpus"], told["machines"]) == (True, 32, 4)
    assert main(["plan", str(file), "--gpus", "8xh100", "--gpu", "h100"]) == 2
    assert "--gpu cannot be combined with --gpus" in capsys.readouterr().err
    assert main(["plan", str(file), "--nodes", "2"]) == 2
    assert "need --gpus" in capsys.readouterr().err
