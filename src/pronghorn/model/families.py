"""What distinguishes the model families, as rows of one table. A family is a row, never a file, never a name test.

Sizes, activation, window, soft-caps, multipliers and RoPE scaling come from the Hugging Face config; a row holds only what
the config does not say: which norm stands where, how norm weights are meant, and which linears are stored fused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pronghorn.kernels.gated_mlp import Kind
from pronghorn.kernels.moe_gated import ExpertKind

EXPERTS = "experts"  # among lora.targets: every stack of experts

ACTIVATIONS: dict[str, Kind] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclass(frozen=True)
class Norms:
    """The layer's norm modules by where they stand; None: no norm there."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None  # of the attention's output, before it is added to the residual
    before_mlp: str | None = "post_attention_layernorm"  # Llama's name for it; in Gemma and OLMo 2 this name means another
    after_mlp: str | None = None


SANDWICH = Norms(after_attention="post_attention_layernorm", before_mlp="pre_feedforward_layernorm",
                 after_mlp="post_feedforward_layernorm")
AFTER_ONLY = Norms(before_attention=None, after_attention="post_attention_layernorm", before_mlp=None,
                   after_mlp="post_feedforward_layernorm")


@dataclass(frozen=True)
class Experts:
    """Layers whose MLP is a router and a stack of experts (model/moe_layer.py). How many, and how their weights are
    normalised, the config says; whether there is a shared expert, the module."""

    router: str = "gate"
    transposed: bool = False  # weights are stored [E, inputs, outputs]
    activation: ExpertKind = "silu"


@dataclass(frozen=True)
class Family:
    norms: Norms = Norms()
    one_plus: bool = False  # norms multiply by 1 + weight
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    qk_norm: Literal["per_head", "full"] | None = None
    neighbours: bool = False  # RoPE pairs neighbours instead of halves
    experts: Experts | None = None


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm="per_head"),
    "phi3": Family(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "gemma2": Family(norms=SANDWICH, one_plus=True),
    "gemma3_text": Family(norms=SANDWICH, one_plus=True, qk_norm="per_head"),
    "granite": Family(),
    "olmo2": Family(norms=AFTER_ONLY, qk_norm="full"),
    "mixtral": Family(experts=Experts()),
    "qwen2_moe": Family(experts=Experts()),
    "qwen3_moe": Family(qk_norm="per_head", experts=Experts()),
    "gpt_oss": Family(experts=Experts(router="router", transposed=True, activation="clamped")),
}


def why_not_fast(config: Any) -> str:
    """Why a model of this config trains on its own layers; empty if the fast ones serve it."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type} has no row in the table of families"
    if activation_name(config) not in ACTIVATIONS:
        return f"activation {activation_name(config)} has no kernel"
    if FAMILIES[config.model_type].experts and ACTIVATIONS[activation_name(config)] != "silu":
        return f"activation {activation_name(config)} has no kernel for experts"
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"):
        if getattr(config, name, 0.0):
            return f"{name} is not zero"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention looks ahead"
    return ""


def activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def num_experts(config: Any) -> int:
    return int(getattr(config, "num_local_experts", None) or config.num_experts)


def layer_type(config: Any, index: int) -> str:
    """`full_attention` or `sliding_attention`; also the key of the layer's RoPE where a model has two."""
    types = getattr(config, "layer_types", None)
    if types:
        return str(types[index])
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def window(config: Any, index: int) -> int | None:
    return int(config.sliding_window) if layer_type(config, index) == "sliding_attention" else None
