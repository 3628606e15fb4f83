"""What a finished run suggests: each rule speaks when its change saves enough, and every suggestion works when followed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from synthetic_run import RECIPE, synthetic_events

from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.report import advice as module
from pronghorn.report.advice import advise, changed
from pronghorn.report.run_stats import Curve, RunStats, run_stats
from pronghorn.train.setup.check import check_run
from tables import table

TOLD = {"metrics": ["exact_match"], "samples": 80}
# What is at stake -> (seconds by stage, changes of the recipe, further facts of the run): a row for every kind of suggestion.
KINDS: dict[str, tuple[dict[str, float], dict[str, Any], dict[str, Any]]] = {
    "eval.every": ({"step": 46, "evaluate": 40, "answers": 14}, {}, {}),
    "eval.samples": ({"step": 60, "answers": 40}, {"eval": TOLD | {"every": 800}}, {}),
    "eval.generations": ({"step": 60, "answers": 40}, {"eval": {"every": 800, "generations": 3}}, {}),
    "data.eval": ({"step": 60, "evaluate": 40}, {"eval": {"every": 800}}, {}),
    "checkpoint.every": ({"step": 50, "checkpoint": 50}, {"checkpoint": {"every": 100}}, {}),
    "data.workers": ({"step": 50, "wait": 50}, {}, {}),
    "train.capacity": ({"step": 100}, {}, {"efficiency": 0.6}),
    "train.batch_tokens": ({"step": 60, "optimizer": 40}, {}, {}),
    "eval.stop": ({"step": 100}, {}, {"evaluation": Curve(best=0.5, best_step=100, last=0.9)}),
}


@pytest.fixture(autouse=True)
def _a_machine_with_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: 64)


def run_with(stages: dict[str, float] | None = None, recipe: dict[str, Any] | None = None, **changes: Any) -> RunStats:
    run = run_stats(synthetic_events(800))
    stages = stages or {"step": 95.0, "load": 5.0}
    facts = {"evaluation": Curve(), "improved_steps": (), "stages": {name: float(spent) for name, spent in stages.items()}}
    return dataclasses.replace(run, recipe=RECIPE if recipe is None else recipe, **facts | changes)


def settings(run: RunStats) -> list[dict[str, Any]]:
    return [one.settings for one in advise(run)]


def values_in(recipe: dict[str, Any], words: dict[str, Any]) -> dict[str, Any]:
    """A section's keys beside those that it has."""
    return {**recipe, **{name: {**recipe.get(name, {}), **keys} for name, keys in words.items()}}


@pytest.mark.parametrize("key", KINDS)
def test_every_suggestion_passes_check_when_followed(key: str, recipe_for: Callable[..., Recipe]) -> None:
    seconds, words, facts = KINDS[key]
    small = recipe_for(data={"eval": 0.2}, train={"batch_tokens": 1024, "capacity": 256}, eval={"stop": None})
    recipe = values_in(values_in(small.model_dump(mode="json"), {"eval": {"every": 50}}), words)
    run = run_with(seconds, recipe, eval_documents=500, data_tokens=100_000, **facts)
    found = {name: one for one in advise(run) for name in one.settings}
    assert key in found, f"{key} is not suggested"
    for one in found.values():
        followed = Recipe.model_validate(changed(recipe, one.settings))
        assert followed != Recipe.model_validate(recipe)
        check_run(followed, report=lambda *_: None)
        # and as words of the command line, as people would type them
        typed = [f"{name}={json.dumps(value)}" for name, value in one.settings.items()]
        assert parse_recipe(json.dumps(recipe), typed) == followed
        assert all(f"{name}: " in one.change for name in one.settings)


def test_every_rule_has_a_row_above() -> None:
    runs = [run_with(seconds, values_in(RECIPE, words), **facts) for seconds, words, facts in KINDS.values()]
    assert [rule.__name__ for rule in module.RULES if not any(list(rule(run)) for run in runs)] == []


@table(
    ("stages", "expected"),
    [
        ({"step": 60, "wait": 10, "evaluate": 30}, ["eval.every", "data.eval", "data.workers"]),
        ({"step": 50, "wait": 30, "evaluate": 20}, ["data.workers", "data.eval", "eval.every"]),
        ({"step": 46, "evaluate": 54}, ["eval.every", "data.eval"]),
    ],
)
def test_the_largest_saving_comes_first(stages: dict[str, float], expected: list[str]) -> None:
    found = advise(run_with(stages, efficiency=0.95))
    assert [next(iter(one.settings)) for one in found][:1] == expected[:1]
    assert sorted(one.seconds for one in found) == [one.seconds for one in found][::-1]
    assert {key for one in found for key in one.settings} <= set(expected)  # nothing that saves 2 % of the time


def test_a_suggestion_that_the_recipe_refuses_is_not_made() -> None:
    """One pack a step: a pack of twice the size would not fit into the step."""
    one_pack = values_in(RECIPE, {"train": {"batch_tokens": 16384}})
    assert {"train.capacity": 32768} in settings(run_with(efficiency=0.6))
    assert settings(run_with(efficiency=0.6, recipe=one_pack)) == []
    assert settings(run_with(efficiency=0.6, ranks=4)) == []  # of 4 packs 2 are left, for 4 ranks
    assert settings(run_with(efficiency=0.6, recipe=values_in(RECIPE, {"train": {"batch_rows": 8}}))) == []
    assert settings(run_with(efficiency=0.6, room_for_larger_packs=False)) == []
    assert settings(run_with(efficiency=0.6, data_tokens=33_000)) == []  # two packs of which one is nearly empty stay that
    assert settings(run_with({"step": 50, "wait": 50}, recipe={"train": {"capacity": 0}})) == []  # no recipe of ours


@table(("cores", "workers", "wanted"), [(3, 2, 3), (16, 12, 16), (4, None, 4), (2, 0, 2), (2, 2, None), (2, 8, None)])
def test_no_more_workers_are_suggested_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | None, wanted: int | None
) -> None:
    monkeypatch.setattr(module, "_cores", lambda: cores)
    recipe = {**RECIPE, "data": {"train": ["a"], "eval": "b"} | ({} if workers is None else {"workers": workers})}
    assert settings(run_with({"step": 50, "wait": 50}, recipe)) == ([] if wanted is None else [{"data.workers": wanted}])
