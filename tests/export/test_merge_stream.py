"""A merge that has one layer in memory gives the weights of one that has them all, bit for bit, in files of limited size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.export_models import make_checkpoint, make_model
from pronghorn.model.export import trained_model
from pronghorn.model.merge import save_merged
from pronghorn.model.merge_stream import MergedWeights, merging, write_config
from pronghorn.model.sharded import shards_of, write_sharded
from pronghorn.recipe import Recipe
from samples import make_tokenizer
from tables import first_of

RecipeFor = Callable[..., Recipe]
CPU = torch.device("cpu")
EXPERTS = {"targets": ["all-linear", "experts"]}
# Every family, every storage, every layout of experts in files.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"lora": {"dora": True}, "precision": "bf16"}),
    ("llama", {"lora": {"targets": ["q_proj", "lm_head"]}}),  # a tied head that was trained apart
    ("qwen3", {"method": "qlora"}),
    ("gemma2", {"method": "qlora", "precision": "bf16"}),
    ("phi3", {"method": "fp8"}),
    ("qwen3_moe", {"lora": EXPERTS}),
    ("qwen3_moe", {"method": "qlora", "lora": EXPERTS, "precision": "bf16"}),
    ("mixtral", {"lora": EXPERTS}),
    ("gpt_oss", {"lora": EXPERTS}),
    ("gpt_oss", {"method": "qlora", "lora": EXPERTS}),
]


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("family", "changes"), first_of([*CASES[::2], *CASES[1::2]], 6))
def test_a_layer_at_a_time_gives_the_same_bits(
    family: str, changes: dict[str, Any], recipe_for: RecipeFor, tmp_path: Path
) -> None:
    recipe = recipe_for(model=str(make_model(family, tmp_path / "model")), **changes)
    checkpoint = make_checkpoint(recipe, tmp_path / "checkpoint", make_tokenizer())
    dtype = torch.bfloat16 if recipe.precision == "bf16" else torch.float32
    whole = trained_model(checkpoint, recipe, dtype if recipe.stored_as != "bf16" else torch.float32, CPU)
    save_merged(whole, tmp_path / "whole", dtype)
    source = merging(checkpoint, recipe, dtype)
    assert isinstance(source, MergedWeights)
    (tmp_path / "out").mkdir()
    write_sharded(tmp_path / "out", source, lambda *_: None, largest=100_000)
    write_config(source, tmp_path / "out", dtype)
    expected, found = files_of(tmp_path / "whole"), files_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 1
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.tie_word_embeddings is (family in ("llama", "gemma2") and "lm_head" not in str(changes))


def test_a_file_is_as_large_as_asked_and_begins_every_tensor_at_its_alignment(tmp_path: Path) -> None:
    class Mixed:
        layout = (
            {"a": torch.empty(3, dtype=torch.uint8, device="meta"), "b": torch.empty(5, device="meta")},
            {"c": torch.empty((), dtype=torch.bfloat16, device="meta"), "d": torch.empty(100, device="meta")},
            {"e": torch.empty(2, dtype=torch.float8_e4m3fn, device="meta")},
        )

        def group(self, number: int) -> dict[str, torch.Tensor]:
            return {name: torch.full(t.shape, 7, dtype=torch.float32).to(t.dtype) for name, t in self.layout[number].items()}

    assert [list(shard.places) for shard in shards_of(Mixed.layout, 30)] == [["b", "c", "a"], ["d"], ["e"]]
    write_sharded(tmp_path, Mixed(), lambda *_: None, largest=30)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["d"] == "model-00002-of-00003.safetensors"
    assert index["metadata"]["total_size"] == 3 + 20 + 2 + 400 + 2
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as stored:
            assert float(stored.get_tensor(name).float().mean()) == 7
