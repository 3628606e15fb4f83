"""Mixtures of experts against transformers: loss and all gradients, packed and unpacked, for LoRA on attention and on experts
and full fine-tuning, with and without the routers' auxiliary loss, in float64 and in float32."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from pronghorn.data.batches import IGNORED
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.export import save_model
from pronghorn.model.lora import add_adapter
from pronghorn.model.moe_layer import MoeDecoderLayer
from pronghorn.recipe import Lora
from test_decoder_layer import SMALL, InDouble, apart, fast_loss, gradients, own_loss, packed_batch, single_batch

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 32}
QWEN: dict[str, Any] = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
FAMILIES: dict[str, Any] = {
    "gpt_oss": GptOssConfig(**SMALL, head_dim=8, num_local_experts=6, num_experts_per_tok=2, sliding_window=16,
                            rope_parameters=YARN, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **QWEN, head_dim=16, norm_topk_prob=True),
    "qwen3_moe, a dense layer": Qwen3MoeConfig(**SMALL, **QWEN, head_dim=16, mlp_only_layers=[1]),
    "qwen2_moe": Qwen2MoeConfig(**SMALL, **QWEN, shared_expert_intermediate_size=40),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2, sliding_window=16),
}
EXPERTS = ("experts", "q_proj", "o_proj")
METHODS = ["lora on attention", "lora on experts", "full"]


def model_of(family: str, method: str, dtype: torch.dtype) -> Any:
    """Drawn wide, so that clamps and imbalance show; norms, biases and sinks are drawn too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family], attn_implementation="eager")
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
        elif "experts" in name or "router" in name or ".gate." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model = model.to(dtype)
    if method == "full":
        return model.train()
    targets = EXPERTS if method == "lora on experts" else "all-linear"
    model = add_adapter(model, Lora(r=4, targets=targets, dora=method == "dora"), seed=1).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def true_gradients(model: Any, batch: Any, loss_of: Any = own_loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a float64 copy of transformers' model, whose RoPE tables stay float32, as ours do."""
    model = copy.deepcopy(model).double()

    def as_it_is(forward: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            with torch._C.DisableTorchFunction():
                return forward(torch.empty(0, dtype=torch.float32), *args[1:], **options)

        return call

    for module in model.modules():
        if "RotaryEmbedding" in type(module).__name__:
            module.forward = as_it_is(module.forward)
    with InDouble():
        loss = loss_of(model, batch)
        return loss.detach(), gradients(model, loss)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_transformers(family: str, method: str) -> None:
    """In float64, where nothing but a mistake makes a difference."""
    model = model_of(family, method, torch.float64)
    for batch in (packed_batch(), single_batch()):
        fresh = copy.deepcopy(model)
        true_loss, truth = true_gradients(fresh, batch)
        assert not install(fresh)
        loss = fast_loss(fresh, batch)
        ours = gradients(fresh, loss)
        engine = engine_of(fresh)
        assert engine is not None
        assert all(layer.fused for layer in engine.layers)
        assert ours.keys() == truth.keys()
        assert apart(loss.detach(), true_loss) < 1e-12
        for name, gradient in ours.items():
            assert apart(gradient, truth[name]) < 1e-10, name
