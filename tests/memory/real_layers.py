"""Real models, small and on the CPU or of real width on a GPU, beside the jobs that describe them: judges of the dry run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.memory.job import Job, shape_of
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.heads import HEADS
from pronghorn.model.layers.saved import Level, Saved
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedDocuments
from pronghorn.recipe_parts import Lora
from samples import small

SMALL = small(hidden_size=64, intermediate_size=80)
DENSE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {},
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16},
    "gemma4_text": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
    },
    "olmo2": {},
    "glm4": {"head_dim": 16},
    "exaone4": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral3": {"head_dim": 16},
    "arcee": {},
    "cohere2": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "nanochat": {},
    "hunyuan_v1_dense": {"head_dim": 16},
    "apertus": {},
    "granite_swa": {"sliding_window": 16, "layer_rope_theta": [0, 500.0]},
}
_QWEN: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16, "intermediate_size": 64},
    "qwen3_moe": _QWEN | {"head_dim": 16},
    "qwen2_moe": _QWEN | {"shared_expert_intermediate_size": 48},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 64},
    "dots1": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "head_dim": 16,
        "sliding_window": None,
    },
    "glm4_moe_lite": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    "glm4_moe": {
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "head_dim": 16,
        "first_k_dense_replace": 1,
    },
    "afmoe": {
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "num_dense_layers": 0,
        "head_dim": 16,
        "sliding_window": 16,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3, "head_dim": 16, "intermediate_size": 64},
    "granitemoe": {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64},
    "hy_v3": {
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "head_dim": 16,
        "mlp_layer_types": ["sparse", "sparse"],
    },
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "qlora": {"method": "qlora"},
    "fp8": {"method": "fp8"},
    "full": {"method": "full"},
    "qlora, nvfp4": {"method": "qlora", "storage": "nvfp4"},
    "qlora, fp8": {"method": "qlora", "compute": "fp8"},
    "full, fp8": {"method": "full", "compute": "fp8"},
}
TARGETS: dict[str, Any] = {"attention": ("q_proj", "o_proj"), "linears": "all-linear", "experts": ("all-linear", "experts")}
TOKENS = 48


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **(SMALL | (DENSE | EXPERTS)[family]))


def job_of(family: str, method: str = "lora", **changes: Any) -> Job:
    return Job(shape_of(config_of(family)), TOKENS, rank=4, element=4, **(METHODS[method] | changes))


def model_of(config: Any, method: str, lora: Lora, dtype: torch.dtype = torch.float32, head: str = "lm") -> Any:
    """On torch's default device. `head`: a name of model/heads/."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = HEADS[head].attach(model, seed=0)
    trains = METHODS[method].get("method")
    if trains in ("qlora", "fp8"):
        row = FORMATS[METHODS[method].get("storage", "nf4" if trains == "qlora" else "fp8")]
        store_linears_(model, row)
        store_experts_(model, row)
    if trains != "full":
        model = add_adapter(model, lora, seed=1)
    assert not install(model, fp8=METHODS[method].get("compute") == "fp8")
    return model


def small_model(family: str, method: str = "lora", targets: Any = "all-linear") -> Any:
    targets = targets if isinstance(targets, str) else list(targets)
    return model_of(config_of(family), method, Lora(r=4, targets=targets))


def forward(model: Any) -> tuple[Any, Saved]:
    """(the engine, what its first layer saves for backward)"""
    engine = engine_of(model)
    engine.prepare(torch.float32)
    with torch.no_grad():
        return engine, engine.layers[0].forward_at("nothing", torch.randn(TOKENS, 64), documents_of(engine))[1]


def documents_of(engine: Any) -> Any:
    bounds = torch.tensor([0, 20, TOKENS], dtype=torch.int32)
    return Documents.of(PackedDocuments(cu_seqlens=bounds, positions_T=torch.arange(TOKENS), longest=28), engine.positions)


def bytes_of(*values: Any) -> int:
    """Views of the same memory are counted once."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in values if isinstance(t, torch.Tensor)}.values()
    )


def recomputing(gate_up: float, around_attention: float, layer: float) -> dict[Level, float]:
    """Milliseconds of each level."""
    return {"nothing": 0.0, "gate_up": gate_up, "around_attention": around_attention, "layer": layer}
