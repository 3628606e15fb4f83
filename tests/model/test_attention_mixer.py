"""Who turns the gradients of queries and keys back: attention's backward, or RoPE's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Phi3Config, Qwen3Config

from pronghorn.data.pack.batches import build_batch
from pronghorn.kernels.attention import attention
from pronghorn.kernels.attention.attention_torch import PlainTorch
from pronghorn.kernels.attention.rope_torch import rotate
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.mixers import attention as mixer
from samples import random_table, small

SMALL = small(hidden_size=64, initializer_range=0.15)
SCALED = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.5,
}


class Unrotates(PlainTorch):
    """Plain torch in the place of our kernel, which needs a GPU."""

    rotated = 0

    @classmethod
    def backward(cls, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # type: ignore[override]
        *usual, last = arguments if len(arguments) == 5 else (*arguments, None)
        dq, dk, dv, dsinks = PlainTorch.backward(*usual)
        if last is not None:
            cls.rotated += 1
            cos, sin = last
            dq.copy_(rotate(dq, cos, -sin, neighbours=False))
            dk.copy_(rotate(dk, cos, -sin, neighbours=False))
        return dq, dk, dv, dsinks


def gradients(model: Any) -> dict[str, Tensor]:
    batch = build_batch(random_table(6), np.arange(6), 256)
    engine = engine_of(model)
    engine.packed_loss(replace(batch, typical=40))[0].backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("config", "rotated"),
    [
        (LlamaConfig(**SMALL), 2),  # in each of two layers
        (Qwen3Config(**SMALL, head_dim=16), 0),  # its norm comes before RoPE, so its gradient comes after
        (Phi3Config(**SMALL, partial_rotary_factor=0.5), 0),
        (AutoConfig.for_model("smollm3", **SMALL, no_rope_layers=[1, 0]), 2),  # one of them by nothing
        (AutoConfig.for_model("ministral3", **SMALL, head_dim=16, rope_parameters=SCALED), 2),
    ],
    ids=["llama", "qk-norm", "partial rotary", "a layer without rope", "queries scaled by position"],
)
def test_gradients_are_rotated_back_once(config: Any, rotated: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().train()
    assert not install(model)
    expected = gradients(model)
    monkeypatch.setattr(Unrotates, "rotated", 0)
    monkeypatch.setitem(attention.BACKENDS, "short", Unrotates)
    monkeypatch.setattr(mixer, "pick_backend", lambda *_, **__: "short")
    found = gradients(model)
    assert Unrotates.rotated == rotated
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-12)
