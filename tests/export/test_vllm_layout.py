"""Adapters as vLLM and SGLang serve them: experts by their own names, with the same product."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.export_models import make_checkpoint, make_model
from exports import export
from pronghorn.errors import CommandError
from pronghorn.model.export import trained_model
from pronghorn.recipe import Recipe
from samples import make_tokenizer

RecipeFor = Callable[..., Recipe]


def made(recipe_for: RecipeFor, folder: Path, family: str, **changes: Any) -> tuple[Path, Recipe]:
    recipe = recipe_for(model=str(make_model(family, folder / "model")), **changes)
    return make_checkpoint(recipe, folder / "checkpoint", make_tokenizer()), recipe


def test_every_expert_has_its_own_adapter(recipe_for: RecipeFor, tmp_path: Path) -> None:
    lora = {"targets": ["all-linear", "experts"], "r": 4, "alpha": 6}
    checkpoint, recipe = made(recipe_for, tmp_path, "qwen3_moe", lora=lora)
    written = export(checkpoint, recipe, tmp_path / "out", "vllm", check=True)
    assert written.verdict.passed, written.verdict.sentence
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    layer = trained_model(checkpoint, recipe, torch.float32, torch.device("cpu")).get_base_model().model.layers[1]
    wrappers = {module.parameter_name: module for module in layer.modules() if hasattr(module, "parameter_name")}
    whole = wrappers["gate_up_proj"].get_delta_weight("default")
    for number, part in enumerate(("gate_proj", "up_proj")):
        name = f"base_model.model.model.layers.1.mlp.experts.3.{part}"
        product = found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"] * 6 / 4
        torch.testing.assert_close(product, whole[3, 64 * number : 64 * (number + 1)])
    assert not [name for name in found if "experts.lora_" in name or "experts.base_layer" in name]
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj", "q_proj"} <= set(config["target_modules"])
    assert config["target_parameters"] is None
    assert json.loads((tmp_path / "out" / "export.json").read_text())["max_lora_rank"] == 8
    assert "--enable-lora --max-lora-rank 8 --lora-modules run=path/to/this/folder" in written.usages[0].text


def test_an_adapter_of_linears_is_the_run_s_own(recipe_for: RecipeFor, tmp_path: Path) -> None:
    checkpoint, recipe = made(recipe_for, tmp_path, "llama", method="qlora", lora={"r": 20})
    written = export(checkpoint, recipe, tmp_path / "out", "vllm")
    name = "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert "--quantization bitsandbytes --enable-lora --max-lora-rank 32" in written.usages[0].text


@pytest.mark.parametrize(
    ("family", "changes", "what"),
    [
        ("llama", {"lora": {"dora": True}}, "do not support DoRA adapters"),
        ("llama", {"lora": {"r": 600}}, "rank 600 cannot be served"),
        ("gpt_oss", {"lora": {"targets": ["experts"]}}, "adapters of gpt_oss's experts cannot be served"),
    ],
)
def test_what_cannot_be_served_is_to_be_merged_first(
    family: str, changes: dict[str, Any], what: str, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    checkpoint, recipe = made(recipe_for, tmp_path, family, **changes)
    with pytest.raises(CommandError, match=what) as caught:
        export(checkpoint, recipe, tmp_path / "out", "vllm")
    assert "merge first: use --to merged" in caught.value.fix
    assert not (tmp_path / "out").exists()
