"""The demo of reinforcement learning: sums that training never has, and figures from the run's own evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pronghorn.demo import rl
from pronghorn.demo.machine_speed import Speed
from pronghorn.recipe import Recipe


def added(rows: list[dict[str, str]]) -> set[frozenset[int]]:
    found = set()
    for row in rows:
        shown, asked, end = (*row["prompt"].split("\n"), row["prompt"][-3:])
        left, right = (int(word) for word in asked.removesuffix("= ").split("+"))
        assert (shown, end) == ("34 + 25 = 59", " = "), row
        assert int(row["answer"]) == left + right
        assert [int(x) + int(y) for x, y in zip(str(left), str(right), strict=True)] == [int(d) for d in row["answer"]]
        found.add(frozenset((left, right)))
    return found


def test_no_held_out_sum_is_trained_on_in_either_order() -> None:
    trained, held_out = rl.generate(1600, 0), rl.generate(150, 0, "held_out")
    assert not added(trained) & added(held_out)
    assert rl.generate(20, 0) == rl.generate(20, 0) != rl.generate(20, 1)


def test_the_expected_time_grows_with_what_a_step_and_a_token_take() -> None:
    assert rl.expected(Speed(2.0, 0.1)) > rl.expected(Speed(1.0, 0.1)) > rl.expected(Speed(1.0, 0.05)) > 60


@pytest.mark.usefixtures("_no_gpu")
def test_the_demo_tells_the_rates_before_and_after(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = rl.rl_recipe

    def smaller(*arguments: Any) -> Recipe:
        """The tiny model's tokens are bytes, of which a blank line has two. Digits are right enough for it."""
        given = real(*arguments).model_dump(exclude_unset=True)
        given["rollouts"]["stop"], given["rewards"] = ["\n"], [{"metric": "regex", "regex": "[a-zA-Z0-9]"}]
        return Recipe.model_validate(given)

    monkeypatch.setattr("pronghorn.demo.common.demo_model", lambda progress: tiny_model)
    monkeypatch.setattr(rl, "rl_recipe", smaller)
    for name, value in {"STEPS": 4, "PROMPTS": 2, "ANSWERS": 4, "HELD_OUT": 3, "EVERY": 2}.items():
        monkeypatch.setattr(rl, name, value)
    output = tmp_path / "demo"
    rl.run_rl_demo(output, as_json=True)
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    told = "4 steps of 2 sums with 4 answers each, 3 sums held out; about 1 min on this machine"
    assert any(told in event.get("text", "") for event in printed)
    evaluated = [event["metrics"]["reward"] for event in printed if event.get("event") in ("base", "eval")]
    assert len(evaluated) == 3
    assert (printed[-1]["right_before"], printed[-1]["right_after"]) == (evaluated[0], evaluated[-1])
    page = (output / "report.html").read_text(encoding="utf-8")
    curve = page[page.index("<h3>Reward</h3>") :].partition("</figure>")[0]
    assert curve.count('class="line eval"') == 1 + 3  # through the held-out points, and each one's error
    assert '"name":"held-out prompts, with standard error","colour":"eval","dots":true,"x":[0,2,4]' in curve
    rl.run_rl_demo(output, as_json=False)
    shown = capsys.readouterr().out
    assert f"held-out sums, sampled: {evaluated[0]:.0%} ± " in shown
    assert f"eval {output}\n" in shown
