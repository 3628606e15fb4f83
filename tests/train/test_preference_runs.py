"""Whole runs on preference data: what they write down, and what a resumed one takes its reference from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from watching import RecipeFor, Silent

from pronghorn.errors import RecipeError
from pronghorn.folders import cache_folder
from pronghorn.report.html import render_page
from pronghorn.report.run_log import read_log
from pronghorn.train.loop import train
from pronghorn.train.run.run_evaluation import evaluate_run
from samples import pair_rows

NAMES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in pair_rows(24)))
    return str(file)


def settings(pairs: str, **more: Any) -> dict[str, Any]:
    return {
        "objective": {"name": "dpo", "sft_weight": 0.1},
        "data": {"train": [pairs], "eval": 0.25},
        "eval": {"every": 2, "generations": 0, "best": "rewards/accuracies"},
        "train": {"steps": 4, "lr": 2e-2},
        **more,
    }


def test_a_run_shows_what_people_watch(pairs: str, recipe_for: RecipeFor) -> None:
    recipe = recipe_for(**settings(pairs))
    result = train(recipe, display=Silent())
    events = read_log(Path(recipe.output))
    steps = [event for event in events if event["event"] == "step"]
    assert all(math.isfinite(event[name]) for event in steps for name in NAMES)
    assert steps[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-4)  # the model is its own reference
    held_out = [event for event in events if event["event"] == "eval"]
    assert all(name in event["metrics"] for event in held_out for name in NAMES)
    assert "perplexity" not in held_out[-1]
    assert result.best_step in (2, 4)
    page = render_page(events)
    assert all(f">{title}<" in page for title in ("Rewards", "Accuracy", "Log-probability"))
    figures = evaluate_run(Path(recipe.output), "last", data=None, report=lambda *_: None)
    for name in NAMES:
        assert figures["figures"][name] == pytest.approx(held_out[-1]["metrics"][name], rel=1e-4, abs=1e-4)


def test_with_all_weights_trained_the_reference_is_the_model_before(pairs: str, recipe_for: RecipeFor) -> None:
    changes = settings(pairs, method="full", train={"steps": 2, "lr": 1e-3})
    first = recipe_for(**changes)
    train(first, display=Silent())
    longer = first.model_copy(update={"train": first.train.model_copy(update={"steps": 3})})
    for file in (cache_folder() / "references").iterdir():
        file.unlink()
    with pytest.raises(RecipeError, match="the reference model's log-probabilities are missing"):
        train(longer, display=Silent(), allow=("train.steps",))
