"""What is kept, computed again or waiting elsewhere changes no bit of loss and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Olmo2Config, Qwen3Config

from pronghorn.data.pack.batches import build_batch
from pronghorn.memory.offload import OffloadPool, bytes_needed
from pronghorn.model.causal_lm import FastCausalLM, engine_of, install
from pronghorn.model.layers.saved import Level, Saved, leave, restore
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Lora
from pronghorn.train.objectives import Supervised
from samples import random_table

SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "olmo2": Olmo2Config(**SMALL),
}
LEVELS: tuple[Level, ...] = ("nothing", "gate_up", "around_attention", "layer")
MIXED = ["layer", "around_attention", "nothing", "around_attention"]


def model_of(family: str, lora: bool) -> tuple[Any, FastCausalLM]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    if lora:
        model = add_adapter(model, Lora(r=4), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    assert install(model) == ""
    engine = engine_of(model)
    assert engine is not None
    return model.train(), engine


def batch_of() -> PackedBatch:
    return build_batch(random_table(6), np.arange(6), 256)


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    loss = Supervised().loss_sum(model, batch_of())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return float(loss.detach()), found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_level_gives_the_same_bits(family: str, lora: bool) -> None:
    model, engine = model_of(family, lora)
    loss, expected = gradients(model)
    assert any(float(grad.norm()) > 0 for grad in expected.values())
    for levels in (["gate_up"] * 4, ["layer"] * 4, ["layer", "gate_up", "nothing", "layer"], MIXED):
        for layer, level in zip(engine.layers, levels, strict=True):
            layer.level = level  # type: ignore[assignment]
        again, found = gradients(model)
        assert again == loss
        assert equal(found, expected), levels


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the rounding of fp32 sums in another order; relative to the largest of each gradient."""
    return one.keys() == other.keys() and all(
        float((one[name] - other[name]).abs().max()) <= 4e-6 * float(other[name].abs().max()) + 1e-12 for name in one
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_waits_elsewhere_comes_back_bit_for_bit(family: str) -> None:
    model, engine = model_of(family, lora=True)
    _, expected = gradients(model)
    pool = OffloadPool(4, 4_000_000, torch.device("cpu"))
    for layer, level in zip(engine.layers, ("around_attention", "layer", "gate_up", "around_attention"), strict=True):
        layer.level, layer.offload = level, pool  # type: ignore[assignment]
    _, found = gradients(model)
    pool.finish()
    assert equal(found, expected)


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_holds_on_to_what_it_says(level: Level) -> None:
    _, engine = model_of("llama", lora=False)

    def tensor() -> torch.Tensor:
        return torch.randn(3, 4)

    names = ("h", "q", "k", "v", "lse", "o", "h2", "gu", "xa3", "rstd.before_mlp")
    saved = Saved({name: tensor() for name in names})
    everything = dict(saved)
    left = engine.layers[0].kept(saved, level)
    expected = {
        "nothing": set(names),
        "gate_up": {*names} - {"gu"},
        "around_attention": {"h", "xa3", "o", "lse"},
        "layer": {"h", "xa3"},
    }[level]
    assert left.keys() == expected
    assert all(left[name] is everything[name] for name in expected)
    assert left["y1"] is None  # a name that is not there
    pool = OffloadPool(1, bytes_needed([tensor() for _ in range(20)]), torch.device("cpu"))
    away = leave(left, 0, pool)
    assert not isinstance(away, Saved)
    back = restore(away, 0, pool)
    assert back.keys() == expected
    assert all(torch.equal(back[name], everything[name]) for name in expected)
