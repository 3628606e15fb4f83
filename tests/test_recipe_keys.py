"""Which key is meant by a wrong one: of the same section first, by the names of other tools, or why there is none."""

from __future__ import annotations

import ast
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from pronghorn.convert import axolotl_keys, llamafactory
from pronghorn.convert.draft import Draft
from pronghorn.convert.values import UnfitError
from pronghorn.errors import CommandError, PronghornError
from pronghorn.recipe_file import parse_recipe
from pronghorn.recipe_keys import ABSENT, MEANS, NOTES, PREFIXES, VALUES, advice, all_keys, key_like, value_like
from pronghorn.recipe_objective import Objective
from tables import table

START = "model: m\ndata: {train: a.jsonl, max_length: 1024}\nobjective: {name: grpo}\nrollouts: {answers: 4}\n"


def told(*words: str) -> list[tuple[str, str]]:
    with pytest.raises(PronghornError) as caught:
        parse_recipe(START, words)
    return [(f"{one.what}; {one.why}", one.fix) for one in getattr(caught.value, "problems", [caught.value])]


@table(
    ("wrong", "meant"),
    [
        ("rollouts.prompt", "prompts"),  # not data.fields.prompt
        ("rollouts.max_tokens", "max_new_tokens"),
        ("rollouts.reward_timeout", "reward_seconds"),
        ("rollouts.workers", "reward_workers"),
        ("rollouts.n_samples", "answers"),
        ("rollouts.rewards", "rewards"),
        ("rollouts.num_iterations", "objective.updates"),
        ("objective.epsilon", "clip"),
        ("objective.epsilon_low", "clip"),
        ("objective.betas", "beta"),
        ("objective.kl_coef", "beta"),
        ("objective.lr", "train.lr"),
        ("epsilon", "objective.clip"),
        ("adam_epsilon", "train.eps"),
        ("train.epsilon", "eps"),
        ("train.beta", "betas"),
        ("train.clip_norm", "clip"),
        ("train.learning_rat", "lr"),
        ("train.output", "output"),
        ("train_lr", "train.lr"),
        ("data.max_tokens", "max_length"),
        ("data.limit", "max_rows"),
        ("data.field", "fields"),
        ("data.eos_token", "data.special_tokens.eos_token"),
        ("data.fields.question", "instruction"),
        ("data.fields.answer", "expected"),
        ("eval.steps", "every"),
        ("eval.stop.delta", "min_delta"),
        ("eval.patience", "eval.stop.patience"),
        ("eval.file", "data.eval"),
        ("eval.data", "data.eval"),
        ("data.train.columns.question", "instruction"),
        ("checkpoint.steps", "every"),
        ("checkpoint.limit", "keep"),
        ("world.fsdp", "shard"),
    ],
)
def test_a_wrong_key_is_answered_with_one_of_its_section_first(wrong: str, meant: str) -> None:
    assert key_like(tuple(wrong.split("."))) == meant


