"""train.average: the mean of the last adapters is that of the weights after each step, and rows decide whether it is kept."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rank_processes import in_ranks
from rich.console import Console
from watching import RecipeFor, Silent, events_of, losses_of, same, stop_at, weights

from pronghorn.errors import Interrupted
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Train
from pronghorn.report.run_log import read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.report.summary import summary
from pronghorn.train.checkpoint.checkpoint import verify_checkpoint
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.run import average
from pronghorn.train.run.average import Average, window
from pronghorn.train.run.evaluate import Evaluation
from tables import table

CONSTANT = {"steps": 9, "lr": 3e-3, "schedule": "constant", "warmup": 0.0}


def recipe_of(recipe_for: RecipeFor, folder: Path, **changes: Any) -> Recipe:
    base: dict[str, Any] = {"eval": {"every": 100, "generations": 0}, "checkpoint": {"every": 1, "keep": 99}}
    return recipe_for(output=str(folder), **base | {"train": CONSTANT | {"average": 0.5}} | changes)


def test_a_mean_that_is_kept_is_that_of_the_last_steps_wherever_the_run_was_stopped(
    recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(average, "SURE", -100.0)  # kept, whatever the few rows show
    plain = train(recipe_of(recipe_for, tmp_path / "plain", train=CONSTANT), display=Silent())
    whole = train(recipe_of(recipe_for, tmp_path / "whole"), display=Silent())
    (event,) = events_of(whole.folder, "average")
    assert (event["kept"], event["step"], event["steps"]) == (True, 9, 5)
    each = [weights(plain.folder / f"checkpoint-{step}") for step in range(5, 10)]
    found = weights(whole.checkpoint or Path())
    for name, mean in found.items():
        assert torch.allclose(mean, torch.stack([one[name] for one in each]).double().mean(0).float(), rtol=1e-5, atol=1e-8)
    last, kept = events_of(whole.folder, "eval")
    shown = run_stats(read_log(whole.folder))
    assert shown.perplexity == (kept if kept["loss"] < last["loss"] else last)["perplexity"]  # of one step, both
    assert (event["last_loss"], event["loss"]) == (last["loss"], kept["loss"])
    assert kept["loss"] != last["loss"] == losses_of(plain.folder, "eval")[-1]
    assert verify_checkpoint(whole.checkpoint or Path())["values"]["average"] == {"first": 5, "count": 5, "kept": True}
    console = Console(file=io.StringIO(), width=400)
    console.print(summary(read_log(whole.folder)))
    assert "mean of the weights after the last 5 steps" in console.file.getvalue()  # type: ignore[attr-defined]
    for step in (3, 5, 7):
        with pytest.raises(Interrupted):
            train(recipe_of(recipe_for, tmp_path / "parts"), display=stop_at(step))
    parts = train(recipe_of(recipe_for, tmp_path / "parts"), display=Silent())
    for file in ("training_state.safetensors", "adapter_model.safetensors"):
        assert (whole.folder / "checkpoint-9" / file).read_bytes() == (parts.folder / "checkpoint-9" / file).read_bytes()
    again = Silent()
    train(recipe_of(recipe_for, tmp_path / "parts"), display=again)  # the mean is not averaged again
    assert not [one for one in again.events if one["event"] in ("step", "average")]

    def ranks(world: World) -> bool:
        monkeypatch.setattr(average, "SURE", -100.0)
        two = recipe_of(recipe_for, tmp_path / "two")
        train(two, display=Silent(), world=world)
        return events_of(two.output, "average")[0]["kept"] is True

    assert in_ranks(ranks, tmp_path / "ranks") == [(0, "True")] * 2


def test_a_mean_that_is_not_shown_to_be_better_changes_nothing(recipe_for: RecipeFor, tmp_path: Path) -> None:
    """The loss still falls, and the mean lags behind."""
    calm = CONSTANT | {"schedule": "wsd", "decay": 4}
    plain = train(recipe_of(recipe_for, tmp_path / "plain", train=calm), display=Silent())
    whole = train(recipe_of(recipe_for, tmp_path / "whole", train=calm | {"average": 3}), display=Silent())
    (event,) = events_of(whole.folder, "average")
    assert (event["kept"], event["steps"]) == (False, 3)
    assert same(weights(whole.checkpoint or Path()), weights(plain.checkpoint or Path()))
    assert len(events_of(whole.folder, "eval")) == 1
    longer = train(recipe_of(recipe_for, tmp_path / "whole", train=calm | {"average": 3, "steps": 11}), display=Silent())
    planned = train(recipe_of(recipe_for, tmp_path / "planned", train=calm | {"average": 3, "steps": 11}), display=Silent())
    for file in ("training_state.safetensors", "adapter_model.safetensors"):
        read = [(run.folder / "checkpoint-11" / file).read_bytes() for run in (longer, planned)]
        assert read[0] == read[1]  # which goes on from before the decay, and so before the mean


def test_rows_decide() -> None:
    counts = np.full(100, 10)
    noise = np.random.default_rng(1).normal(0, 1, 100)

    def evaluation(losses: Any) -> Evaluation:
        return Evaluation(float(losses.sum() / counts.sum()), 1000, losses_R=losses)

    last = np.full(100, 20.0)
    mean = Average(count=5)
    for shift, kept in ((-0.5, True), (0.0, False), (0.5, False)):
        facts = mean.decided(9, evaluation(last + noise - noise.mean() + shift), evaluation(last), counts)
        assert (facts["kept"], mean.kept) == (kept, kept)
        assert facts["change"] == pytest.approx(shift / 10)
        assert facts["change_error"] == pytest.approx(noise.std(ddof=1) / 100, rel=1e-6)


@table(
    ("share", "schedule", "early", "steps"),
    [
        (0.05, "cosine", None, range(96, 101)),
        (7, "cosine", None, range(94, 101)),
        (None, "wsd", None, range(0)),
        (0.05, "wsd", None, range(96, 101)),
        (0.5, "wsd", None, range(81, 101)),  # inside the decay
        (0.5, "wsd", 40, range(41, 51)),  # as in a run that was planned for 50 steps
        (500, "constant", None, range(1, 101)),
    ],
)
def test_which_steps_are_averaged(share: Any, schedule: Any, early: int | None, steps: range) -> None:
    spec = Train(average=share, schedule=schedule)
    decays = spec.decays(100, early)
    assert window(spec, decays.stop, decays) == steps


@table(
    ("changes", "said"),
    [
        ({"method": "full"}, "it averages adapters"),
        ({"data": {"train": "a.jsonl"}}, "set data.eval: 0.05"),
        ({"objective": "dpo"}, "objective dpo has no loss of each row"),
        ({"world": {"shard": "experts"}, "eval": {"generations": 0}}, "each rank has adapters of other experts"),
    ],
)
def test_what_cannot_be_averaged_is_refused(changes: dict[str, Any], said: str) -> None:
    base: dict[str, Any] = {"model": "m", "data": {"train": "a.jsonl", "eval": 0.1}, "train": {"average": 0.05}}
    with pytest.raises(ValidationError, match=f"train.average: .*{said}"):
        Recipe.model_validate(base | changes)
