"""What a finished run suggests: each rule speaks when its change saves enough, and every suggestion works when followed."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from synthetic_run import RECIPE, synthetic_events

from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.report import advice as module
from pronghorn.report.advice import advise, changed, remark
from pronghorn.report.run_stats import RunStats, run_stats
from pronghorn.report.summary import render, summary
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
    "eval.stop": ({"step": 100}, {}, {"best_eval": 0.5, "best_eval_step": 100, "last_eval": 0.9}),
}


@pytest.fixture(autouse=True)
def _a_machine_with_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: 64)


def run_with(stages: dict[str, float] | None = None, recipe: dict[str, Any] | None = None, **changes: Any) -> RunStats:
    run = run_stats(synthetic_events(800))
    stages = stages or {"step": 95.0, "load": 5.0}
    facts = {"best_eval": None, "improved_steps": (), "stages": {name: float(spent) for name, spent in stages.items()}}
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


@table(
    ("stages", "changes"),
    [
        ({"step": 95, "wait": 5}, {}),
        ({"step": 61, "load": 39}, {}),
        ({"step": 9, "evaluate": 9}, {}),  # half the time, and less than ten seconds
        ({"step": 94, "checkpoint": 6}, {"improved_steps": (100, 200, 300, 400, 500, 600, 700, 800)}),  # written anyway
        ({"step": 60, "optimizer": 40}, {"step": 100}),  # too few steps to make them fewer
        ({"step": 100}, {"best_eval": 0.5, "best_eval_step": 400, "last_eval": 0.505}),  # noise
        ({"step": 100}, {"best_eval": 0.5, "best_eval_step": 700, "last_eval": 0.9}),  # one evaluation later it was the end
    ],
)
def test_what_saves_too_little_is_not_suggested(stages: dict[str, float], changes: dict[str, Any]) -> None:
    assert settings(run_with(stages, efficiency=0.95, **changes)) == []


def test_a_single_evaluation_is_not_made_rarer() -> None:
    single = values_in(RECIPE, {"eval": {"every": 800}, "data": {"eval": "held_out.jsonl"}})
    assert settings(run_with({"step": 70, "evaluate": 30}, recipe=single)) == []
    assert settings(run_with({"step": 70, "evaluate": 30}, recipe=RECIPE, step=58))[:1] == [{"data.eval": 0.01}]


def test_evaluation_is_made_rare_enough_but_not_rarer() -> None:
    """0.05 of 800 steps are 40: 20 evaluations of 54 s. Eight times rarer, 3 are left, and take less than a tenth."""
    often = values_in(RECIPE, {"eval": {"every": 0.05, "stop": None}})
    assert settings(run_with({"step": 46, "evaluate": 54}, recipe=often))[0] == {"eval.every": 320}
    assert settings(run_with({"step": 75, "evaluate": 25}, recipe=often))[0] == {"eval.every": 160}
    assert {"eval.every": 320} not in settings(run_with({"step": 46, "evaluate": 54}, recipe=often, state="early stop"))


@table(("cores", "workers", "wanted"), [(3, 2, 3), (16, 12, 16), (4, None, 4), (2, 0, 2), (2, 2, None), (2, 8, None)])
def test_no_more_workers_are_suggested_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int | None, wanted: int | None
) -> None:
    monkeypatch.setattr(module, "_cores", lambda: cores)
    recipe = {**RECIPE, "data": {"train": ["a"], "eval": "b"} | ({} if workers is None else {"workers": workers})}
    assert settings(run_with({"step": 50, "wait": 50}, recipe)) == ([] if wanted is None else [{"data.workers": wanted}])


@table(
    ("stages", "text"),
    [
        ({"step": 75, "tokenize": 20, "read": 5}, "none: reading and tokenizing took 25 % of the time"),
        ({"step": 50, "imports": 20, "load": 30}, "none: imports and loading took 50 % of a short run"),
        ({"step": 70, "reference": 30}, "none: scoring with the reference model took 30 % of the time"),
        ({"step": 85, "other": 15}, "none: 15 % of the time was in no recorded stage"),
        ({"step": 95, "load": 5}, "none: training took 95 % of the time"),
        ({"load": 5}, "none yet: no training step is recorded"),
    ],
)
def test_without_a_suggestion_the_largest_other_share_is_told(stages: dict[str, float], text: str) -> None:
    assert remark(run_with(stages)).startswith(text)


def test_suggestions_are_shown_with_what_they_save() -> None:
    events = synthetic_events(800)
    for event in events:
        if event["event"] == "stages":
            event["seconds"] = {"step": 460.0, "evaluate": 540.0}
    console = Console(file=io.StringIO(), width=100)
    console.print(render(summary(events)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "suggestions for the next run" in text
    assert "  set eval.every: 200 (now 100): saves about" in text
    assert "8 evaluations took 54 % of the time; this leaves 4 of them" in text