@table(
    ("word", "said", "fix"),
    [
        ("objective.epsilon_high=0.3", "unknown key", "did you mean `objective.clip`? write both: [epsilon, epsilon_high]"),
        ("objective.top_entropy_quantile=0.2", "no part of the loss", "remove it"),
        ("rollouts.vllm_tensor_parallel_size=2", "an option of the server's own command", "remove it"),
        ("rollouts.vllm_server_port=8000", "unknown key", "did you mean `rollouts.engine`? write the server's address"),
        (
            "train.per_device_train_batch_size=4",
            "unknown key; a step samples rollouts.prompts x rollouts.answers",
            "set rollouts.prompts",
        ),
        (
            "gradient_accumulation_steps=4",
            "unknown key; a step samples rollouts.prompts x rollouts.answers",
            "set rollouts.prompts",
        ),
        ("train.batch_rows=4", "a step has rollouts.prompts", "remove train.batch_rows, and set rollouts.prompts"),
        ("eval.batch_size=4", "evaluation chooses its batch size itself", "remove it"),
        ("grpo={num_generations: 8}", "unknown key", "did you mean `rollouts.answers`?"),
        ("data.fields.gold=x", "unknown key", "did you mean `data.fields.expected`? of rows that are no prompts: `completion`"),
        ("trian={lr: 1}", "unknown key", "did you mean `train`?"),
        ("objective.loss=ppo", "grpo has no loss ppo", "use one of: dapo, dr_grpo, bnpo, grpo, cispo"),
        ("objective.loss=dappo", "grpo has no loss dappo", "did you mean `dapo`?"),
        ("objective=grpoo", "objective.name: invalid value 'grpoo'", "did you mean `grpo`?"),
        ("objective.name=ppo", "objective.name: invalid value 'ppo'", "did you mean `grpo`?"),
        ("train.optimizer=adamw_torch", "invalid value 'adamw_torch'", "did you mean `adamw`?"),
        ("reward_file=mine.py", "Pronghorn runs code only if", "--reward-file mine.py"),
        ("reward_funcs=mine.py:check", "Pronghorn runs code only if", "--reward-file mine.py"),
        ("rollouts.episode_file=turns.py", "Pronghorn runs code only if", "--episode-file turns.py"),
        ("rewards=[{file: mine.py}]", "Pronghorn runs code only if", "--reward-file mine.py"),
        ("rewards=[{path: mine.py}]", "Pronghorn runs code only if", "--reward-file mine.py"),
        ("rewards=[{path: runs/judge}]", "unknown key", "did you mean `model`?"),
        ("rewards=[mine.py]", "Pronghorn runs code only if", "--reward-file mine.py"),
        ("rewards=[{function: mine.py:check}]", "Pronghorn runs code only if", "--reward-file mine.py"),
        ("rewards=[check_answer]", "invalid value 'check_answer'", "{function: check_answer}"),
    ],
)
def test_one_problem_is_told_with_what_helps(word: str, said: str, fix: str) -> None:
    ((what, hint),) = told(word)
    assert said in what
    assert fix in hint


def test_a_value_of_the_command_line_is_told_as_one() -> None:
    """`objective=grpoo` replaces the file's objective.name."""
    with pytest.raises(PronghornError) as caught:
        parse_recipe(START, ["objective=grpoo"])
    assert caught.value.where == "command line"


def test_a_loss_is_no_guess() -> None:
    (problem,) = Objective(name="dpo", loss="ppo").misfits
    assert problem.endswith("; use one of: sigmoid, ipo, hinge")


def test_what_other_tools_call_a_key_names_a_key() -> None:
    lists = {"rewards.", "data.train."}
    for name, keys in MEANS.items():
        for key in keys:
            *section, _ = key.split(".")
            path = (*section, 0, name) if f"{'.'.join(section)}." in lists else (*section, name.split(".")[-1])
            assert key in (found := key_like(path), ".".join((*section, found))) or "." in name, (path, found)
    known = {*all_keys(), "rewards", "eval", "eval.stop", "data.fields"} | {
        f"data.train.{key}" for key in ("columns", "max_rows", "path", "name", "weight", "format")
    }
    assert {key for keys in MEANS.values() for key in keys} <= known
    assert not set(MEANS) & {key for key in all_keys() if "." not in key}
    assert not set(MEANS) & set(ABSENT)
    assert set(NOTES) <= set(MEANS)


def test_every_name_of_trl_s_online_trainers_has_an_answer() -> None:
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("TRL is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "trainer"
    own = {key.split(".")[-1] for key in all_keys()}
    unanswered = []
    for file in ("grpo_config.py", "rloo_config.py"):
        classes = [node for node in ast.parse((folder / file).read_text()).body if isinstance(node, ast.ClassDef)]
        names = [line.target.id for one in classes for line in one.body if isinstance(line, ast.AnnAssign)]
        assert len(names) > 30
        unanswered += [
            name
            for name in names
            if not (name in own or name in MEANS or name in ABSENT or name.startswith(tuple(how[:-1] for how in PREFIXES)))
        ]
    assert unanswered == []


def test_names_mean_what_the_converters_make_of_them() -> None:
    differ = {}
    for rows in (axolotl_keys.ROWS, llamafactory.ROWS):
        for name, row in rows.items():
            draft = Draft({name: "1"}, {name: 1}, "tool", "config")
            with suppress(CommandError, UnfitError):
                row(draft, name)
            if draft.targets and key_like((name,)) not in draft.targets:
                differ[name] = (key_like((name,)), *draft.targets)
    assert differ == {}


def test_values_of_other_tools_are_values() -> None:
    for key, values in VALUES.items():
        for theirs, ours in values.items():
            assert value_like(key, theirs, []) == ours
            parse_recipe("model: m\ndata: {train: a.jsonl}", [f"{key}={ours}"])
    assert advice(("train", "nothing_like_it"), 3)[1].startswith("known keys: average, batch_rows")
