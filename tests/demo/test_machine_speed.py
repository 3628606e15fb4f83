"""The demo does what fits into a few minutes, says how long it takes, and measures before and after in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pronghorn.demo import machine_speed, run
from pronghorn.demo.machine_speed import LIMIT, SIZES, Speed, choose, measure
from pronghorn.recipe import Recipe
from samples import make_model


def test_a_fast_machine_does_all_and_a_slow_one_less() -> None:
    fast, slow, hopeless = choose(Speed(1.0, 0.05)), choose(Speed(5.5, 0.25)), choose(Speed(60.0, 3.0))
    assert (fast.train_rows, fast.held_out_rows) == SIZES[0]
    assert fast.seconds is not None
    assert fast.seconds < LIMIT
    assert slow.seconds is not None
    assert (slow.train_rows, slow.held_out_rows) in SIZES[1:]
    assert (hopeless.train_rows, hopeless.held_out_rows) == SIZES[-1]
    assert "about 1 minute on this machine" in machine_speed.Work(1, 1, 31.0).told
    assert "about 9 minutes on this machine" in machine_speed.Work(1, 1, 541.0).told
    assert "GPU" in choose(None).told


def test_the_speed_is_measured_and_the_model_is_as_before() -> None:
    model = make_model()
    wanted = [weight.requires_grad for weight in model.parameters()]
    speed = measure(model)
    assert speed.step > 0
    assert speed.token > 0
    assert [weight.requires_grad for weight in model.parameters()] == wanted
    assert all(weight.grad is None for weight in model.parameters())


def test_the_demo_measures_before_and_after_in_its_own_report(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = run.demo_recipe

    def smaller(*arguments: Any) -> Recipe:
        """The tiny model's tokens are bytes, so its rows are longer."""
        recipe = real(*arguments)
        return recipe.model_copy(
            update={
                "data": recipe.data.model_copy(update={"max_length": 512}),
                "eval": recipe.eval.model_copy(update={"max_new_tokens": 3}),
            }
        )

    monkeypatch.setattr("pronghorn.demo.common.demo_model", lambda progress: tiny_model)
    monkeypatch.setattr(run, "demo_recipe", smaller)
    monkeypatch.setattr(machine_speed, "SIZES", ((7, 4),))
    output = tmp_path / "demo"
    run.run_demo(output, as_json=True)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = "7 training requests, 4 held out; about 1 minute on this machine"
    assert any(told in event.get("text", "") for event in printed)
    assert (printed[-1]["held_out"], printed[-1]["exact_before"], printed[-1]["exact_after"]) == (4, 0, 0)
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "json_match" in page
    assert "before training: 0 of 4" in page
    monkeypatch.setattr(machine_speed, "SIZES", ((14, 4),))  # faster now: the demo that stands there keeps its rows
    run.run_demo(output, as_json=False)
    assert "exact answers on 4 held-out requests: 0 before (0%), 0 after (0%)" in capsys.readouterr().out
