"""The sections `rollouts` and `rewards`: what fits together, and what is refused before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pronghorn.errors import PronghornError
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.recipe_keys import key_like
from pronghorn.recipe_objective import KINDS
from pronghorn.recipe_rollouts import Rollouts
from tables import table

START = "model: m\ndata: {train: a.jsonl, max_length: 1024}\n"


def test_the_same_run_from_yaml_the_command_line_and_python() -> None:
    written = parse_recipe(
        START
        + "objective: {name: grpo, clip: [0.2, 0.28]}\nrollouts: {answers: 4}\nrewards: [exact_match, {function: reward_a}]"
    )
    words = ["objective=grpo", "objective.clip=[0.2, 0.28]", "rollouts.answers=4"]
    words.append("rewards=[exact_match, {function: reward_a}]")
    made = Recipe(
        model="m", data={"train": "a.jsonl", "max_length": 1024}, objective={"name": "grpo", "clip": (0.2, 0.28)},
        rollouts={"answers": 4}, rewards=[{"metric": "exact_match"}, {"function": "reward_a"}],
    )  # fmt: skip
    assert written == parse_recipe(START, words) == made
    assert made.eval.best == "reward"
    assert made.objective.given == {
        "loss": "dapo", "clip": (0.2, 0.28), "delta": None, "beta": 0.0, "scale": "group", "updates": 1,
    }  # fmt: skip
    assert parse_recipe(START + "objective: {name: grpo, loss: cispo}").objective.clip == (0.2, 5.0)
    assert parse_recipe(START + "objective: rloo").rollouts == parse_recipe(START + "objective: rloo\nrollouts: {}").rollouts


@table(
    ("text", "what"),
    [
        ("objective: dpo\nrewards: [exact_match]", "rewards: objective dpo generates no answers"),
        ("rollouts: {answers: 2}", "rollouts: objective supervised generates no answers"),
        ("objective: grpo\nrollouts: {answers: 1}", "rollouts.answers: 1 is no group"),
        ("objective: grpo\nrollouts: {max_new_tokens: 1024}", "rollouts.max_new_tokens: 1024 leaves no room for a prompt"),
        ("objective: grpo\nrollouts: {temperature: 0}", "rollouts.temperature: 0 is out of range"),
        ("objective: grpo\ntrain: {batch_rows: 8}", "train.batch_rows: a step has rollouts.prompts x rollouts.answers"),
        ("objective: {name: grpo, beta: 0.1}\nmethod: full", "objective.beta: 0.1 needs the model before training"),
        ("objective: {name: grpo, loss: cispo, clip: [0.2, 0.2]}", "objective.clip: with the loss cispo"),
        ("objective: {name: grpo, clip: 0.2}", "objective.clip: invalid value 0.2"),
        ("objective: {name: rloo, scale: group}", "objective.scale: not a parameter of rloo"),
        ("objective: {name: gspo, loss: cispo}", "objective.loss: gspo has no loss cispo"),
        ("objective: {name: dpo, updates: 2}", "objective.updates: not a parameter of dpo"),
        ("objective: grpo\nlora: {dropout: 0.1}", "lora.dropout: answers are sampled without dropout"),
        ("objective: grpo\nlayers: own", "layers: own cannot generate answers"),
        ("objective: grpo\ndata: {train: a.jsonl, long: truncate}", "data.long: truncate would ask a part of a question"),
        ("objective: grpo\neval: {best: loss}", "eval.best: the loss says nothing of answers"),
        ("objective: grpo\nhealth: {spike: rewind}", "health.spike: a spike of this loss says nothing"),
        ("objective: grpo\nworld: {shard: base}", "world.shard: base cannot be combined with objective: grpo"),
        ("objective: grpo\nrewards: [{metric: regex}]", "rewards.0: the metric `regex`, and no other reward, has a pattern"),
        ("objective: grpo\nrewards: [{weight: 1}]", "rewards.0: name one metric, one function, or one model"),
        ("objective: grpo\nrewards: [{function: a/b.py}]", "rewards.0.function a/b.py is a file, and Pronghorn runs code"),
        ("objective: grpo\nrewards: [exact_match, exact_match]", "rewards: two are called exact_match"),
        ("objective: grpo\nrewards: [{function: a}, {function: a}]", "rewards: the function a is there twice"),
        ("objective: grpo\nrewards: [{function: a}, {function: a, name: b}]", "rewards: the function a is there twice"),
        ("objective: grpo\nrewards: [{metric: exact_match, weight: 0}]", "rewards: every weight is 0"),
        ("objective: grpo\nrewards: [multiple_choice]", "rewards.0.metric: invalid value 'multiple_choice'"),
        ("data: {train: a.jsonl, fields: {expected: gold}}", "data.fields.expected: only rows of prompts"),
        ("objective: grpo\nrollouts: {num_generations: 4}", "rollouts.num_generations: unknown key"),
    ],
)
def test_what_cannot_be_honoured_is_refused(text: str, what: str) -> None:
    lines = text.split("\n")
    start = "model: m\n" if any(line.startswith("data:") for line in lines) else START
    with pytest.raises(PronghornError) as error:
        parse_recipe(start + text)
    told = getattr(error.value, "problems", [error.value])
    assert any(problem.what.startswith(what) for problem in told), [problem.what for problem in told]
    assert all(problem.fix for problem in told)


def test_the_documentation_has_every_key_and_says_what_trl_calls_it() -> None:
    text = (Path(__file__).parent.parent / "docs" / "rollouts.md").read_text(encoding="utf-8")
    policy = {"name", *KINDS["grpo"].parameters} - {"share_prompt"}
    for section, known in (("objective", policy), ("rollouts", set(Rollouts.model_fields))):
        part = text.partition(f"## {section.title()}\n")[2].partition("\n## ")[0]
        rows = [
            [re.findall("`(.*?)`", cell) for cell in line.split("|")[1:]] for line in part.splitlines() if line[:3] == "| `"
        ]
        assert sorted(key for keys, *_ in rows for key in keys) == sorted(known)
        for keys, _, trls, *_ in rows:
            assert {key_like((section, name)) for name in trls} <= set(keys), keys
