"""Qwen3.5, Qwen3-Next and the mixture against transformers, document by document: loss and all gradients, for every way of
training.

Stock transformers lets the states of a pack go from document to document, so each document is its own batch there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_short_conv_mixer import assert_same, engine, fast, own
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.model.causal_lm import install
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from samples import small

LENGTHS = (1, 63, 64, 65, 150, 5)
GATED = small(num_hidden_layers=2, initializer_range=0.15, head_dim=16, layer_types=["full_attention"] * 2)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def configs(**changes: Any) -> dict[str, Any]:
    return {
        "qwen3_5_text": AutoConfig.for_model("qwen3_5_text", **(GATED | changes)),
        "qwen3_5_moe_text": AutoConfig.for_model("qwen3_5_moe_text", **(GATED | MOE | changes)),
        "qwen3_next": AutoConfig.for_model("qwen3_next", **(GATED | MOE | changes)),
    }


CONFIGS = configs()


def model_of(kind: str, method: str, config: Any = None) -> Any:
    """Norms are drawn: at their initial values mistakes in them would not show."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config or CONFIGS[kind])
    for name, tensor in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(tensor, std=0.2)
    if method == "full":
        return model.train()
    model.requires_grad_(False)
    model = add_adapter(model, Lora(r=4, dora=method == "dora"), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.mark.parametrize(("kind", "method"), [*itertools.product(CONFIGS, ["lora", "full"]), ("qwen3_5_text", "dora")])
def test_gated_attention_has_the_gradients_of_transformers(kind: str, method: str) -> None:
    model = model_of(kind, method)
    expected = own(model, LENGTHS)
    assert install(model) == ""
    assert_same(fast(model, LENGTHS), expected, 1e-5)
    assert all(layer.fused == (method != "dora") for layer in engine(model).layers)
