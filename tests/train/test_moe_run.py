"""Whole runs of mixtures of experts: they learn, count their experts, resume, and export what stock PEFT reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from test_loop import Silent
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from pronghorn.model.export import export, merged_model
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import history, read_log
from pronghorn.report.stages import Stages
from pronghorn.train.loop import train
from samples import make_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
                         "eos_token_id": 2, "bos_token_id": None, "max_position_embeddings": 512}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
                                        output_router_logits=True),
    "gpt_oss": lambda: GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16),
}


@pytest.mark.parametrize(("family", "method"), [("qwen3_moe", "lora"), ("qwen3_moe", "qlora"), ("gpt_oss", "lora"),
                                                ("gpt_oss", "qlora"), ("gpt_oss", "full")])
def test_a_run_learns_counts_its_experts_and_exports(
    family: str, method: str, recipe_for: Callable[..., Recipe], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    recipe = recipe_for(model=str(tmp_path / "model"), method=method, lora={"targets": ["all-linear", "experts"]},
                        train={"epochs": 4})
    result = train(recipe, display=Silent(), stages=Stages())
    events = history(read_log(result.folder))
    losses = [e["loss"] for e in events if e["event"] == "step"]
    assert losses[-1] < losses[0] - 0.1
    tokens = sum(e["tokens"] for e in events if e["event"] == "step")
    counted = [e["counts"]["0"] for e in events if e["event"] == "experts"]
    assert sum(map(sum, counted)) == 2 * tokens
    assert len(counted) > 1
    assert "Dropped tokens: 0" in (result.folder / "report.html").read_text(encoding="utf-8")
    assert result.checkpoint is not None
    if method == "lora":
        export(result.checkpoint, recipe, tmp_path / "adapter", "adapter", {})
        stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "model"), tmp_path / "adapter")
        ids = torch.arange(3, 23)[None]
        with torch.no_grad():
            truth = stock.eval()(input_ids=ids).logits
            merged = merged_model(result.checkpoint, recipe)(input_ids=ids).logits
        assert torch.allclose(merged, truth, rtol=1e-4, atol=1e-5)
