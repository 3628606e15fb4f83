"""Metrics and functions as rewards: weighted, added up, and tried before the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pronghorn.errors import CommandError, DataError
from pronghorn.recipe_rollouts import Reward, Rollouts
from pronghorn.rewards.scoring import Said, Scorer

FILE = """
def reward_length(completions, **columns):
    return [None if "skip" in text else float(len(text)) for text in completions]

def check_answer(prompts, completions, answer, **columns):
    (prompt,), (completion,) = prompts, completions
    if isinstance(prompt, str): return [0.0]
    assert prompt[-1]["role"] == "user" and completion[0]["role"] == "assistant"
    return [float(completion[0]["content"] == answer[0])]

def reward_unused(text): ...
"""
SPEC = Rollouts(reward_workers=1, reward_seconds=20)


def said(text: str, expected: str | None = "42", **columns: object) -> Said:
    return Said("rows.jsonl:1", "How many?", text, {"expected": expected, "answer": expected, **columns})


def test_weights_names_and_what_does_not_apply(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(FILE)
    numbers = Reward(metric="regex", regex="([0-9]+)", name="number", weight=2.0)
    rewards = [
        numbers,
        Reward(metric="exact_match"),
        Reward(function="reward_length", weight=0.5),
        Reward(function="check_answer"),
    ]
    scorer = Scorer(rewards, SPEC, file)
    assert scorer.names == ["number", "exact_match", "reward_length", "check_answer"]
    assert scorer.remarks == [f"rewards: not used, since the recipe names the functions to use: reward_unused of {file}"]
    (remark,) = Scorer([numbers], SPEC, file).remarks
    assert f"number of the recipe and the functions of {file} are added up; to use the functions alone, remove number" in remark
    assert Scorer([], SPEC, file).remarks == []
    right, close, skipped = scorer.score([said("42"), said("it is 42"), said("skip 7")])
    assert right.parts == {"number": 1.0, "exact_match": 1.0, "reward_length": 2.0, "check_answer": 0.0}
    assert right.total == 2.0 + 1.0 + 0.5 * 2
    assert close.total == 2.0 + 0.5 * 8
    assert skipped.parts.keys() == {"number", "exact_match", "check_answer"}
    assert skipped.total == 0.0
    chat = Said("", [{"role": "user", "content": "?"}], "42", {"answer": "42"})
    assert scorer.score([chat])[0].parts["check_answer"] == 1.0
    (failed,) = scorer.score([Said("", "text", "x", {})])  # the column that a function needs is missing
    assert failed.total is None
    assert "check_answer: TypeError" in failed.fault


def test_a_pattern_that_does_not_end_on_an_answer_leaves_it_without_a_reward() -> None:
    scorer = Scorer([Reward(metric="regex", regex="(?:a+)+$")], SPEC)
    fine, slow, after = scorer.score([said("aaa"), said("a" * 100 + "!"), said("b")])
    assert (fine.total, slow.total, after.total) == (1.0, None, 0.0)
    assert slow.fault == "regex: the pattern took longer than 1 s"


def test_rewards_are_tried_before_the_run(tmp_path: Path) -> None:
    scorer = Scorer([Reward(metric="exact_match")], SPEC)
    assert scorer.tried([said("42"), said("41")]) == ["exact_match: 0.5 on average, for their expected answers to 2 prompts"]
    file = tmp_path / "rewards.py"
    file.write_text("def reward(completions, **columns): return [float(completions[0])]")
    own = Scorer([], SPEC, file)
    assert own.tried([said("42"), said("x")])[-1].startswith("1 row without a reward: reward: ValueError")
    with pytest.raises(CommandError, match=r"a reward failed on all of 2 rows that it was tried on: reward: ValueError"):
        own.tried([said("x"), said("x")])


@pytest.mark.parametrize(
    ("reward", "expected", "what"),
    [
        (Reward(metric="exact_match"), None, "has no expected answer"),
        (Reward(metric="json_match"), "{", "is not JSON"),
        (Reward(metric="regex", regex="#([0-9]+)"), "42", "does not match"),
        (Reward(metric="json_valid"), None, ""),
        (Reward(metric="regex", regex="[0-9]"), None, ""),
    ],
)
def test_what_no_answer_could_meet_is_refused(reward: Reward, expected: str | None, what: str) -> None:
    scorer = Scorer([reward], SPEC)
    if not what:
        scorer.require_expected(said("", expected))
        return
    with pytest.raises(DataError, match=what):
        scorer.require_expected(said("", expected))
