"""A reward model of ours as a reward of another run: its scores are stock transformers' own, and what is none is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from watching import Silent, events_of

from pronghorn.errors import DataError, ModelError, PronghornError
from pronghorn.export.run import export_run
from pronghorn.recipe import Recipe
from pronghorn.rewards.pool import Fault
from pronghorn.rewards.scoring import Said
from pronghorn.train.loop import train
from pronghorn.train.run.reward_models import RewardModel
from pronghorn.train.run.run_evaluation import evaluate_run
from pronghorn.train.setup.check import check_run
from samples import pair_rows, write_rows

RecipeFor = Callable[..., Recipe]
CHAT = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture
def judge(recipe_for: RecipeFor, tmp_path: Path) -> Path:
    """A run that trained a reward model."""
    pairs = write_rows(tmp_path / "pairs.jsonl", pair_rows(12))
    recipe = recipe_for(
        objective="reward", data={"train": [str(pairs)], "eval": None}, eval={"generations": 0}, train={"steps": 2, "lr": 2e-2},
        output=str(tmp_path / "judge"),
    )  # fmt: skip
    return Path(train(recipe, display=Silent()).folder)


@pytest.fixture
def rl(recipe_for: RecipeFor, tmp_path: Path) -> RecipeFor:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": CHAT, "answer": "3"}, {"prompt": CHAT, "answer": "4"}])

    def build(model: Path | str, **changes: Any) -> Recipe:
        base: dict[str, Any] = {
            "objective": "grpo", "rollouts": {"prompts": 2, "answers": 4, "max_new_tokens": 6}, "output": str(tmp_path / "rl"),
            "rewards": [{"model": str(model), "weight": 0.5}], "data": {"train": [str(prompts)], "eval": None},
            "train": {"steps": 2, "lr": 1e-2, "capacity": 512, "batch_tokens": 65536}, "eval": {"generations": 0},
        }  # fmt: skip
        return recipe_for(**base | changes)

    return build


def test_scores_are_those_of_stock_transformers(judge: Path, rl: RecipeFor, tmp_path: Path) -> None:
    """Of the run, of its checkpoint and of its export, in packs; by conversations and by texts."""
    (merged,) = export_run(judge, "last", None, "merged")
    stock = AutoModelForSequenceClassification.from_pretrained(merged.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(merged.folder)
    answers = [Said("a:1", CHAT, text) for text in ("3", "I do not know.", "<|im_end|>", "4" * 200)]
    answers += [Said("a:2", "1 + 2 = ", "3"), Said("a:3", CHAT, "x" * 600)]
    texts = [
        tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": said.text}], tokenize=False)
        for said in answers[:2]
    ]
    texts += [f"1 + 2 = 3{tokenizer.eos_token}"]
    with torch.no_grad():
        expected = [
            float(stock(torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])).logits) for text in texts
        ]
    checkpoint = max(judge.glob("checkpoint-*"))
    for place in (judge, checkpoint, merged.folder):
        found = RewardModel(str(place), rl(place)).score(answers)
        assert [found[0], found[1], found[4]] == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert all(isinstance(score, float) for score in found[:5])
        assert isinstance(found[5], Fault)
        assert "more than the 512 that a reward model reads here" in found[5].what
    assert len(set(found[:5])) == 5


def test_a_run_learns_from_a_reward_model(judge: Path, rl: RecipeFor, tmp_path: Path) -> None:
    recipe = rl(judge)
    facts = check_run(recipe, report=lambda *_: None)
    assert facts.rewards[0].startswith(f"judge: a reward model, {judge}/checkpoint-2; it reads up to")
    result = train(recipe, display=Silent())
    steps = events_of(result.folder, "step")
    assert len({step["rewards/judge/mean"] for step in steps}) == 2
    assert steps[0]["reward"] == pytest.approx(0.5 * steps[0]["rewards/judge/mean"])
    assert steps[0]["grad_norm"] > 0
    figures = evaluate_run(Path(result.folder), "last", data=str(tmp_path / "prompts.jsonl"), report=lambda *_: None)
    assert "rewards/judge/mean" in figures["figures"]
    planned = rl(judge, memory={"budget": "8GB"}, precision="fp32")
    model = RewardModel(str(judge), planned)
    weights = sum(tensor.numel() for tensor in AutoModelForSequenceClassification.from_pretrained(recipe.model).parameters())
    assert 4 * weights * 0.9 < model.device_bytes() < 4 * weights + (64 << 20)


def test_what_is_no_reward_model_is_refused_before_the_start(judge: Path, rl: RecipeFor, tmp_path: Path) -> None:
    def refused(kind: type[PronghornError], what: str, model: str) -> None:
        for start in (lambda recipe: train(recipe, display=Silent()), lambda recipe: check_run(recipe, report=lambda *_: None)):
            with pytest.raises(kind, match=what) as caught:
                start(rl(model))
            assert caught.value.fix

    base = rl(judge).model
    refused(ModelError, "this is not a reward model", base)
    run = train(rl(judge, rewards=["json_valid"], output=str(tmp_path / "other")), display=Silent())
    refused(ModelError, "this is not a reward model", str(run.folder))
    refused(ModelError, "no such model folder", str(tmp_path / "absent"))
    (merged,) = export_run(judge, "last", None, "merged")
    (merged.folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = merged.folder / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "chat_template"}))
    refused(DataError, "chat template", str(merged.folder))


def test_a_run_of_rewards_without_held_out_prompts_is_exported(rl: RecipeFor, tmp_path: Path) -> None:
    """Checked on the prompts it was trained on: its source knows no other rows."""
    run = train(rl("none", rewards=[{"metric": "exact_match"}]), display=Silent())
    (merged,) = export_run(Path(run.folder), "last", None, "merged")
    assert merged.verdict.passed
