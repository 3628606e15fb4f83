"""`pronghorn fork`: a new run goes on from a checkpoint of another as that run itself did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from watching import RecipeFor, Silent, events_of, losses_of, notices_of, same, weights

from cli_parts import lines
from pronghorn.cli import main
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import load_recipe
from pronghorn.report.run_log import read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.train.checkpoint.checkpoint import list_checkpoints
from pronghorn.train.loop import train

MANY = {"checkpoint": {"every": 1, "keep": 9}, "eval": {"every": 2, "generations": 0}}


def trained(recipe_for: RecipeFor, **keys: object) -> tuple[Recipe, Path]:
    recipe = recipe_for(**{**MANY, "train": {"steps": 5, "schedule": "constant"}, **keys})
    return recipe, train(recipe, display=Silent()).folder


def test_it_goes_on_with_the_same_bits(recipe_for: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = trained(recipe_for)
    new = tmp_path / "new"
    (told,) = lines(capsys, "fork", str(run), str(new), "--checkpoint", "3")
    assert told["next"].endswith(f"train {new / 'recipe.yaml'}")
    best = events_of(run, "eval")[0]["step"]  # a checkpoint that the rest of the run may still name
    assert {path.name for path in list_checkpoints(new)} == {"checkpoint-3", f"checkpoint-{best}"}
    assert losses_of(new) == losses_of(run)[:3]
    then, now = run_stats(read_log(run)), run_stats(read_log(new))
    assert (now.state, now.step, now.name) == ("interrupted", 3, "new")
    assert now.seconds <= then.seconds  # however long ago it ended
    result = train(load_recipe(new / "recipe.yaml"), display=Silent())
    assert result.folder == new
    assert losses_of(new) == losses_of(run)
    assert losses_of(new, "eval") == losses_of(run, "eval")
    assert same(weights(new / "checkpoint-5"), weights(run / "checkpoint-5"))
    assert [e["resumed_from"] for e in read_log(new) if e["event"] == "start"] == [None, 3]
    assert f"begun from checkpoint-3 of {run}" in notices_of(new)


def test_keys_change_where_a_run_can_follow(recipe_for: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = trained(recipe_for)
    new = tmp_path / "new"
    fork = ("fork", str(run), str(new))
    for words, told in (
        (("--checkpoint", "9"), "choose one of: 1, 2, 3, 4, 5"),
        (("--checkpoint", "3", "lora.r=8"), "the trained adapter has this shape and scale"),
        (("--checkpoint", "3", "data.max_length=64"), "position in the data would mean different rows"),
        (("--checkpoint", "3", "train.lrr=1"), "train.lr"),
    ):
        assert main([*fork, *words]) == 2, words
        assert told in capsys.readouterr().err, words
        assert not new.exists()
    assert main([*fork, "--checkpoint", "3", "train.lr=1e-4", "train.steps=7"]) == 0
    assert main([*fork, "--checkpoint", "3"]) == 2  # nothing is written over
    assert "exists already" in capsys.readouterr().err
    train(load_recipe(new / "recipe.yaml"), display=Silent())
    steps = events_of(new, "step")
    assert [step["step"] for step in steps] == list(range(1, 8))
    assert [step["lr"] for step in steps] == [0.005, 0.01, 0.01] + [1e-4] * 4  # a step of warm-up
    assert [p.name for p in sorted(tmp_path.iterdir()) if p.name.startswith(".new")] == []


def test_a_longer_run_begins_before_the_decay(
    recipe_for: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `train` itself does it (longer.py)."""
    recipe, run = trained(recipe_for, train={"steps": 5, "schedule": "wsd", "decay": 2})
    new = tmp_path / "new"
    assert main(["fork", str(run), str(new), "--checkpoint", "5", "train.steps=8"]) == 2
    assert "had begun to decay" in capsys.readouterr().err
    assert main(["fork", str(run), str(new), "--checkpoint", "3", "train.steps=8"]) == 0
    train(load_recipe(new / "recipe.yaml"), display=Silent())
    longer = json.loads(recipe.model_dump_json())
    longer["train"]["steps"], longer["output"] = 8, str(tmp_path / "whole")
    whole = train(Recipe.model_validate(longer), display=Silent()).folder
    assert losses_of(new) == losses_of(whole)
