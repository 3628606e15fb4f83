"""Which keys of a model's config the fast layers know. A key that nobody here knows may change what the model computes.

A config class of transformers has fields with defaults; a config.json may bring more keys, which the object carries along. Of
the fields, those in HONOURED are read by the fast layers, or by modules of the model that these use; those in HARMLESS change
no loss and no gradient; any other must have the class's default, with which the family was compared with transformers.

A key that is no field was written for other code, and transformers does not read it. So a fast layer must not either: keys that
these look up by name (LOOKED_UP, `residual_multiplier` of a Llama) are refused. So is what nobody knows and is not empty: code
of others may read it.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from pronghorn.hf_types import HFConfig

DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "router_jitter_noise")
QUERY_SCALE = "llama_4_scaling_beta"

HONOURED = frozenset(
    {
        # sizes
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "block_multiple_of",
        "block_ffn_dim_multiplier",
        "block_auto_adjust_ff_dim",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        # linears, norms, activation
        "attention_bias",
        "mlp_bias",
        "qkv_bias",
        "use_bias",
        "attention_out_bias",
        "rms_norm_eps",
        "norm_eps",
        "post_norm_eps",
        "layer_norm_epsilon",
        "layer_norm_eps",
        "hidden_act",
        "hidden_activation",
        *DROPOUTS,
        "use_bidirectional_attention",
        # attention
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "sliding_window_pattern",
        "layer_types",
        "full_attn_idxs",
        "conv_L_cache",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "rope_interleave",
        "layers_block_type",
        "n_groups",
        "conv_kernel",
        "use_conv_bias",
        "expand",
        "ssm_state_size",
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_n_heads",
        "mamba_n_groups",
        "mamba_d_state",
        "mamba_d_head",
        "mamba_d_conv",
        "mamba_expand",
        "mamba_conv_bias",
        "mamba_proj_bias",
        "projectors_bias",
        "mamba_d_ssm",
        "mamba_rms_norm",
        "mamba_norm_before_gate",
        "time_step_min",
        "time_step_limit",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "query_pre_attn_scalar",
        "qk_scale_factor",
        "attention_multiplier",
        "attn_logit_softcapping",
        "attention_k_eq_v",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        # positions
        "rope_parameters",
        "original_max_position_embeddings",
        "no_rope_layers",
        "layer_rope_theta",
        "position_embedding_type",
        # embeddings, residuals, head
        "embedding_multiplier",
        "attention_in_multiplier",
        "attention_out_multiplier",
        "key_multiplier",
        "ssm_in_multiplier",
        "ssm_out_multiplier",
        "ssm_multipliers",
        "mlp_multipliers",
        "lm_head_multiplier",
        "mup_enabled",
        "residual_multiplier",
        "logits_scaling",
        "output_multiplier",
        "logit_scale",
        "final_logit_softcapping",
        # experts
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "top_k_experts",
        "enable_moe_block",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "mlp_layer_types",
        "swiglu_alpha",
        "swiglu_limit",
        "output_router_logits",
        "router_aux_loss_coef",
        "n_routed_experts",
        "n_shared_experts",
        "num_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "router_scaling_factor",
        "route_scale",
        "moe_topk",
        "first_k_dense_replace",
        "num_dense_layers",
        "moe_k",
        "moe_num_experts",
        "moe_num_shared_experts",
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
        "use_expert_bias",
        "use_qk_norm",
        "enable_moe_fp32_combine",  # they are added up in float32 anyway
    }
)
HARMLESS = frozenset(
    {
        # of every config: names, versions, forms of output, which hf_forward.py looks at
        "architectures",
        "model_type",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "id2label",
        "label2id",
        "problem_type",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "is_encoder_decoder",
        "chunk_size_feed_forward",
        "use_cache",
        "cache_implementation",
        "attn_implementation",
        "serialize_explicit_per_layer_config",
        "allow_global_per_layer_attribute_access",
        "ignore_keys_at_rope_validation",
        "keys_to_ignore_at_inference",
        "torchscript",
        "use_bfloat16",
        "is_decoder",
        "cross_attention_hidden_size",
        "add_cross_attention",
        "tie_encoder_decoder",
        "base_model_tp_plan",
        "base_model_pp_plan",
        "base_model_ep_plan",  # how several GPUs share it; fields in 5.17
        "pruned_heads",
        "finetuning_task",
        "task_specific_params",
        "tokenizer_class",
        "prefix",
        "auto_map",
        "quantization_config",
        # tokens, initial weights, how it was trained
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "sep_token_id",
        "unk_token_id",
        "eod_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "initializer_factor",
        "pretraining_tp",
        "no_rope_layer_interval",
        "global_attn_every_n_layers",
        "embedding_initializer_range",
        "rescale_prenorm_residual",
        "time_step_max",
        "time_step_floor",
        "init_method",
        # how Mamba-2 is computed
        "chunk_size",
        "mamba_chunk_size",
        "use_mamba_kernels",
        "mamba_ssm_cache_dtype",
        "num_logits_to_keep",
        "mtp_layers_block_type",
        "moe_shared_expert_overlap",
        # generation, once kept in the config
        "max_length",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "early_stopping",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "tf_legacy_loss",
        # older names of RoPE parameters: transformers reads them into rope_parameters and may leave them behind
        "rope_theta",
        "rope_scaling",
        "rope_local_base_freq",
        "partial_rotary_factor",
        # carried by published models and left by other tools, read by no model of the table
        "initial_context_length",
        "experts_per_token",
        "use_mrope",
        "load_balance_coeff",
        "num_expert_groups",
        "num_limited_groups",
        "use_grouped_mm",
        "full_attn_mod",
        "interpolate_factor",
        "unsloth_fixed",
        "unsloth_version",
        "unsloth_processed",
        "transformers.js_config",
        "is_llama_config",
        "is_qwen2_config",
        "rope_interleaved",
        "sliding_window_size",
        "neftune_noise_alpha",
        "pixel_shuffle_factor",
        "scoring_func",
        "topk_method",
        "moe_layer_freq",
        "use_routing_bias",
        "num_nextn_predict_layers",
        "num_mtp_modules",
        "use_mtp",
        "mtp_transformer_layers",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "qk_norm_type",
        "block_dim",
        "block_mlp_init_scale",
        "block_norm_eps",
        "block_out_init_scale",
        "block_use_swiglu",
        "block_use_xavier_init",
        "conv_dim",
        "conv_dim_out",
        "conv_use_xavier_init",
        "use_pos_enc",
        "num_heads",
        "full_attention_interval",
        "attn_output_gate",
        "mamba_ssm_dtype",
        "time_step_rank",
        "attention_head_dim",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
    }
)
# The fast layers find these in the config, not in the model's modules; so do transformers' masks with `is_causal`.
LOOKED_UP = frozenset(
    {
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "residual_multiplier",
        "is_causal",
        "embedding_multiplier",
        "logits_scaling",
        "rope_parameters",
        "no_rope_layers",
        "layer_rope_theta",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "router_scaling_factor",
    }
)
# Fields in some versions of transformers; in the others the modules have these numbers in them.
WRITTEN_IN = {
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "normalization_function": "rmsnorm",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "route_norm": True,
    "score_func": "sigmoid",
}
ACTIVATION = ("hidden_activation", "hidden_act")  # the first that is a field; the other, in old configs, is not read
# transformers' own module makes cos and sin of them.
ROPE_KEYS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "short_factor",
        "long_factor",
        "short_mscale",
        "long_mscale",
        "low_freq_factor",
        "high_freq_factor",
        "mrope_section",
        "mrope_interleaved",  # of positions of images: those of text are the same number three times
    }
)


def unknown_key(config: HFConfig) -> str:
    """A key that may change what the model computes and that the fast layers do not know, in a sentence; else empty."""
    kind = type(config)
    if not dataclasses.is_dataclass(kind):
        return ""  # not one of transformers
    fields, default = fields_of(config), _default(kind)
    for key, value in sorted(vars(config).items()):
        if key.startswith("_") or key in HARMLESS or (key in fields and key in HONOURED):
            continue
        if key not in fields:
            if value is not None and _may_count(key, value):
                return f"the fast layers do not support the config key {key} of {config.model_type}"
            continue
        usual = getattr(default, key, None)
        if value != usual and (value or usual):
            return f"the fast layers do not support {key}: {value} in the config, only {usual}"
    return ""


def _may_count(key: str, value: object) -> bool:
    """Whether a key that is no field may change what the model computes, or what the fast layers would."""
    if key in LOOKED_UP:
        return True
    if key in WRITTEN_IN:
        return bool(value != WRITTEN_IN[key])
    return bool(value) and key not in HONOURED  # a size or a bias: the fast layers ask the module


def fields_of(config: HFConfig) -> set[str]:
    """Keys that transformers reads; of a plain object, all it has."""
    kind = type(config)
    if not dataclasses.is_dataclass(kind):
        return set(vars(config))
    return {field.name for field in dataclasses.fields(kind)} | set(getattr(kind, "attribute_map", {}).values())


@cache
def _default(kind: Any) -> Any:
    return kind()
