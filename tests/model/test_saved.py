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
from samples import random_table, small

SMALL = small(num_hidden_layers=4)
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "olmo2": Olmo2Config(**SMALL),
}
LEVELS: tuple[Level, ...] = ("nothing", "gate_up", "around_attention", "layer")


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


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """To the rounding of fp32 sums in another order; relative to the largest of each gradient."""
    return one.keys() == other.keys() and all(
        float((one[name] - other[name]).abs().max()) <= 4e-6 * float(other[name].abs().max()) + 1e-12 for name in one
    )


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
