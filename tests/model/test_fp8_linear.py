"""Linears stored in FP8: what they hold, how they are saved, loaded, cast and merged."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from nf4_checkpoints import bitsandbytes_config
from pronghorn.errors import ModelError
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.checkpoint import load_stored
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import dequantize_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from samples import one_document
from tables import first_of

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CONFIGS = {"llama": LlamaConfig(**SMALL), "qwen2, tied": Qwen2Config(**SMALL, tie_word_embeddings=True)}


def plain(name: str = "llama") -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name])


def linear(bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 48, bias=bias)


def test_where_a_product_in_fp8_is_not_possible_it_dequantizes() -> None:
    stored = StoredLinear.from_linear(linear(), FORMATS["fp8"])
    stored.storage = replace(stored.storage, product=None)
    x = torch.randn(7, 64, requires_grad=True)
    true = stored.to_own(torch.float32)
    assert torch.equal(stored(x), true(x))
    (dx,), (truth,) = (torch.autograd.grad(module(x).square().sum(), x) for module in (stored, true))
    torch.testing.assert_close(dx, truth)


def test_names_and_values_stay_while_fast_layers_use_the_bytes() -> None:
    model = plain()
    store_linears_(model, FORMATS["fp8"])
    model = add_adapter(model, Lora(r=4), seed=1)
    before = copy.deepcopy(model.state_dict())
    assert install(model) == ""
    engine = engine_of(model)
    engine.packed_loss(one_document(torch.arange(40) % 259))[0].backward()
    up = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert up.weight.stride(0) > up.in_features  # part of the group's matrix
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[key].is_contiguous() and torch.equal(after[key].float(), before[key].float()) for key in before)


def test_a_merge_is_dequantize_then_add() -> None:
    model = plain()
    store_linears_(model, FORMATS["fp8"])
    model = add_adapter(model, Lora(r=4, alpha=8), seed=1)
    up = model.get_base_model().model.layers[0].mlp.up_proj
    torch.nn.init.normal_(up.lora_B["default"].weight, std=0.05)
    expected = up.base_layer.dequantize() + 2.0 * (up.lora_B["default"].weight @ up.lora_A["default"].weight)
    assert dequantize_(model, torch.float32) == 14
    merged = model.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(merged.model.layers[0].mlp.up_proj.weight, expected.detach(), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", first_of(CONFIGS))
def test_loading_gives_what_quantizing_gives(name: str, tmp_path: Path) -> None:
    model = plain(name)
    model.save_pretrained(tmp_path)
    told: list[int] = []
    loaded = load_stored(
        tmp_path, FORMATS["fp8"], torch.float32, torch.device("cpu"), progress=lambda label, done, total: told.append(done)
    )
    store_linears_(model, FORMATS["fp8"])
    found, expected = loaded.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key].float(), expected[key].float()) for key in expected)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert told[-1] == len(told)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_incomplete_and_4_bit_folders_are_refused(tmp_path: Path) -> None:
    model = plain()
    model.config.quantization_config = bitsandbytes_config(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="4 bits"):
        load_stored(tmp_path, FORMATS["fp8"], torch.float32, torch.device("cpu"))
    del model.config.quantization_config
    state = {key: value for key, value in model.state_dict().items() if "layers.1.mlp.down" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight is not in its files"):
        load_stored(tmp_path, FORMATS["fp8"], torch.float32, torch.device("cpu"))


def test_generation() -> None:
    model = plain()
    store_linears_(model, FORMATS["fp8"])
    answer = model.generate(torch.arange(5)[None], max_new_tokens=4, do_sample=False)
    assert answer.shape == (1, 9)
