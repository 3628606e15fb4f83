"""Answers at the evaluations of real runs: scored, logged, kept beside the base model's, deciding which step was the best."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import in_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from watching import RecipeFor, Silent, events_of, notices_of, saved, stop_at

from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.errors import CommandError, Interrupted, RecipeError
from pronghorn.evaluation.questions import held_out_questions
from pronghorn.generation.answering import answers
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.train.checkpoint.checkpoint import verify_checkpoint
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.run import evaluate
from pronghorn.train.source import source_of
from samples import make_lively_model

# What a model of random weights says differs from step to step; so does this figure of it, and it is drawn from thin air.
OWN = """
import random, torch
def metric(prompt, expected, answer):
    random.seed(sum(answer.encode())); torch.manual_seed(3)
    return {"noise": random.random(), "long": len(answer)}
"""


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(make_lively_model(), tmp_path_factory.mktemp("lively"))


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text("utf-8").splitlines()]


def untrained_answers(recipe: Recipe) -> list[str]:
    """By the model as it was before, and by nothing of what runs in a run."""
    tokenizer = load_tokenizer(recipe.model, recipe.data)
    table = source_of(recipe, tokenizer, report=lambda *_: None, stage=lambda _: nullcontext()).held_out
    asked = held_out_questions(table, tokenizer, 100)
    model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32)
    return [one.text for one in answers(model, tokenizer, [question.ids for question in asked], max_new_tokens=3)]


@pytest.mark.parametrize("method", ["lora", "full"])
def test_answers_stand_beside_the_base_models(recipe_for: RecipeFor, lively: str, method: str) -> None:
    recipe = recipe_for(
        model=lively, method=method, train={"steps": 4, "lr": 3e-2}, eval={"every": 2, "metrics": ["rouge_l", "exact_match"]}
    )
    run = train(recipe, display=Silent()).folder
    base = untrained_answers(recipe)
    lines = lines_of(run)
    assert [line["base"] for line in lines] == base
    assert [line["answer"] for line in lines] != base
    assert all(set(line["scores"]) == {"rouge_l", "exact_match"} and line["step"] == 4 for line in lines)
    (of_base,), (first, last) = events_of(run, "base"), events_of(run, "eval")
    assert of_base["samples"] == last["samples"] == len(lines) == 8
    assert last["metrics"]["rouge_l"] == pytest.approx(sum(line["scores"]["rouge_l"] for line in lines) / 8)
    assert [shown["base"] for shown in last["generations"]] == base[:1]
    assert last["cut"] <= 8
    measured = run_stats(read_log(run)).metrics["rouge_l"]
    assert (measured.base, measured.first, measured.last) == (
        of_base["metrics"]["rouge_l"],
        first["metrics"]["rouge_l"],
        last["metrics"]["rouge_l"],
    )


def test_the_best_checkpoint_is_the_best_by_the_metric(recipe_for: RecipeFor, lively: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    recipe = recipe_for(model=lively, train={"steps": 6, "lr": 3e-2}, eval={"every": 1, "best": "noise"})
    result = train(recipe, display=Silent(), metric_file=tmp_path / "own.py")
    values = [event["metrics"]["noise"] for event in events_of(result.folder, "eval")]
    assert len(set(values)) > 2
    assert result.best_step == 1 + values.index(max(values))
    assert [event["step"] for event in events_of(result.folder, "eval") if event["best"]][-1] == result.best_step
    assert run_stats(read_log(result.folder)).decides == "noise"
    assert events_of(result.folder, "end")[-1]["best"] == {"step": result.best_step, "noise": max(values)}


def test_a_stopped_run_goes_on_as_if_it_had_not_been(recipe_for: RecipeFor, lively: str, tmp_path: Path) -> None:
    """With a metric that spoils every random number: weights, dropout included, and what is the best are the same."""
    (tmp_path / "own.py").write_text(OWN)
    changes: dict[str, Any] = {
        "model": lively,
        "train": {"steps": 4},
        "lora": {"r": 4, "dropout": 0.3},
        "eval": {"every": 2, "best": "noise"},
    }
    whole, parts = (recipe_for(**changes, output=str(tmp_path / name)) for name in ("whole", "parts"))
    plain = train(recipe_for(**changes | {"eval": {"every": 2}}, output=str(tmp_path / "plain")), display=Silent())
    train(whole, display=Silent(), metric_file=tmp_path / "own.py")
    with pytest.raises(Interrupted):
        train(parts, display=stop_at(3), metric_file=tmp_path / "own.py")
    train(parts, display=Silent(), metric_file=tmp_path / "own.py")
    ends = [tmp_path / name / "checkpoint-4" for name in ("whole", "parts")]
    assert plain.checkpoint
    one, other, without = (load_file(end / "adapter_model.safetensors") for end in (*ends, plain.checkpoint))
    assert all(torch.equal(one[key], other[key]) and torch.equal(one[key], without[key]) for key in one)
    assert verify_checkpoint(ends[0])["values"]["progress"] == verify_checkpoint(ends[1])["values"]["progress"]
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "parts")
    assert len(events_of(tmp_path / "parts", "base")) == 1  # found again, not asked again


def test_answers_stop_a_run_alike_after_a_resume_and_on_two_ranks(
    recipe_for: RecipeFor, lively: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scores of each question are in the checkpoint."""
    (tmp_path / "own.py").write_text(OWN)
    own = {"metric_file": tmp_path / "own.py"}
    evaluated = {"every": 1, "best": "noise", "stop": {"patience": 2, "min_delta": 0.0}}

    def recipe(name: str) -> Recipe:
        train_on = {"steps": 8, "lr": 3e-2, "capacity": 128}
        return recipe_for(model=lively, train=train_on, eval=evaluated, output=str(tmp_path / name))

    def few(world: World) -> tuple[int, str]:
        monkeypatch.setattr(evaluate, "FEWEST_QUESTIONS", 8)
        found = train(recipe("two"), display=Silent(), world=world, **own)
        return found.step, found.why

    told = train(recipe("all"), display=Silent(), **own)
    assert (told.reason, told.step) == ("done", 8)
    assert any(text.startswith("eval.stop does not stop this run: noise is of 8 questions") for text in notices_of(told.folder))
    monkeypatch.setattr(evaluate, "FEWEST_QUESTIONS", 8)
    whole = train(recipe("whole"), display=Silent(), **own)
    assert (whole.reason, 2 < whole.step < 8) == ("early stop", True)
    assert "paired test of 8 questions" in whole.why
    evals = events_of(whole.folder, "eval")
    assert [set(event.get("paired", {"better": 0, "worse": 0, "chance": 1})) for event in evals] == [
        {"better", "worse", "chance"}
    ] * len(evals)
    assert all(event["metric_errors"]["noise"] > 0 and "deciding" not in event for event in evals)
    with pytest.raises(Interrupted):
        train(recipe("parts"), display=stop_at(2), **own)
    parts = train(recipe("parts"), display=Silent(), **own)
    assert (parts.step, parts.why) == (whole.step, whole.why)
    assert in_ranks(few, tmp_path / "ranks") == [(0, str((whole.step, whole.why)))] * 2


def test_a_base_model_that_is_gone_is_told_of(recipe_for: RecipeFor) -> None:
    with pytest.raises(Interrupted):
        train(recipe_for(method="full", train={"steps": 4}), display=stop_at(1))
    recipe = recipe_for(method="full", train={"steps": 4}, eval={"every": 2, "metrics": "rouge_l"})
    run = train(recipe, display=Silent()).folder
    assert {line["base"] for line in lines_of(run)} == {None}
    told = [event["text"] for event in events_of(run, "notice") if "base model's answers are not shown" in event["text"]]
    assert len(told) == 1


def test_a_broken_metric_of_ones_own_is_refused_before_step_one(recipe_for: RecipeFor, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def metric(prompt, expected, answer):\n    return 1 / 0\n")
    with pytest.raises(CommandError, match="ZeroDivisionError"):
        train(recipe_for(), display=Silent(), metric_file=tmp_path / "own.py")
    with pytest.raises(RecipeError, match=r"eval\.best: mine is not measured"):
        train(recipe_for(eval={"best": "mine"}), display=Silent())
