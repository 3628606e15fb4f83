"""Whole runs of models with Gated DeltaNet or Mamba-2: they learn, resume to the bit, answer, and export what stock libraries
load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_gated_delta_mixer import CONFIGS as GATED_DELTA
from test_gated_delta_mixer import MOE, SIZES
from test_mamba_mixer import CONFIGS as MAMBA
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from watching import RecipeFor, Silent, events_of, losses_of, notices_of, same, saved, stop_at, weights

from exports import export
from pronghorn.errors import Interrupted
from pronghorn.train.loop import train
from pronghorn.train.objectives.policy import MISMATCH
from samples import pair_rows, write_rows
from tables import first_of

CONFIGS = GATED_DELTA | MAMBA
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def with_images(kind: str, folder: Path) -> str:
    """A multimodal checkpoint, as all of Qwen3.5 are."""
    torch.manual_seed(0)
    sizes = SIZES | (MOE if "moe" in kind else {}) | {"eos_token_id": 2}
    config = AutoConfig.for_model(kind, text_config=sizes, vision_config=VISION)
    return saved(AutoModelForImageTextToText.from_config(config), folder)


def text_alone(kind: str, folder: Path) -> str:
    torch.manual_seed(0)
    return saved(AutoModelForCausalLM.from_config(CONFIGS[kind]), folder)


def model_folder(kind: str, folder: Path) -> str:
    return (text_alone if kind in CONFIGS else with_images)(kind, folder)


@pytest.mark.parametrize(
    ("kind", "method"),
    first_of(
        [
            ("qwen3_5", "lora"),
            ("qwen3_5_moe", "qlora"),
            ("qwen3_5_text", "full"),
            ("nemotron_h, experts", "lora"),
            ("granitemoehybrid, experts", "qlora"),
            ("falcon_h1", "lora"),
            ("nemotron_h", "full"),
            ("qwen3_next", "lora"),
            ("granitemoehybrid", "lora"),
            ("nemotron_h, experts", "qlora"),
            ("nemotron_h, experts", "full"),
        ],
        7,
    ),
)
def test_a_run_learns_resumes_and_exports(kind: str, method: str, recipe_for: RecipeFor, tmp_path: Path) -> None:
    folder = model_folder(kind, tmp_path / "model")
    options: dict[str, Any] = {
        "model": folder,
        "method": method,
        "train": {"steps": 6, "lr": 3e-3 if method == "full" else 2e-2},
        "eval": {"every": 3, "generations": 1},
        "checkpoint": {"every": 3, "keep": 9},
    }
    whole, cut = (recipe_for(**options, output=str(tmp_path / name)) for name in ("whole", "cut"))
    result = train(whole, display=Silent())
    losses = losses_of(result.folder)
    assert losses[-1] < losses[0] - 0.1
    assert not [text for text in notices_of(result.folder) if "layers" in text]
    assert len(events_of(result.folder, "eval")) >= 2
    with pytest.raises(Interrupted):
        train(cut, display=stop_at(3))
    again = train(cut, display=Silent())
    assert losses_of(again.folder) == losses
    assert same(weights(again.checkpoint), weights(result.checkpoint))
    export(result.checkpoint, whole, tmp_path / "merged", "merged", {})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        found = merged(input_ids=ids).logits
        if method == "lora":
            export(result.checkpoint, whole, tmp_path / "adapter", "adapter", {})
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            expected = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(input_ids=ids).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        if method == "full":
            trained = AutoModelForCausalLM.from_pretrained(result.checkpoint, dtype=torch.float32)
            torch.testing.assert_close(found, trained(input_ids=ids).logits)


def test_all_linears_have_adapters(recipe_for: RecipeFor, tmp_path: Path) -> None:
    result = train(recipe_for(model=with_images("qwen3_5", tmp_path / "model"), train={"steps": 1}), display=Silent())
    names = {name.split(".lora_")[0].rpartition("layers.")[2] for name in weights(result.checkpoint)}
    mixer = {f"0.linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")}
    assert {name for name in names if name.startswith("0.linear_attn")} == mixer
    assert {f"1.self_attn.{name}_proj" for name in "qkvo"} < names


@pytest.mark.parametrize("kind", ["qwen3_5", "nemotron_h"])
def test_preferences_and_rewards(kind: str, recipe_for: RecipeFor, tmp_path: Path) -> None:
    """DPO and GRPO, whose answers start from their prompt's state, in packs and in decoding."""
    folder = model_folder(kind, tmp_path / "model")
    pairs = write_rows(tmp_path / "pairs.jsonl", pair_rows(24))
    options: dict[str, Any] = {"model": folder, "train": {"steps": 3, "lr": 2e-2}, "eval": {"generations": 0}}
    dpo = train(recipe_for(objective="dpo", data={"train": [str(pairs)], "eval": None}, **options), display=Silent())
    losses = losses_of(dpo.folder)
    assert losses[-1] < losses[0]
    assert not [text for text in notices_of(dpo.folder) if "copy of the prompt" in text]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Say {i}:"} for i in range(10)])
    options["train"] |= {"epochs": 1, "batch_tokens": 65536, "capacity": 256}
    grpo = recipe_for(
        objective="grpo",
        rollouts={"prompts": 4, "answers": 4, "max_new_tokens": 6},
        rewards=[{"metric": "regex", "regex": "[a-zA-Z]"}],
        data={"train": [str(prompts)], "eval": None, "max_length": 40},
        output=str(tmp_path / "grpo"),
        **options,
    )
    steps = events_of(train(grpo, display=Silent()).folder, "step")
    assert len(steps) == 3
    assert max(step[MISMATCH] for step in steps) < 1e-5  # what answered is what learns


@pytest.mark.parametrize("changes", [{"method": "fp8"}, {"method": "qlora", "compute": "fp8"}])
def test_runs_in_fp8(changes: dict[str, Any], recipe_for: RecipeFor, tmp_path: Path) -> None:
    folder = with_images("qwen3_5", tmp_path / "model")
    options: dict[str, Any] = {"train": {"steps": 6, "lr": 2e-2}, "eval": {"generations": 0}}
    losses = losses_of(train(recipe_for(model=folder, **changes, **options), display=Silent()).folder)
    assert losses[-1] < losses[0] - 0.1
