"""`pronghorn eval`: the scores of a run that is over are those it had, beside the base model's, by whatever is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watching import saved

from pronghorn.cli import main
from pronghorn.errors import CommandError
from pronghorn.recipe import Recipe
from pronghorn.report.display import JsonDisplay
from pronghorn.report.run_log import read_log
from pronghorn.train.loop import train
from pronghorn.train.run import run_evaluation
from pronghorn.train.run.run_evaluation import EvaluationRequest, evaluate_run
from samples import chat_rows, make_lively_model, write_rows
from tables import table


def trained(method: str, folder: Path) -> Iterator[Path]:
    recipe = Recipe.model_validate(
        {
            "model": saved(make_lively_model(), folder / "model"),
            "method": method,
            "precision": "fp32",
            "lora": {"r": 4},
            "data": {
                "train": str(write_rows(folder / "train.jsonl", chat_rows(20))),
                "max_length": 128,
                "workers": 0,
                "eval": str(write_rows(folder / "eval.jsonl", chat_rows(6, seed=1))),
            },
            "train": {"steps": 2, "batch_tokens": 512, "capacity": 256, "lr": 3e-2},
            "eval": {"every": 2, "metrics": ["rouge_l"], "max_new_tokens": 4, "best": "rouge_l"},
            "output": str(folder / "run"),
        }
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PRONGHORN_CACHE", str(folder / "cache"))
        environment.setattr("torch.cuda.is_available", lambda: False)
        yield train(recipe, display=JsonDisplay()).folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from trained("lora", tmp_path_factory.mktemp("evaluated"))


def evaluated(run: Path, **asked: Any) -> dict[str, Any]:
    return evaluate_run(run, "last", data=None, report=lambda *_: None, asked=EvaluationRequest(**asked))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_its_scores_and_the_base_models_are_those_of_the_run(method: str, run: Path, tmp_path: Path) -> None:
    run = run if method == "lora" else next(trained(method, tmp_path))
    figures = evaluated(run, base=True, answers=tmp_path / "a.jsonl")
    events = {event["event"]: event for event in read_log(run)}
    assert figures["metrics"] == events["eval"]["metrics"]
    assert figures["base_metrics"] == events["base"]["metrics"]
    assert figures["loss"] == pytest.approx(events["eval"]["loss"], rel=1e-5)
    written, stored = (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for path in (tmp_path / "a.jsonl", run / "answers.jsonl")
    )
    assert written == stored
    assert any(line["answer"] != line["base"] for line in written)


def test_the_command_line_has_the_last_word(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def metric(prompt, expected, answer):\n    return len(answer)\n")
    figures = evaluated(
        run,
        metric_file=tmp_path / "mine.py",
        spec={"metrics": ["regex", "exact_match"], "regex": r"\w", "samples": 3, "max_new_tokens": 2},
    )
    assert list(figures["metrics"]) == ["exact_match", "regex", "mine"]
    assert figures["samples"] == 3
    assert figures["cut"] == 3
    assert figures["metrics"]["mine"] <= 2


@table(
    ("asked", "what"),
    [
        ({"spec": {"metrics": ["exact"]}}, "--metrics: invalid value 'exact'"),
        ({"spec": {"metrics": ["mine.py"]}}, "--metrics"),
        ({"spec": {"samples": 0}}, "--samples: invalid value 0"),
        ({"spec": {"max_new_tokens": 0}}, "--max-new-tokens: invalid value 0"),
        ({"spec": {"metrics": ["regex"]}}, "needs a pattern"),
        ({"spec": {"metrics": []}, "base": True}, "--base and --answers need a metric"),
    ],
)
def test_what_does_not_fit_is_told_before_the_model_is_loaded(
    run: Path, asked: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_evaluation.TrainedRun, "load", pytest.fail)
    with pytest.raises(CommandError, match=what):
        evaluated(run, **asked)


def test_a_metric_that_fails_on_an_answer_is_an_error(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def metric(prompt, expected, answer):\n    assert answer == expected\n    return 1\n")
    with pytest.raises(CommandError, match=r"without a score.*AssertionError"):
        evaluated(run, metric_file=tmp_path / "mine.py")


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["eval", str(run), "--base", "--metrics", "exact_match,rouge_l", "--samples", "4"]) == 0
    _, *scores, answered = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in scores] == ["exact_match", "rouge_l"]
    assert all(", base model 0." in line for line in scores)
    assert answered.startswith("answered: 4 held-out rows")
