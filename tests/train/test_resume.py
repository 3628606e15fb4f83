"""Where a run goes on: past damaged and forged checkpoints, with a changed recipe only where that was asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watching import RecipeFor, Silent, notices_of

from pronghorn.errors import CheckpointError, CommandError
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.train.checkpoint.checkpoint import MANIFEST, TENSORS, _as_text, _with_checksum, list_checkpoints
from pronghorn.train.checkpoint.resume import find_checkpoint
from pronghorn.train.loop import train
from pronghorn.train.run.trained_run import TrainedRun
from pronghorn.train.setup.check import check_run


@pytest.fixture
def trained(recipe_for: RecipeFor) -> tuple[Recipe, Path]:
    """Four steps, with checkpoints 1 to 4."""
    recipe = recipe_for(train={"steps": 4}, checkpoint={"every": 1, "keep": 9}, eval={"every": 99, "generations": 0})
    return recipe, train(recipe, display=Silent()).folder


def forge(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """A manifest with other content and the right sum."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["sha256"]
    change(manifest)
    (checkpoint / MANIFEST).write_text(_as_text(_with_checksum(manifest)))


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no step": lambda m: m.pop("step"),
    "step is a word": lambda m: m.update(step="4"),
    "no values": lambda m: m.pop("values"),
    "no cursor": lambda m: m["values"].pop("cursor"),
    "a cursor of words": lambda m: m["values"]["cursor"].update(pack="x"),
    "no progress": lambda m: m["values"].pop("progress"),
    "no recipe": lambda m: m.pop("recipe"),
    "another recipe": lambda m: m.update(recipe={"model": 7}),
    "no files": lambda m: m.update(files={}),
    "files without sums": lambda m: m["files"].update({TENSORS: {}}),
    "files is a list": lambda m: m.update(files=[1]),
    "no generators": lambda m: m.update(rng={}),
    "other generators": lambda m: m["rng"].update(torch="AAAA"),
}


def test_forged_and_damaged_ones_are_passed_over(trained: tuple[Recipe, Path]) -> None:
    recipe, run = trained
    newest = run / "checkpoint-4"
    whole = (newest / MANIFEST).read_bytes()
    for number, (name, change) in enumerate(FORGERIES.items(), start=1):
        forge(newest, change)
        if "generators" not in name:  # an export needs none
            with pytest.raises(CheckpointError):
                TrainedRun(run, "4")
        said: list[str] = []
        found = find_checkpoint(recipe, run, say=said.append)
        assert found, name
        assert found[0].name == "checkpoint-3", name
        assert "resumes from checkpoint-3" in said[0], name
        aside = run / ("checkpoint-4.damaged" if number == 1 else f"checkpoint-4.damaged-{number}")
        assert str(aside.name) in said[0]
        shutil.copytree(aside, newest)
        (newest / MANIFEST).write_bytes(whole)
    (newest / MANIFEST).write_text("[" * 100_000)
    (run / "checkpoint-3" / TENSORS).write_bytes(b"x" * (run / "checkpoint-3" / TENSORS).stat().st_size)
    said = []
    found = find_checkpoint(recipe, run, say=said.append)
    assert found
    assert found[1].step == 2
    assert ["2 steps lost" in said[0], "1 step lost" in said[1]] == [True, True]
    assert [path.name for path in list_checkpoints(run)] == ["checkpoint-1", "checkpoint-2"]


def test_a_run_falls_back_by_itself_and_ends_with_the_same_bits(trained: tuple[Recipe, Path]) -> None:
    recipe, run = trained
    weights = (run / "checkpoint-4" / "adapter_model.safetensors").read_bytes()
    file = run / "checkpoint-4" / TENSORS
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    result = train(recipe, display=Silent())
    assert result.step == 4
    assert (run / "checkpoint-4" / "adapter_model.safetensors").read_bytes() == weights
    assert any("checkpoint-4" in text and "1 step lost" in text for text in notices_of(run))


def test_only_where_none_is_intact_is_it_refused(trained: tuple[Recipe, Path]) -> None:
    recipe, run = trained
    for path in list_checkpoints(run):
        (path / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match="manifest is damaged") as caught:
        find_checkpoint(recipe, run)
    assert "no earlier checkpoint is intact" in caught.value.fix
    assert len(list_checkpoints(run)) == 4  # nothing was moved


def test_a_changed_key_needs_to_be_allowed_and_is_told(trained: tuple[Recipe, Path]) -> None:
    recipe, run = trained
    other = recipe.model_copy(update={"train": recipe.train.model_copy(update={"lr": 1e-4, "steps": 5})})
    with pytest.raises(CheckpointError, match=r"since checkpoint-4: train\.lr: 0\.01 -> 0\.0001\n") as caught:
        train(other, display=Silent(), allow=["train.steps"])
    assert "--allow-change train.lr;" in caught.value.fix
    train(other, display=Silent(), allow=["train.lr", "train.steps"])
    assert any(text.startswith("train.lr: 0.01 -> 0.0001 since checkpoint-4") for text in notices_of(run))
    last = [e for e in read_log(run) if e["event"] == "step"][-1]
    assert last["step"] == 5
    assert last["lr"] < 1e-4
    train(other, display=Silent())  # from here on it is the run's own


def test_a_step_of_auto_is_a_number_of_the_run_that_stays(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """More epochs alone would make it larger: the run's position in the data would mean other rows."""
    sizes = {"batch_tokens": "auto", "capacity": 16384}
    recipe = recipe_for(train=sizes)
    facts = check_run(recipe, report=lambda *_: None)
    train(recipe, display=Silent())
    (start,) = [event for event in read_log(tmp_path / "run") if event["event"] == "start"]
    then = start["recipe"]["train"]
    assert (then["batch_tokens"], then["capacity"], start["steps"]) == (128, 128, facts.steps)
    told = f"train.batch_tokens: auto is 128, train.capacity: 128: {facts.steps} steps"
    assert told in facts.notices
    assert told in notices_of(tmp_path / "run")
    longer = recipe_for(train={**sizes, "epochs": 40})
    assert "auto is 256," in " ".join(check_run(longer, report=lambda *_: None).notices)
    train(longer.model_copy(update={"train": longer.train.model_copy(update={"steps": 2 * start["steps"]})}), display=Silent(),
          allow=["train.epochs", "train.steps"])  # fmt: skip
    again = [event for event in read_log(tmp_path / "run") if event["event"] == "start"][-1]
    assert again["resumed_from"] == start["steps"]
    assert again["recipe"]["train"]["batch_tokens"] == 128


@pytest.mark.parametrize(
    ("key", "said"), [("train.rl", "did you mean `train.lr`"), ("lora.r", "shape"), ("data.train", "different rows")]
)
def test_what_cannot_be_allowed(key: str, said: str, recipe_for: RecipeFor) -> None:
    with pytest.raises(CommandError, match=f"--allow-change {key}") as caught:
        train(recipe_for(), display=Silent(), allow=[key])
    assert said in caught.value.why + caught.value.fix
