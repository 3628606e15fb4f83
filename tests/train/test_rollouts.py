"""Whole runs of reinforcement learning on a tiny model: they learn, resume exactly, and survive what rewards do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import in_ranks
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from transformers import GPT2Config, GPT2LMHeadModel
from watching import Silent, events_of, losses_of, notices_of, same, saved, stop_at, weights

from pronghorn.cli import main
from pronghorn.cli.evaluating import text
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import CommandError, DataError, HealthStop, Interrupted, RecipeError
from pronghorn.generation.generator import Generator
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.recipe import Recipe
from pronghorn.report.answers import read_answers
from pronghorn.report.html import write_html
from pronghorn.rewards.scoring import Scored
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint
from pronghorn.train.dist.launch import require_packs
from pronghorn.train.dist.world import World
from pronghorn.train.loop import train
from pronghorn.train.objectives.policy import MISMATCH, Policy
from pronghorn.train.run.run_evaluation import EvaluationRequest, evaluate_run
from pronghorn.train.setup.check import check_run
from pronghorn.train.source import rollout_rows, source_of
from pronghorn.train.source.left_out import kind_of_fault, left_out_of
from pronghorn.train.source.rollout_rows import _Filling
from pronghorn.train.source.rollouts import RolloutSource, _stop_token
from pronghorn.train.step.step import EagerStep
from samples import make_lively_model, make_model, write_rows

ODD = """
def reward(prompts, completions, answer, **columns):
    assert set(answer) == {"odd"} and isinstance(prompts[0], str)
    return [sum(ord(letter) % 2 for letter in text) / max(1, len(text)) for text in completions]
"""
SOME = """
def reward(prompts, completions, **columns):
    tried = prompts[0].strip(":")[-1] in "{tried}"
    return [tried * sum(ord(letter) % 2 for letter in text) / max(1, len(text)) for text in completions]
"""
LETTERS = {"metric": "regex", "regex": "[a-zA-Z]"}
RecipeFor = Callable[..., Recipe]
TIMES = ("event", "seconds", "time", "session", "rollouts/")


@pytest.fixture
def rl(recipes: RecipeFor, tmp_path: Path, _no_gpu: None) -> RecipeFor:
    """`rl(train={...})`: 4 prompts, 4 answers of up to 6 tokens, rewarded for letters."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}:", "answer": "odd"} for i in range(10)])
    base: dict[str, Any] = {
        "objective": "grpo",
        "rollouts": {"prompts": 4, "answers": 4, "max_new_tokens": 6},
        "rewards": [LETTERS],
        "data": {"train": [str(prompts)], "eval": None, "max_length": 40},
        "train": {"epochs": 1, "steps": 4, "batch_tokens": 65536, "capacity": 256, "lr": 1e-2},
        "eval": {"every": 2, "generations": 0, "samples": 4},
    }

    def build(**own: Any) -> Recipe:
        merged = {
            key: {**value, **own.pop(key, {})} if isinstance(value, dict) else own.pop(key, value)
            for key, value in base.items()
        }
        return recipes(**merged, **own)

    return build


def rewards_of(run: str | Path) -> list[dict[str, Any]]:
    """The log of steps, but for times."""
    return [{name: value for name, value in e.items() if not name.startswith(TIMES)} for e in events_of(run, "step")]


def reward_file(folder: Path, text: str = ODD) -> Path:
    path = folder / "rewards.py"
    path.write_text(text)
    return path


