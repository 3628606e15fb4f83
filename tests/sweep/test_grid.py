"""Which trials a command means, and which it cannot mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pronghorn.errors import CommandError, PronghornError
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.sweep.grid import trials_of, values_of

TEXT = "model: m\ndata: {train: a.jsonl, eval: 0.1}\ntrain: {lr: 3e-4}\noutput: runs/a\n"


def load(words: Sequence[str]) -> Recipe:
    return parse_recipe(TEXT, words)


def test_every_combination_is_a_recipe_with_a_folder_of_its_own() -> None:
    folder, trials = trials_of(["train.lr=1e-4,1e-3", "lora.r=4, 8", "train.warmup=5"], load, None)
    assert folder == Path("runs/a-sweep")
    assert [trial.told for trial in trials][:2] == ["trial-01 (train.lr=1e-4 lora.r=4)", "trial-02 (train.lr=1e-4 lora.r=8)"]
    assert [(trial.recipe.train.lr, trial.recipe.lora.r) for trial in trials] == [(1e-4, 4), (1e-4, 8), (1e-3, 4), (1e-3, 8)]
    assert {trial.recipe.train.warmup for trial in trials} == {5}
    assert trials[3].folder == Path("runs/a-sweep/trial-04")
    assert trials_of([], load, Path("x"))[1][3].folder == Path("x/trial-04")


def test_without_keys_four_rates_are_tried() -> None:
    assert [trial.keys for trial in trials_of(["lora.r=8"], load, None)[1]] == [
        {"train.lr": "0.0001"}, {"train.lr": "0.0003"}, {"train.lr": "0.0009"}, {"train.lr": "0.003"},
    ]  # fmt: skip


def test_commas_in_brackets_and_quotes_are_part_of_a_value() -> None:
    assert values_of("lora.targets=all-linear,[q_proj,v_proj]") == ("lora.targets", ["all-linear", "[q_proj,v_proj]"])
    assert values_of("train.betas=[0.9, 0.99]") == ("train.betas", ["[0.9, 0.99]"])
    assert values_of("model='a,b'") == ("model", ["'a,b'"])


WRONG = {
    "data.max_length=128,256": "data.max_length cannot be swept",
    "objective=supervised,dpo": "objective cannot be swept",
    "train.epochs=1,2": "train.epochs cannot be swept",
    "train.seed=1,2": "train.seed cannot be swept",
    "train.lr=1e-3,0.001": "two trials are the same",
    "train.lr=1e-3,,1e-2": "a value between commas is missing",
    "train.lr=1e-3,fast": "'fast' is not a number",
    "train.learning=1,2": "unknown key",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_cannot_be_compared_is_refused(word: str) -> None:
    with pytest.raises(PronghornError) as refused:
        trials_of([word], load, None)
    assert WRONG[word] in str(refused.value)
    assert "fix:" in str(refused.value)


def test_a_folder_is_given_once() -> None:
    assert trials_of(["output=runs/b"], load, None)[0] == Path("runs/b-sweep")
    with pytest.raises(CommandError, match="output= beside -o x has no effect"):
        trials_of(["output=runs/b"], load, Path("x"))


def test_what_there_is_to_judge_by_is_needed() -> None:
    for words, what in (
        (["data.eval=null"], "data.eval is not set"),
        (["objective=dpo"], "objective dpo cannot be swept"),
        (["train.steps=9", "train.batch_tokens=16384,32768"], "train.batch_tokens cannot be swept"),
    ):
        with pytest.raises(PronghornError) as refused:
            trials_of(words, load, None)
        assert what in str(refused.value)
