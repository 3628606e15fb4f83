"""Keys of a config that the fast layers do not know: the model trains on its own layers, and the key is named."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from pronghorn.model.families import FAMILIES, activation_name, why_not_fast
from tables import table

# What people's folders say beyond the defaults of transformers' config classes, as far as it is not a size.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama": {
        "pretraining_tp": 1,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "mlp_bias": False,
        "unsloth_fixed": True,
    },
    "qwen2": {"max_window_layers": 21, "use_sliding_window": False, "sliding_window": 32768, "use_mrope": False},
    "qwen3": {"max_window_layers": 36, "attention_bias": False},
    "phi3": {
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "full_attn_mod": 1,
        "interpolate_factor": 1,
        "lm_head_bias": None,
        "partial_rotary_factor": 0.75,
        "sliding_window": 262144,
        "embd_pdrop": 0.0,
    },
    "gemma": {"hidden_activation": None},
    "gemma2": {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 4096},
    "mistral": {"attention_bias": False, "mlp_bias": False},
    "smollm3": {"max_window_layers": 28, "pretraining_tp": 2, "sliding_window": None},
    "gemma3_text": {"rope_local_base_freq": 10000, "rope_theta": 1000000, "cache_implementation": "hybrid"},
    "gemma4_text": {
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 512,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    },
    "granite": {
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
    },
    "qwen3_moe": {"head_dim": 128, "max_window_layers": None},
    "gpt_oss": {"experts_per_token": 4, "initial_context_length": 4096, "swiglu_limit": 7.0},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},  # published with 0.1: on its own layers
    "hyperclovax": {"attention_multiplier": 0.0078125, "embedding_multiplier": 10.0, "logits_scaling": 0.125},
    "glm4_moe": {
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "num_nextn_predict_layers": 1,
        "use_qk_norm": False,
        "rope_scaling": None,
    },
    "deepseek_v3": {
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {
            "type": "yarn",
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 10000,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_method": "noaux_tc",
    },
    "glm4_moe_lite": {
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "topk_method": "noaux_tc",
    },
    "qwen3_5_text": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "num_hidden_layers": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "moe_layer_freq": 1,
    },
    "nemotron_h": {  # Nemotron 3 Nano
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_hidden_layers": 52,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "mamba_hidden_act": "silu",
        "norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10000,
        "time_step_limit": [0.0, float("inf")],
        "use_mamba_kernels": True,
    },
    "hunyuan_v1_dense": {
        "eod_token_id": 127967,
        "rope_scaling": {
            "type": "dynamic",
            "alpha": 1000.0,
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "afmoe": {  # Trinity
        "global_attn_every_n_layers": 4,
        "load_balance_coeff": 0.001,
        "mup_enabled": True,
        "n_group": 1,
        "num_dense_layers": 2,
        "num_expert_groups": 1,
        "num_limited_groups": 1,
        "route_norm": True,
        "route_scale": 2.826,
        "score_func": "sigmoid",
        "topk_group": 1,
        "use_grouped_mm": True,
    },
    "hunyuan_v1_moe": {"moe_topk": [8] * 32, "norm_topk_prob": True, "num_experts": 64, "use_qk_norm": True},
    "exaone4": {
        "sliding_window_pattern": "LLLG",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "num_hidden_layers": 4,
    },
}


def test_smollm2_stays_fast() -> None:
    """Its trainer left keys of its own."""
    left = {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "pretraining_tp": 1}
    assert why_not_fast(AutoConfig.for_model("llama", **left)) == ""


@table("kind", FAMILIES)
def test_published_models_stay_fast(kind: str) -> None:
    for values in ({}, PUBLISHED.get(kind, {})):
        # The classes' own: dropout, nothing said of experts.
        if kind not in ("seed_oss", "dots1") or values:
            assert why_not_fast(AutoConfig.for_model(kind, **values)) == ""


def test_the_activation_is_the_one_that_the_class_reads() -> None:
    """Old Gemma configs have both names; its MLP reads hidden_act."""
    gemma = AutoConfig.for_model("gemma", hidden_act="silu", hidden_activation="gelu_pytorch_tanh")
    assert activation_name(gemma) == "silu"
    assert activation_name(AutoConfig.for_model("gemma2", hidden_act="gelu")) == "gelu_pytorch_tanh"


@table(
    ("kind", "values", "named"),
    [
        ("llama", {"residual_multiplier": 0.5}, "residual_multiplier"),  # transformers' Llama does not read it, ours would
        ("llama", {"attention_sinks": True}, "attention_sinks"),
        ("llama", {"is_causal": False}, "is_causal"),  # transformers' masks look for it in any config
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob"),  # Mixtral normalises whatever this says
        ("mistral", {"layer_types": ["full_attention"] * 32}, "layer_types"),  # Mistral's window is in all layers
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min"),
        ("ernie4_5_moe", {"output_router_logits": True}, "auxiliary loss of routers with sigmoids or a bias"),
        ("granitemoe_swa", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere2", {"sliding_window": None}, "no sliding_window"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2] * 16}, "different numbers of experts per token by layer"),
        ("afmoe", {"score_func": "softmax"}, "score_func"),
        ("hyperclovax", {"use_post_norm": False}, "use_post_norm"),
        ("hyperclovax", {"residual_multiplier": 0.5}, "residual_multiplier"),
        ("arcee", {"hidden_act": "silu"}, "the activation silu in arcee"),
        ("llama", {"hidden_act": "relu2"}, "the activation relu2 in llama"),
        ("gemma2", {"use_bidirectional_attention": True}, "not causal"),
        ("mellum", {"num_mtp_layers": 1}, "mtp_layer"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout is 0.1 in config.json"),
        ("seed_oss", {"attention_dropout": 0.0}, "residual_dropout"),
        ("qwen3_moe", {"residual_multiplier": 0.5}, "residual_multiplier"),
    ],
)
def test_what_the_rows_do_not_know_is_named(kind: str, values: dict[str, Any], named: str) -> None:
    assert named in why_not_fast(AutoConfig.for_model(kind, **values))