def test_a_run_learns_what_is_rewarded_and_shows_it(rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(
        method="full", rewards=[], rollouts={"answers": 8}, data={"eval": 0.3, "max_length": 40},
        train={"steps": 24, "lr": 1e-2, "capacity": 512}, eval={"every": 12, "generations": 1, "max_new_tokens": None},
    )  # fmt: skip
    facts = check_run(recipe, report=lambda *_: None, reward_file=reward_file(tmp_path))
    assert facts.rewards == ("reward: 0.3333 on average, for their expected answers to 7 prompts",)
    assert facts.table().row_count > 4
    result = train(recipe, display=Silent(), reward_file=reward_file(tmp_path))
    steps = events_of(result.folder, "step")
    first, last = (sum(step["reward"] for step in part) / 4 for part in (steps[:4], steps[-4:]))
    assert last > first + 0.1, (first, last)
    assert max(step[MISMATCH] for step in steps) < 1e-5
    for name in (
        "entropy", "reward_std", "rewards/reward/mean", "rewards/reward/std", "frac_reward_zero_std", "completions/mean_length",
        "completions/max_length", "completions/clipped_ratio", "completions/mean_terminated_length", "clip_ratio/region_mean",
    ):  # fmt: skip
        assert name in steps[0], name
    assert "kl" not in steps[0]
    (base,), evals = events_of(result.folder, "base"), events_of(result.folder, "eval")
    assert evals[-1]["metrics"]["reward"] > base["metrics"]["reward"]
    assert 0 < evals[-1]["metrics"]["reward_error"] < 0.2
    assert "loss" not in evals[-1]
    assert evals[-1]["generations"][0]["expected"] == "odd"
    (answer,) = read_answers(result.folder)
    assert answer.scores.keys() == answer.base_scores.keys() == {"reward"}
    assert 3 < len(answer.answer) <= 6  # bytes; as long as trained ones
    page = write_html(result.folder).read_text(encoding="utf-8")
    assert "<h2>Rollouts</h2>" in page
    assert "mean reward of an answer" in page
    assert "<dt>held-out reward, best</dt>" in page
    assert "<dt>reward</dt>" not in page  # of the greedy answer
    assert '<th class="n">loss</th>' not in page
    assert any("cut at rollouts.max_new_tokens: 6" in text for text in notices_of(result.folder))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"objective": {"name": "grpo", "updates": 3, "beta": 0.1}, "train": {"steps": 7}},
        {"objective": "rloo", "method": "full"},
    ],
    ids=["grpo", "updates", "rloo"],
)
def test_a_rollout_that_was_interrupted_is_repeated(
    changes: dict[str, Any], rl: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of answering, and with checkpoints between two updates of a batch."""
    recipe = rl(checkpoint={"every": 1}, **changes)
    whole = train(recipe, display=Silent())
    real, calls = Generator.run, iter(range(100))

    def cut_off(self: Generator) -> Any:
        for number, ended in enumerate(real(self)):
            if number == 2 and next(calls) in (0, 2):
                raise RuntimeError("killed")
            yield ended

    again = recipe.model_copy(update={"output": recipe.output + "-again"})
    monkeypatch.setattr(Generator, "run", cut_off)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="killed"):
            train(again, display=Silent())
    done = train(again, display=Silent())
    assert rewards_of(done.folder) == rewards_of(whole.folder)
    assert len({step["reward"] for step in rewards_of(whole.folder)}) > 1
    assert same(weights(latest_checkpoint(done.folder)), weights(latest_checkpoint(whole.folder)))


def test_a_run_goes_on_between_two_updates_of_one_rollout(rl: RecipeFor) -> None:
    """Its answers are those of weights that are gone: the checkpoint has them."""
    recipe = rl(objective={"name": "gspo", "updates": 3, "beta": 0.1}, train={"steps": 5})
    whole = train(recipe, display=Silent())
    again = recipe.model_copy(update={"output": recipe.output + "-again"})
    for step in (2, 4):
        with pytest.raises(Interrupted):
            train(again, display=stop_at(step))
    done = train(again, display=Silent())
    assert rewards_of(done.folder) == rewards_of(whole.folder)
    assert [step["update"] for step in rewards_of(done.folder)] == [1.0, 2.0, 3.0, 1.0, 2.0]
    assert same(weights(latest_checkpoint(done.folder)), weights(latest_checkpoint(whole.folder)))


def test_packing_changes_nothing(rl: RecipeFor) -> None:
    """Prompts shared or not, groups whole or split, many packs or one; and fewer slots than answers."""
    ways: list[dict[str, Any]] = [
        {"train": {"capacity": 512}}, {"train": {"capacity": 64}}, {"objective": {"name": "grpo", "share_prompt": "off"}},
        {"rollouts": {"slots": 3}},
    ]  # fmt: skip
    found = []
    for number, changes in enumerate(ways):
        recipe = rl(**changes)
        recipe = recipe.model_copy(update={"output": f"{recipe.output}-{number}"})
        found.append(rewards_of(train(recipe, display=Silent()).folder))
    for steps in found[1:]:
        for one, other in zip(found[0], steps, strict=True):
            assert {k: v for k, v in one.items() if "reward" in k or "completions" in k} == {
                k: v for k, v in other.items() if "reward" in k or "completions" in k
            }
            assert (one["loss"], one["grad_norm"]) == pytest.approx((other["loss"], other["grad_norm"]), abs=1e-6, rel=1e-5)


LOSSES: dict[str, dict[str, Any]] = {
    **{loss: {"loss": loss} for loss in ("dapo", "bnpo", "grpo", "rloo")},
    "dr_grpo": {"loss": "dr_grpo", "longest": 6},
    "cispo": {"loss": "cispo", "high": 5.0},
    "gspo": {"level": "sequence"},
}


def test_groups_without_a_signal_are_not_computed_and_change_nothing(
    rl: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of the first and of the second update, in several packs."""
    real, compared = RolloutSource.next, []

    def look(self: RolloutSource, model: Any) -> StepBatch:
        step = real(self, model)
        assert self._rolled is not None
        with monkeypatch.context() as patch:
            patch.setattr(rollout_rows, "all_have_gradients", lambda *_: True)
            whole = rollout_rows.rollout_step(self, model, self._rolled, {}, 0.0)
        assert len(step.batches) > 1
        assert step.tokens < whole.tokens
        for settings in LOSSES.values():
            policy = Policy(updates=1 + len(compared), **settings)
            learner = EagerStep(
                model, torch.optim.SGD([torch.zeros(1)]), device=self.device, precision="fp32", clip=1.0, objective=policy
            )
            found = []
            for one in (step, whole):
                loss, _, watched = learner._forward_backward(one)
                found.append([loss, *(parameter.grad for parameter in learner._parameters if parameter.grad is not None)])
                model.zero_grad(set_to_none=True)
                assert policy.figures(watched.tolist())[MISMATCH] < 1e-5 or compared
            for less, more in zip(*found, strict=True):
                torch.testing.assert_close(less, more, rtol=1e-5, atol=1e-6)
            assert max(float(more.abs().max()) for more in found[1][1:]) > 1e-3
        compared.append(step)
        return step

    monkeypatch.setattr(RolloutSource, "next", look)
    recipe = rl(
        objective={"name": "grpo", "updates": 3}, rewards=[], rollouts={"prompts": 8}, train={"capacity": 64, "steps": 2}
    )
    train(recipe, display=Silent(), reward_file=reward_file(tmp_path, SOME.format(tried="01234")))
    assert len(compared) == 2


def test_a_divergence_and_the_load_of_experts_are_learned_from_without_a_signal(rl: RecipeFor) -> None:
    model, mixture = make_model(), make_model()
    install(model)
    install(mixture)
    engine_of(mixture).balance = 0.01
    for objective, given, expected in (
        ({"name": "grpo"}, model, False),
        ({"name": "rloo", "beta": 0.1}, model, False),  # there it is part of the reward
        ({"name": "gspo", "beta": 0.1}, model, True),
        ({"name": "grpo"}, mixture, True),
    ):
        source = SimpleNamespace(recipe=rl(objective=objective))
        assert rollout_rows.all_have_gradients(source, given) is expected  # type: ignore[arg-type]


def test_short_answers_fill_a_pack(rl: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 answers of two tokens, where a pack has 10 documents otherwise."""
    real, steps = RolloutSource.next, []
    monkeypatch.setattr(RolloutSource, "next", lambda self, model: steps.append(real(self, model)) or steps[-1])
    train(rl(rollouts={"answers": 16, "max_new_tokens": 2}, train={"steps": 1, "capacity": 160}), display=Silent())
    assert [batch.tokens for batch in steps[0].batches] == [steps[0].tokens]
    assert steps[0].tokens > 120


def test_packs_are_filled_and_a_prompt_begins_each_of_them() -> None:
    filling = _Filling(16_384, shared=True, most=1024)
    begins = []
    for _ in range(64):
        filling.next_prompt(512)
        begins += [filling.add(512) for _ in range(8)]
    assert len(filling.firsts) == 19
    assert all(begins[row] for row in filling.firsts)
    assert sum(begins) < 64 + 19
    apart = _Filling(64, shared=False, most=8)
    apart.next_prompt(10)
    assert [apart.add(20) for _ in range(3)] == [True] * 3
    assert apart.firsts == [0, 2]


def test_the_sampler_follows_the_learner(rl: RecipeFor, tmp_path: Path) -> None:
    """After steps large enough to change every log-probability by much, sampler and learner still agree."""
    recipe = rl(
        model=saved(make_lively_model(num_hidden_layers=1), tmp_path / "lively"),
        train={"lr": 1.0, "clip": 1e9, "warmup": 0.0, "schedule": "constant"},
        rollouts={"temperature": 0.7, "min_p": 0.01},
        rewards=[],
    )
    steps = events_of(train(recipe, display=Silent(), reward_file=reward_file(tmp_path)).folder, "step")
    assert max(step[MISMATCH] for step in steps) < 1e-5
    assert abs(steps[0]["entropy"] - steps[1]["entropy"]) > 0.1


def test_the_divergence_is_from_the_model_before_training(rl: RecipeFor) -> None:
    steps = events_of(train(rl(objective={"name": "grpo", "beta": 0.5}), display=Silent()).folder, "step")
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert steps[-1]["kl"] > 1e-5


@pytest.mark.parametrize("objective", [{"name": "grpo", "scale": "batch", "updates": 2}, {"name": "gspo"}])
def test_two_ranks_answer_prompts_of_their_own(objective: dict[str, Any], rl: RecipeFor, tmp_path: Path) -> None:
    """In some steps no answer of one rank has a signal."""
    recipe, file = rl(objective=objective, data={"eval": 0.3}, rewards=[]), reward_file(tmp_path, SOME.format(tried="3"))
    two = recipe.model_copy(update={"output": recipe.output + "-two"})
    found = in_ranks(lambda world: train(two, display=Silent(), world=world, reward_file=file).step, tmp_path / "told")
    assert found == [(0, "4")] * 2
    train(recipe, display=Silent(), reward_file=file)
    assert 0.75 in {step["frac_reward_zero_std"] for step in events_of(recipe.output, "step")}
    assert losses_of(two.output) == pytest.approx(losses_of(recipe.output), abs=1e-6)
    for one, other in zip(rewards_of(recipe.output), rewards_of(two.output), strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-6)
    for one, other in zip(events_of(recipe.output, "eval"), events_of(two.output, "eval"), strict=True):
        assert other["metrics"] == pytest.approx(one["metrics"])


def test_ranks_without_a_prompt_are_refused(rl: RecipeFor) -> None:
    with pytest.raises(RecipeError, match=r"rollouts\.prompts: a step has 4 prompts for 5 ranks"):
        require_packs(rl(), 5)
    require_packs(rl(), 4)
    found = source_of(rl(), load_tokenizer(rl().model), report=lambda *_: None, stage=lambda _: nullcontext())
    assert found.dealt(2) == []
    assert "set rollouts.prompts: 6" in found.dealt(3)[0]


def test_eval_measures_the_rewards_again(rl: RecipeFor, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "held.jsonl", [{"prompt": f"Tell {i}!", "answer": "odd"} for i in range(3)])
    file = reward_file(tmp_path)
    recipe = rl(rewards=[], data={"eval": str(prompts)}, train={"steps": 2})
    result = train(recipe, display=Silent(), reward_file=file)
    (last,) = events_of(result.folder, "eval")
    asked = EvaluationRequest(reward_file=file)
    found = evaluate_run(result.folder, "last", data=None, report=lambda *_: None, asked=asked)
    assert found["figures"] == pytest.approx(last["metrics"])
    assert found["samples"] == 3
    assert evaluate_run(result.folder, "last", data=str(prompts), report=lambda *_: None, asked=asked) == found
    assert "3 held-out prompts\nreward 0." in text(found)
    few = EvaluationRequest({"samples": 2}, reward_file=file)
    assert evaluate_run(result.folder, "last", data=None, report=lambda *_: None, asked=few)["samples"] == 2
    for odd in (EvaluationRequest({"max_new_tokens": 9}, base=True), EvaluationRequest({"samples": 0})):
        with pytest.raises(CommandError) as caught:
            evaluate_run(result.folder, "last", data=None, report=lambda *_: None, asked=odd)
        assert caught.value.fix == ("remove --max-new-tokens, --base" if odd.base else "use 1 or more")


FAULTS = """
import time
seen = 0
def reward(completions, **columns):
    global seen
    seen += 1
    text = completions[0]
    if "a" in text or "e" in text: raise ValueError("a vowel")
    if "A" in text: time.sleep(600)
    if "b" in text: return [float("nan")]
    if "c" in text: return []
    return [float(len(set(text)))]
"""


def test_answers_without_a_reward_are_left_out_and_told(rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(rewards=[], rollouts={"answers": 8, "reward_seconds": 0.5}, train={"steps": 3})
    result = train(recipe, display=Silent(), reward_file=reward_file(tmp_path, FAULTS))
    assert any("rewards/left_out" in step for step in events_of(result.folder, "step"))
    told = [text for text in notices_of(result.folder) if "left out of their groups" in text]
    assert any("ValueError: a vowel (line 8)" in text for text in told), told
    wanted = re.compile(r"\d of 32 answers left out .*; the first is to \S+prompts\.jsonl:\d+$")
    assert all(wanted.search(text) for text in told[:3]), told
    stops = rl(rewards=[], rollouts={"on_reward_error": "stop", "answers": 8, "reward_seconds": 0.5}, train={"steps": 3})
    with pytest.raises(HealthStop, match="a reward failed: reward: ") as caught:
        train(stops, display=Silent(), fresh=True, reward_file=tmp_path / "rewards.py")
    assert re.search(r"prompts\.jsonl:\d+$", caught.value.where)
    assert re.search(r"of 32 answers: reward: .* \(\d+ answers?\)", caught.value.why)


EXPECTED = """
def reward(completions, answer, **columns):
    return [1.0 if text == answer[0] else {other} for text in completions]
"""


@pytest.mark.parametrize(
    ("other", "held_out", "steps", "what"),
    [
        ("1 / 0", None, 9, r"all 16 answers of the first rollout were left out, .*: reward: ZeroDivisionError"),
        ("1 / 0", 0.3, 2, r"all 12 answers to held-out prompts were left out, .*: reward: ZeroDivisionError"),
        ("None", None, 9, "no answer had a reward in the first 3 rollouts"),
        ("None", 0.3, 2, "no answer had a reward in the first 2 rollouts"),
    ],
)
def test_a_run_in_which_no_answer_has_a_reward_stops(
    other: str, held_out: float | None, steps: int, what: str, rl: RecipeFor, tmp_path: Path
) -> None:
    """Expected answers have one, so that `check` finds nothing."""
    recipe = rl(rewards=[], data={"eval": held_out}, train={"steps": steps})
    with pytest.raises(HealthStop, match=what) as caught:
        train(recipe, display=Silent(), reward_file=reward_file(tmp_path, EXPECTED.format(other=other)))
    assert ("(16 answers)" in caught.value.why) == (other != "None" and not held_out)
    assert events_of(recipe.output, "end")[-1]["reason"] == "health"


def test_rewards_that_fail_late_are_the_reason_of_the_stop(rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(rewards=[], rollouts={"patience": 2, "reward_workers": 1}, train={"steps": 9})
    late = "import itertools\nasked = itertools.count()\n" + ODD.replace("    assert", "    1 / (next(asked) < 36)\n    assert")
    with pytest.raises(HealthStop, match="in 2 rollouts in a row: all answers of the last one were left out") as caught:
        train(recipe, display=Silent(), reward_file=reward_file(tmp_path, late))
    assert "ZeroDivisionError" in caught.value.why
    assert "fix the reward" in caught.value.fix
    told = [text for text in notices_of(recipe.output) if "none of 16 answers has a reward: reward: ZeroDivisionError" in text]
    assert len(told) == 1, "of each rollout; the run ends with the second"


def test_what_may_choose_the_best_is_told(rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(data={"eval": 0.3, "max_length": 40}, eval={"best": "letters", "every": 2})
    with pytest.raises(RecipeError, match=r"eval\.best: letters is not measured") as caught:
        train(recipe, display=Silent())
    assert caught.value.why == "available metrics: reward"


def test_a_run_without_an_update_yet_goes_on(rl: RecipeFor, tmp_path: Path) -> None:
    """Its checkpoints have no state of the optimizer."""
    recipe = rl(rewards=[], rollouts={"patience": 9}, train={"steps": 4}, checkpoint={"every": 1})
    same_for_all = reward_file(tmp_path, "def reward(completions, **columns): return [0.25] * len(completions)")
    with pytest.raises(Interrupted):
        train(recipe, display=stop_at(2), reward_file=same_for_all)
    train(recipe, display=Silent(), reward_file=reward_file(tmp_path))
    assert [step["grad_norm"] > 0 for step in events_of(recipe.output, "step")] == [False, False, True, True]


def test_faults_of_one_kind_are_told_once() -> None:
    said = "reward: ValueError: could not convert string to float: {} (line {})"
    kinds = [kind_of_fault(said.format(*some)) for some in (("'it\\'s 4'", 8), ("'no\\n'", 8), ("'4'", 9))]
    assert kinds[0] == kinds[1] != kinds[2]
    assert kind_of_fault("reward: took 0.51 s") == kind_of_fault("reward: took 0.6 s")
    groups: Any = [SimpleNamespace(row=row, scored=[Scored(None, {}, said.format(f"'{row}'", 8))]) for row in range(3)]
    left = left_out_of(groups, str, World())
    assert left.reasons == {said.format("'0'", 8): 3}
    assert left.text(said.format("'0'", 8)).startswith("3 of 3 answers left out of their groups: reward: ValueError")


def test_a_stop_text_is_a_token_of_its_own_behind_another() -> None:
    """Where a tokenizer puts a space before a text."""
    model = BPE({"\u2581": 0, "a": 1, ".": 2, "b": 3, "\u2581a": 4}, [("\u2581", "a")])
    backend = Tokenizer(model)
    backend.pre_tokenizer = Metaspace()
    tokenizer: Any = SimpleNamespace(backend_tokenizer=backend)
    assert (_stop_token(tokenizer, "."), _stop_token(tokenizer, "b")) == (2, 3)
    with pytest.raises(RecipeError, match="is encoded as 3 tokens"):
        _stop_token(tokenizer, "..")


def test_without_a_signal_steps_are_counted_and_the_run_stops(rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(rollouts={"patience": 3}, rewards=[], train={"steps": 9})
    same_for_all = reward_file(tmp_path, "def reward(completions, **columns): return [0.25] * len(completions)")
    with pytest.raises(HealthStop, match=r"no group of answers had a signal in 3 rollouts in a row.*0\.25 on average"):
        train(recipe, display=Silent(), reward_file=same_for_all)
    assert [step["reward"] for step in events_of(recipe.output, "step")] == [0.25, 0.25]
    assert "no update" in notices_of(recipe.output)[-1]


def test_a_changed_reward_file_is_told(rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(rewards=[], train={"steps": 3}, checkpoint={"every": 1})
    with pytest.raises(Interrupted):
        train(recipe, display=stop_at(1), reward_file=reward_file(tmp_path))
    result = train(recipe, display=Silent(), reward_file=reward_file(tmp_path, ODD + "\n# another"))
    told = [text for text in notices_of(result.folder) if "rewards come from changed since the checkpoint" in text]
    assert len(told) == 1


def test_a_sampler_that_differs_from_the_learner_is_told_or_stops_the_run() -> None:
    policy = Policy()
    assert policy.remarks(1, {MISMATCH: 0.02}) == []
    (told,) = policy.remarks(2, {MISMATCH: 0.07})
    assert "differ by 0.070 on average" in told
    assert policy.remarks(3, {MISMATCH: 0.07}) == []  # once
    assert policy.remarks(4, {MISMATCH: 0.5, "update": 2.0}) == []  # the weights have changed since
    with pytest.raises(HealthStop, match="step 5: log-probabilities of sampled tokens differ by"):
        policy.remarks(5, {MISMATCH: 0.5, "update": 1.0})


def test_the_command_line_takes_a_reward_file(rl: RecipeFor, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, file = rl(), reward_file(tmp_path)
    path = tmp_path / "rl.yaml"
    path.write_text(
        f"model: {recipe.model}\nobjective: grpo\nprecision: fp32\nrollouts: {{prompts: 2, answers: 2, max_new_tokens: 4}}\n"
        f"data: {{train: [{tmp_path / 'prompts.jsonl'}], max_length: 40}}\ntrain: {{steps: 1, capacity: 64}}\n"
        f"output: {tmp_path / 'cli'}\n"
    )
    assert main(["check", str(path), "--reward-file", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rewards"] == [
        "reward: 0.3333 on average, for their expected answers to 10 prompts"
    ]
    assert main(["check", str(path)]) == 2
    assert "--reward-file FILE" in capsys.readouterr().err
    assert main(["train", str(path), "--reward-file", str(file), "--json"]) == 0
    assert events_of(tmp_path / "cli", "step")[0]["rewards/reward/mean"] > 0


def test_answers_that_were_cut_may_be_masked(rl: RecipeFor, tmp_path: Path) -> None:
    found = []
    for kind in ("keep", "mask"):
        recipe = rl(
            train={"steps": 1}, data={"max_length": 120}, rollouts={"max_new_tokens": 100, "truncated": kind}, rewards=[]
        )
        found += rewards_of(train(recipe, display=Silent(), fresh=True, reward_file=reward_file(tmp_path)).folder)
    kept, masked = found
    assert masked["reward"] == kept["reward"]
    assert 0 < masked["completions/clipped_ratio"] < 1
    assert kept["loss_tokens"] - masked["loss_tokens"] == round(100 * 16 * masked["completions/clipped_ratio"])


def test_a_text_of_one_token_ends_an_answer(rl: RecipeFor) -> None:
    steps = [rewards_of(train(rl(train={"steps": 1}, rollouts=more), display=Silent(), fresh=True).folder)[0]
             for more in ({}, {"stop": list("aeiou nrst")})]  # fmt: skip
    free, stopped = (step["completions/clipped_ratio"] for step in steps)
    assert stopped < free
    assert steps[1]["completions/mean_terminated_length"] < 6


def test_what_cannot_be_honoured_is_refused_before_the_run(rl: RecipeFor, recipes: RecipeFor, tmp_path: Path) -> None:
    def refused(kind: type[Exception], what: str, file: Path | None = None, **changes: Any) -> None:
        with pytest.raises(kind, match=what):
            train(rl(**changes), display=Silent(), reward_file=file)

    refused(RecipeError, "rewards: there are none", rewards=[])
    refused(RecipeError, "'end.' is encoded as 4 tokens", rollouts={"stop": ["end."]})
    refused(RecipeError, "length is a function, and no file has it", rewards=[{"function": "length"}])
    refused(CommandError, "--reward-file: the file cannot be used", reward_file(tmp_path), rewards=[{"function": "length"}])
    refused(CommandError, "not a Python file", tmp_path / "none.py", rewards=[])
    fails = reward_file(tmp_path, "def reward(completions, solution, **columns): return [1.0]")
    refused(CommandError, "missing 1 required positional argument: 'solution'", fails, rewards=[])
    refused(DataError, "rewards: json_match: the expected answer is not JSON", rewards=[{"metric": "json_match"}])
    refused(DataError, "does not match the expected answer", rewards=[{"metric": "regex", "regex": "([0-9])"}])
    refused(DataError, r"10 of 10 rows \(100.0%\) has?v?e? more than 4 tokens, which is", data={"max_length": 10})
    other = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=8, n_head=1, n_layer=1, n_positions=64))
    refused(RecipeError, "this model cannot answer prompts during a run", model=saved(other, tmp_path / "gpt2"))
    with pytest.raises(CommandError, match="objective supervised has no rewards"):
        train(recipes(), display=Silent(), reward_file=fails)
