"""Runs of one process that share a model: the same bits as runs of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from watching import RecipeFor, Silent, events_of, losses_of, same, weights

from pronghorn.errors import CheckpointError
from pronghorn.recipe import Recipe
from pronghorn.report.stages import Stages
from pronghorn.sweep.judging import judged
from pronghorn.train.loop import train
from pronghorn.train.run.steps import Pause
from pronghorn.train.setup.kept import KeptSession
from pronghorn.train.step import graphed_step
from pronghorn.train.step.optim import trainable

DROPOUT = {"r": 4, "dropout": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"lora": DROPOUT},
    "adamw_8bit": {"lora": DROPOUT, "train": {"optimizer": "adamw_8bit"}},
    "wsd": {"lora": DROPOUT, "train": {"schedule": "wsd", "decay": 4}},
    "graphed": {"train": {"optimizer": "adamw_8bit"}},  # what a GPU captures; its layers have no dropout
}


def recipe_of(recipe_for: RecipeFor, folder: Path, lr: float, kind: str) -> Recipe:
    changed = KINDS[kind]
    train = {"lr": lr, "steps": 8, **changed.get("train", {})}
    recipe: Recipe = recipe_for(**changed | {"train": train}, checkpoint={"every": 8}, output=str(folder))
    return recipe


def run(recipe: Recipe, kept: KeptSession | None = None, share: float = 1.0) -> None:
    train(recipe, display=Silent(), stages=Stages(), kept=kept, pause=Pause(share))


def addresses(kept: KeptSession) -> set[int]:
    """Weights and moments."""
    assert kept.session is not None
    states = [state[key] for state in kept.session.optimizer.state.values() for key in state]
    return {tensor.data_ptr() for tensor in (*trainable(kept.session.model).values(), *states)}


@pytest.mark.parametrize("kind", KINDS)
def test_runs_that_take_turns_in_one_session_are_runs_of_their_own(
    recipe_for: RecipeFor, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both pause at step 3 while the other runs; dropout draws random numbers."""
    if kind == "graphed":
        monkeypatch.setattr(graphed_step, "why_not_graphed", lambda *_: "")
    alone = [recipe_of(recipe_for, tmp_path / f"alone-{lr}", lr, kind) for lr in (1e-2, 3e-3)]
    both = [recipe_of(recipe_for, tmp_path / f"both-{lr}", lr, kind) for lr in (1e-2, 3e-3)]
    for recipe in alone:
        run(recipe)
    kept, places = KeptSession(), list[set[int]]()
    for share in (0.3, 0.3, 1.0):
        for recipe in both:
            run(recipe, kept, share)
            places.append(addresses(kept))
            assert kept.session is not None
            assert isinstance(kept.session.take_step, graphed_step.GraphedStep) == (kind == "graphed")
            judged(kept.session, 0, decays=True, stages=Stages(), progress=lambda *_: None)  # steps that are thrown away
    assert all(one == places[0] for one in places), "a captured graph would write where nobody reads"
    for one, other in zip(alone, both, strict=True):
        assert losses_of(one.output) == losses_of(other.output)
        assert losses_of(one.output, "eval") == losses_of(other.output, "eval")
        assert same(weights(Path(one.output) / "checkpoint-8"), weights(Path(other.output) / "checkpoint-8"))
        assert [event["reason"] for event in events_of(other.output, "end")] == ["paused", "paused", "done"]
    assert losses_of(alone[0].output) != losses_of(alone[1].output)


def test_a_run_of_another_shape_is_set_up_anew(recipe_for: RecipeFor, tmp_path: Path) -> None:
    kept = KeptSession()
    small, large = (recipe_for(lora={"r": r}, train={"steps": 2}, output=str(tmp_path / f"{r}")) for r in (2, 4))
    run(small, kept)
    before = kept.session
    run(large, kept)
    assert before is not None
    assert kept.session is not None
    assert before.model is not kept.session.model


def test_a_session_in_use_refuses_a_checkpoint_of_other_rows(recipe_for: RecipeFor, tmp_path: Path) -> None:
    recipe = recipe_for(train={"steps": 2}, output=str(tmp_path / "run"))
    kept = KeptSession()
    run(recipe, kept)
    assert kept.session is not None
    kept.session.keys["data"] = "tokens:other"
    with pytest.raises(CheckpointError, match="training data changed"):
        run(recipe, kept)
