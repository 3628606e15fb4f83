"""FP8 and NVFP4 checkpoints: what was trained so leaves with its own bytes, and compressed-tensors reads them all."""

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
from pronghorn.kernels.quant.fp8_cast import fp8_quantize
from pronghorn.kernels.quant.nvfp4 import nvfp4_quantize
from pronghorn.model.export import trained_model
from pronghorn.recipe import Recipe
from samples import make_tokenizer

RecipeFor = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("short_export_check")
CPU = torch.device("cpu")


def made(recipe_for: RecipeFor, folder: Path, family: str, **changes: Any) -> tuple[Path, Recipe]:
    recipe = recipe_for(model=str(make_model(family, folder / "model")), **changes)
    return make_checkpoint(recipe, folder / "checkpoint", make_tokenizer()), recipe


@pytest.mark.parametrize(("family", "to"), [("qwen3", "fp8"), ("qwen3_moe", "fp8:base"), ("qwen3_moe", "nvfp4")])
def test_what_was_trained_in_the_format_is_not_rounded_again(
    family: str, to: str, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    """Linears without an adapter, and stacks of experts, which the files have expert by expert."""
    storage = {"method": "qlora", "storage": "nvfp4"} if to == "nvfp4" else {"method": "fp8"}
    checkpoint, recipe = made(recipe_for, tmp_path, family, lora={"targets": ["q_proj"]}, **storage)
    export(checkpoint, recipe, tmp_path / "out", to)
    found = load_file(tmp_path / "out" / "model.safetensors")
    layer = trained_model(checkpoint, recipe, torch.float32, CPU).get_base_model().model.layers[1]
    v, prefix = layer.self_attn.v_proj.stored, "model.layers.1."
    values, scales = (
        found[f"{prefix}self_attn.v_proj.weight{part}"] for part in (("_packed", "_scale") if to == "nvfp4" else ("", "_scale"))
    )
    own = tuple(v.tensors().values())
    assert torch.equal(values.view(torch.uint8), own[0])
    assert torch.equal(scales.flatten().float(), own[1].flatten().float())
    if family == "qwen3_moe":
        stack = layer.mlp.experts.stacks["gate_up_proj"].stored
        whole = stack.dequantize(dtype=torch.float32).view(4, 2, 64, 64)
        name = f"{prefix}mlp.experts.2.up_proj.weight"
        if to == "nvfp4":
            assert torch.equal(1 / found[f"{name}_global_scale"], 1 / (1 / stack.tensor_scale.reshape(1)))
            assert torch.equal(found[f"{name}_packed"], stack.packed.view(4, 2, 64, 32)[2, 1])
        else:
            assert torch.equal(found[name].float() * found[f"{name}_scale"], whole[2, 1])
    q = f"{prefix}self_attn.q_proj.weight"
    merged = trained_model(checkpoint, recipe, torch.float32, CPU).get_base_model().model.layers[1].self_attn.q_proj
    base = merged.base_layer.dequantize(torch.float32)
    if to == "fp8":  # and what has an adapter is rounded once
        again = fp8_quantize(base + merged.get_delta_weight("default"))
        assert torch.equal(found[q].view(torch.uint8), again.values.view(torch.uint8))
    elif to == "fp8:base":
        assert torch.equal(found[q].float() * found[f"{q}_scale"], base)
        assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_what_programs_multiply_as_one_matrix_has_one_scale(recipe_for: RecipeFor, tmp_path: Path) -> None:
    checkpoint, recipe = made(recipe_for, tmp_path, "qwen3")
    export(checkpoint, recipe, tmp_path / "merged", "merged")
    export(checkpoint, recipe, tmp_path / "out", "nvfp4")
    wide, found = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "out"))
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    assert len({float(found[f"{name}_global_scale"]) for name in names}) == 1
    q = nvfp4_quantize(torch.cat([wide[name] for name in names]))
    assert torch.equal(torch.cat([found[f"{name}_packed"] for name in names]), q.packed)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"], config["ignore"]) == (
        "compressed-tensors",
        "nvfp4-pack-quantized",
        ["lm_head"],
    )


def test_the_frozen_base_is_offered_where_it_was_in_fp8(recipe_for: RecipeFor, tmp_path: Path) -> None:
    checkpoint, recipe = made(recipe_for, tmp_path, "qwen3")
    with pytest.raises(CommandError, match="needs a run that trained on an FP8 base model") as caught:
        export(checkpoint, recipe, tmp_path / "out", "fp8:base")
    assert "use --to fp8" in caught.value.fix
    with pytest.raises(CommandError, match="--to fp8:new is not supported"):
        export(checkpoint, recipe, tmp_path / "out", "fp8:new")


@pytest.mark.parametrize(
    ("family", "to", "changes"),
    [
        ("llama", "nvfp4", {}),
        ("qwen3_moe", "fp8", {"lora": {"targets": ["all-linear", "experts"]}}),
        ("phi3", "fp8:base", {"method": "fp8"}),
    ],
)
def test_compressed_tensors_reads_it(
    family: str, to: str, changes: dict[str, Any], recipe_for: RecipeFor, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    checkpoint, recipe = made(recipe_for, tmp_path, family, **changes)
    verdict = export(checkpoint, recipe, tmp_path / "out", to, check=True).verdict
    assert verdict.passed, verdict.sentence
    assert verdict.mean_log_prob_difference > 1e-3


def test_without_compressed_tensors_the_check_is_left_out_and_said(
    recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pronghorn.export.compressed.find_spec", lambda _: None)
    checkpoint, recipe = made(recipe_for, tmp_path, "llama")
    written = export(checkpoint, recipe, tmp_path / "out", "fp8", check=True)
    assert written.verdict.passed is None
    assert "pip install compressed-tensors" in json.loads((tmp_path / "out" / "export.json").read_text())["check"]["sentence"]
