"""What distinguishes the model families, as rows of one table. A family is a row, never a file, never a name test.

Sizes, activation, window, soft-caps, multipliers and RoPE scaling come from the Hugging Face config; a row holds only what
the config does not say: which norm stands where, how norm weights are meant, and which linears are stored fused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.mlp.gated_mlp import Kind
from pronghorn.kernels.moe.moe_gated import ExpertKind
from pronghorn.model.config_keys import ACTIVATION, DROPOUTS, QUERY_SCALE, ROPE_KEYS, fields_of, unknown_key
from pronghorn.model.family import ATTENTION, HYBRID, BesideNorms, Experts, Family, Names, Norms

EXPERTS = "experts"  # among lora.targets: every stack of experts

ACTIVATIONS: dict[str, Kind] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
UNGATED = ("relu2", "xielu")  # activations of MLPs without a gate
MLPS = ("mlp", "moe")  # layer types of layers that are an MLP or a mixture of experts alone

# Modules of a model whose layers have inputs of their own: in the backbone, then in a layer.
INPUT_TABLE, INPUT_PROJECTION = "embed_tokens_per_layer", "per_layer_model_projection"
INPUT_NORM = "per_layer_projection_norm"
INPUT_GATE, INPUT_OUT, INPUT_OUT_NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"


SANDWICH = Norms(
    after_attention="post_attention_layernorm", before_mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"
)
GLM4 = Norms(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
AFMOE = Norms(after_attention="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm")
HYPERCLOVAX = Norms(after_attention="post_norm1", after_mlp="post_norm2")
APERTUS = Norms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
AFTER_ONLY = Norms(
    before_attention=None, after_attention="post_attention_layernorm", before_mlp=None, after_mlp="post_feedforward_layernorm"
)


DEEPSEEK_V3 = Experts(
    sigmoid=True, scale="routed_scaling_factor", shared="shared_experts", shared_gate="", shared_adapted=False, float32=True
)


GEMMA4 = Family(
    norms=SANDWICH, qk_norm="per_head", v_norm=True, layer_scale="layer_scalar", by_layer=("head_dim", "num_key_value_heads")
)
BESIDE = BesideNorms(
    "post_feedforward_layernorm_1", before_experts="pre_feedforward_layernorm_2", after_experts="post_feedforward_layernorm_2"
)
LFM2 = Family(
    norms=Norms(before_attention="operator_norm", before_mlp="ffn_norm"),
    names=Names(
        rotary=("rotary_emb", "pos_emb"),
        last_norm="embedding_norm",
        out="out_proj",
        q_norm="q_layernorm",
        k_norm="k_layernorm",
        mlp="feed_forward",
        down="w2",
    ),
    mixers=("full_attention", "conv"),
    activation="silu",
    gate_up=("w1", "w3"),
    qk_norm="per_head",
)

COHERE = Family(
    norms=Norms(before_mlp=None), centered=True, parallel=True, neighbours=True, pair_tables=True, logits_times="logit_scale"
)
GATED = ("q_proj", "k_proj", "v_proj", "gate_proj")
HUNYUAN = Family(names=Names(q_norm="query_layernorm", k_norm="key_layernorm"), qk_norm="after_rope", ntk_alpha=True)
GLM4V = Family(norms=GLM4, gate_up=("gate_up_proj",), neighbours=True, pair_tables=True)
GRANITE_MOE = Family(names=Names(mlp="block_sparse_moe"), experts=Experts(router="router", shared=""))
QWEN3_5 = Family(
    mixers=("full_attention", "linear_attention"),
    states=(
        "linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ),
    one_plus=True,
    qk_norm="per_head",
    output_gate=True,
)  # fmt: skip

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(qk_norm="per_head"),
    "phi3": Family(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "gemma2": Family(norms=SANDWICH, one_plus=True),
    "gemma3_text": Family(norms=SANDWICH, one_plus=True, qk_norm="per_head"),
    "gemma4_text": replace(GEMMA4, experts=Experts(router="router.proj", shared="", shared_gate="", norms=BESIDE)),
    "gemma4_unified_text": GEMMA4,
    "granite": Family(),
    "olmo2": Family(norms=AFTER_ONLY, qk_norm="full"),
    "mixtral": Family(experts=Experts()),
    "qwen2_moe": Family(experts=Experts()),
    "qwen3_moe": Family(qk_norm="per_head", experts=Experts()),
    "gpt_oss": Family(experts=Experts(router="router", transposed=True, activation="clamped", published_in="mxfp4")),
    "ministral": Family(),
    "ministral3": Family(query_scale=True),
    "seed_oss": Family(),
    "cwm": Family(),
    "smollm3": Family(),
    "olmo3": Family(norms=AFTER_ONLY, qk_norm="full"),
    "exaone4": Family(norms=AFTER_ONLY, qk_norm="per_head", rope_needs_window=True),
    "glm": Family(gate_up=("gate_up_proj",), neighbours=True),
    "glm4": Family(norms=GLM4, gate_up=("gate_up_proj",), neighbours=True),
    "ernie4_5": Family(neighbours=True),
    "helium": Family(neighbours=True),
    "gemma": Family(one_plus=True),
    "vaultgemma": Family(norms=Norms(before_mlp="pre_feedforward_layernorm"), one_plus=True),
    "hyperclovax": Family(norms=HYPERCLOVAX, logits_times="logits_scaling"),
    "granite_swa": Family(),
    "mellum": Family(qk_norm="per_head", experts=Experts()),
    "olmoe": Family(qk_norm="full", experts=Experts()),
    "glm4_moe": Family(qk_norm="per_head", experts=DEEPSEEK_V3),
    "dots1": Family(qk_norm="per_head", experts=DEEPSEEK_V3),
    "solar_open": Family(experts=DEEPSEEK_V3),
    "minimax_m2": Family(qk_norm="full", experts=Experts(sigmoid=True)),
    "hy_v3": Family(qk_norm="per_head", experts=replace(DEEPSEEK_V3, scale="router_scaling_factor", shared_adapted=True)),
    "exaone_moe": Family(qk_norm="per_head", rope_needs_window=True, experts=DEEPSEEK_V3),
    "ernie4_5_moe": Family(
        neighbours=True,
        experts=Experts(
            biased=True,
            shared="shared_experts",
            shared_gate="",
            shared_adapted=False,
            choice_bias="moe_statics.e_score_correction_bias",
            float32=True,
        ),
    ),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": GRANITE_MOE,
    "deepseek_v3": Family(latent=True, experts=DEEPSEEK_V3),
    "glm4_moe_lite": Family(latent=True, experts=DEEPSEEK_V3),
    "lfm2": LFM2,
    "lfm2_moe": replace(
        LFM2, experts=Experts(sigmoid=True, scale="routed_scaling_factor", choice_bias="expert_bias", tiny=1e-6)
    ),
    "arcee": Family(gate_up=("up_proj",), gated=False),
    "apertus": Family(norms=APERTUS, gate_up=("up_proj",), gated=False, qk_norm="per_head"),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": replace(
        HUNYUAN, experts=Experts(router="gate.wg", shared="shared_mlp", shared_gate="", shared_adapted=False, float32=True)
    ),
    "cohere": COHERE,
    "cohere2": replace(COHERE, rope_needs_window=True),
    "afmoe": Family(
        norms=AFMOE,
        root_width="mup_enabled",
        qkv=GATED,
        qk_norm="per_head",
        output_gate=True,
        rope_needs_window=True,
        experts=replace(DEEPSEEK_V3, router="router.gate", scale="route_scale", choice_bias="expert_bias", float32=False),
    ),
    "youtu": Family(latent=True),
    "nanochat": Family(
        names=Names(down="fc2"), gate_up=("fc1",), gated=False, qk_norm="after_rope", norm_first=True, turned_back=True
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": replace(QWEN3_5, experts=Experts()),
    "qwen3_next": replace(QWEN3_5, experts=Experts()),
    "nemotron_h": Family(
        norms=Norms(before_attention="norm", before_mlp="norm"),
        names=Names(embeddings="embeddings", last_norm="norm_f", attention="mixer", mamba="mixer", mlp="mixer"),
        mixers=("full_attention", "linear_attention", *MLPS),
        halves=True,
        states=("n_groups", "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "conv_kernel"),
        activation="relu2",
        gate_up=("up_proj",),
        gated=False,
        rope=False,
        experts=replace(DEEPSEEK_V3, activation="relu2", shared_adapted=True),
    ),
    "granitemoehybrid": Family(
        names=Names(mamba="mamba", mlp="shared_mlp", down="output_linear"),
        mixers=("full_attention", "linear_attention"),
        states=("mamba_n_groups", "mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_d_conv"),
        gate_up=("input_linear",),
        rope_key="position_embedding_type",
        experts=Experts(router="router", beside="block_sparse_moe", shared="", shared_gate=""),
    ),
    "falcon_h1": Family(
        norms=Norms(before_mlp="pre_ff_layernorm"),
        names=Names(last_norm="final_layernorm", mamba="mamba", mlp="feed_forward"),
        mixers=(HYBRID,),
        states=("mamba_n_groups", "mamba_d_state", "mamba_n_heads", "mamba_d_head", "mamba_d_conv"),
        mlp_factors="mlp_multipliers",
        logits_times="lm_head_multiplier",
    ),
    # Text models of multimodal ones. Their positions are three numbers, which are equal for text.
    "qwen2_vl_text": Family(),
    "qwen2_5_vl_text": Family(),
    "qwen3_vl_text": Family(qk_norm="per_head"),
    "muse_glimmer_text": Family(
        norms=SANDWICH,
        names=Names(q_norm="qk_norm", k_norm="qk_norm"),
        one_plus=True,
        last_one_plus=False,
        qkv=GATED,
        qk_norm="per_head",
        output_gate=True,
        query_factor="qk_scale_factor",
        logits_times="output_multiplier",
    ),
    "glm4v_text": GLM4V,
    "glm_ocr_text": GLM4V,
    "glm4v_moe_text": Family(experts=DEEPSEEK_V3),
    "qwen3_vl_moe_text": Family(qk_norm="per_head", experts=Experts()),
}

# Multimodal models whose text model works on its own (model/text_stack.py).
WRAPPERS = (
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "internvl",
    "lfm2_vl",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
    "muse_glimmer",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)


def family_of(config: HFConfig) -> Family:
    """The row of a text model's config; without qk-norm if the config turns it off."""
    family = FAMILIES[config.model_type]
    left_out = "use_qk_norm" in fields_of(config) and not config.use_qk_norm
    return replace(family, qk_norm=None) if left_out else family


def text_config(config: HFConfig) -> Any:
    """The text model's config: the config itself, unless there is more than text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def ties_embeddings(config: HFConfig) -> bool:
    """Whether the head is the embeddings. A model that reads images says it itself, and its text model may say otherwise
    (Mistral 3, whose default is yes): then the files decide, and what needs to know before counts both."""
    whole = bool(getattr(config, "tie_word_embeddings", False))
    return whole and bool(getattr(text_config(config), "tie_word_embeddings", whole))


# Config keys that add what no fast layer computes.
NO_ROPE = "none"  # the kind of RoPE of layers that have none


def why_not_fast(config: HFConfig) -> str:
    """Why a model of this config trains on its own layers; empty if the fast ones support it."""
    whole, config = config, text_config(config)
    if whole is not config and whole.model_type not in WRAPPERS:
        return f"the multimodal model type {whole.model_type} is not supported by the fast layers"
    if config.model_type not in FAMILIES:
        return f"the fast layers do not support the model type {config.model_type}"
    family = FAMILIES[config.model_type]
    if activation_name(config) not in (ACTIVATIONS if family.gated else UNGATED):
        return f"the fast layers do not support the activation {activation_name(config)} in {config.model_type}"
    for name in DROPOUTS:
        if value := getattr(config, name, 0.0):
            return f"{name} is {value:g} in config.json, which the fast layers do not apply; set it to 0 there to use them"
    if why := why_not_routed(config):
        return why
    if why := why_not_layers(config):
        return why
    if getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision"):  # "vision": of images alone
        return "its attention is not causal"
    if float(getattr(config, "residual_multiplier", 1.0)) != 1.0:
        if family.experts and family.experts.shared_gate and family.experts.shared:
            return "residual_multiplier is not 1 and the layers have experts beside a shared one with a gate"
        if family.norms.after_attention or family.norms.after_mlp:
            return "residual_multiplier is not 1 and a norm follows attention or MLP"
    return why_not_rope(config) or unknown_key(config)


def why_not_layers(config: HFConfig) -> str:
    """Which layers the fast ones do not support, or what more in each; empty if they support all."""
    family = FAMILIES[config.model_type]
    if others := [kind for kind in other_mixers(config) if kind not in family.mixers]:
        return f"the fast layers do not support layers of the type {others[0]} in {config.model_type}"
    if family.names.mamba and ACTIVATIONS.get(str(getattr(config, "hidden_act", "silu"))) != "silu":
        return f"the fast layers do not support the activation {config.hidden_act} of convolutions"
    if family.mlp_factors:
        biased = ("attention_bias", "mlp_bias", "mamba_proj_bias")  # multiplied by some of the factors, not by all
        if own := next((key for key in biased if getattr(config, key, False)), ""):
            return f"the fast layers do not support {own} in {config.model_type}"
        if config.mamba_rms_norm and config.mamba_norm_before_gate:
            return f"the fast layers do not support a norm before the gate in {config.model_type} (mamba_norm_before_gate)"
    if family.qk_norm is None and "use_qk_norm" in fields_of(config) and config.use_qk_norm:
        return f"the fast layers do not support norms of queries and keys in {config.model_type} (use_qk_norm)"
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()) and not config.sliding_window:
        return "layers of the type sliding_attention have no sliding_window"
    if others := sorted(keys_by_layer(config) - set(family.by_layer)):
        return f"the fast layers do not support different values of {others[0]} by layer"
    if any(source_of_keys(config, i) is None for i in range(first_sharing(config), int(config.num_hidden_layers))):
        return "layers share keys and values with an earlier one of their type, and there is none (num_kv_shared_layers)"
    return ""


def first_sharing(config: HFConfig) -> int:
    """From this layer on, none has keys and values of its own: each reads those of `source_of_keys`."""
    return int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", 0) or 0)


def shares_keys(config: HFConfig, index: int) -> bool:
    return index >= first_sharing(config)


def source_of_keys(config: HFConfig, index: int) -> int | None:
    """The layer whose keys and values this one reads, if not its own: the last of its type that has some."""
    first, kind = first_sharing(config), layer_type(config, index)
    own = reversed(range(first)) if index >= first else ()
    return next((i for i in own if layer_type(config, i) == kind), None)


def lends_keys(config: HFConfig, index: int) -> bool:
    """Whether later layers read its keys and values."""
    return any(source_of_keys(config, i) == index for i in range(first_sharing(config), int(config.num_hidden_layers)))


def input_width(config: HFConfig) -> int:
    """The width of what each layer reads of the tokens beside the residual stream (model/inputs/by_layer.py); 0: nothing."""
    return int(getattr(config, "hidden_size_per_layer_input", 0) or 0)


def why_not_routed(config: HFConfig) -> str:
    """What of the routing the fast layers do not support; empty if they support all of it."""
    experts = FAMILIES[config.model_type].experts
    optional = experts is not None and (experts.beside or experts.norms or FAMILIES[config.model_type].halves)
    if experts is None or (optional and not num_experts(config)):
        return ""
    if not experts.beside and getattr(config, "shared_intermediate_size", None):
        return "the fast layers do not support an MLP beside the experts (shared_intermediate_size in its config)"
    if len({*_experts_per_token(config)}) > 1:
        return "the fast layers do not support different numbers of experts per token by layer"
    chosen = experts_per_token(config)
    if not num_experts(config) or not chosen:
        return "the config does not say how many experts there are or how many each token uses"
    if getattr(config, "output_router_logits", False) and (experts.sigmoid or experts.biased):
        return "output_router_logits: the auxiliary loss of routers with sigmoids or a bias is not supported"
    if not experts.sigmoid:
        return ""
    groups, kept = expert_groups(config)
    size, rest = divmod(num_experts(config), groups)
    if rest or (groups > 1 and size < 2) or not 1 <= kept <= groups:
        return f"{num_experts(config)} experts do not form {groups} groups of two or more experts, {kept} of them selected"
    if chosen > kept * size:
        return f"{chosen} experts per token are more than {kept} of {groups} groups have"
    return ""


def expert_groups(config: HFConfig) -> tuple[int, int]:
    """(groups of experts, how many of them a token chooses from)"""
    groups = int(getattr(config, "n_group", None) or 1)
    return groups, int(getattr(config, "topk_group", None) or groups)


def why_not_rope(config: HFConfig) -> str:
    """Which RoPE parameters the fast layers do not support; empty if they support all."""
    family = FAMILIES[config.model_type]
    for parameters in rope_parameters(config):
        kind = str(parameters.get("rope_type", ""))
        static = family.ntk_alpha and parameters.get("alpha")
        if "dynamic" in kind and not static:
            return "its RoPE depends on the longest document of a batch (rope_type dynamic)"
        known = ROPE_KEYS | ({QUERY_SCALE} if family.query_scale else set()) | ({"alpha"} if static else set())
        if unknown := sorted(key for key, value in parameters.items() if value is not None and key not in known):
            return f"the fast layers do not support the RoPE parameter {unknown[0]}"
    return ""


def rope_parameters(config: HFConfig) -> list[dict[str, Any]]:
    """One set for all layers, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_type or [parameters]


def of_layer(config: HFConfig, index: int) -> Any:
    """The config as this layer reads it: some keys of some models have another value in each layer."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[index]


def keys_by_layer(config: HFConfig) -> set[str]:
    """Those keys."""
    if not getattr(config, "is_heterogeneous", False):
        return set()
    return {key for values in config.to_dict()["per_layer_config"].values() for key in values}


def heads_of(config: HFConfig, index: int) -> tuple[int, int]:
    """(key/value heads, width of a head) of this layer, as attention computes it"""
    layer, family = of_layer(config, index), FAMILIES.get(config.model_type)
    heads = int(layer.num_attention_heads)
    if family is not None and family.latent:
        return heads, max(int(layer.qk_nope_head_dim) + int(layer.qk_rope_head_dim), int(layer.v_head_dim))
    kv_heads, width = getattr(layer, "num_key_value_heads", None), getattr(layer, "head_dim", None)
    return int(kv_heads or heads), int(width or layer.hidden_size // heads)


def activation_name(config: HFConfig) -> str:
    fields, fixed = fields_of(config), FAMILIES[config.model_type].activation
    return fixed or next(str(name) for key in ACTIVATION if key in fields and (name := getattr(config, key)) is not None)


def num_experts(config: HFConfig) -> int:
    """In each layer that has some; 0: no layer has."""
    family = FAMILIES.get(config.model_type)
    if family and family.halves and "moe" not in config.layer_types:
        return 0
    if family and family.experts and family.experts.norms and not config.enable_moe_block:
        return 0
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    return next((int(count) for name in names if (count := getattr(config, name, None))), 0)


def experts_per_token(config: HFConfig) -> int:
    """The same in every layer (`why_not_routed`)."""
    return int(_experts_per_token(config)[0] or 0)


def _experts_per_token(config: HFConfig) -> list[int | None]:
    """Some configs list it for each layer."""
    found = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    return found if isinstance(found, list) else [found]


def expert_kind(config: HFConfig) -> ExpertKind:
    """The experts' activation."""
    experts = FAMILIES[config.model_type].experts
    assert experts
    return experts.activation or ACTIVATIONS[activation_name(config)]


def layer_type(config: HFConfig, index: int) -> str:
    """Its mixer: `full_attention`, `sliding_attention`, or another of the family's row."""
    types = getattr(config, "layer_types", None)
    if types:
        return str(types[index])
    return "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"


def other_mixers(config: HFConfig) -> list[str]:
    """Layer types of a model whose mixer is not attention."""
    return sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTION))


def window(config: HFConfig, index: int) -> int | None:
    return int(config.sliding_window) if layer_type(config, index) == "sliding_attention" else None


def rope_kind(config: HFConfig, index: int) -> str:
    """Which of the model's cos and sin tables the layer reads; NO_ROPE: none."""
    flags, thetas = getattr(config, "no_rope_layers", None), getattr(config, "layer_rope_theta", None)
    if flags and not flags[index]:
        return NO_ROPE
    if thetas:  # one a layer
        return f"theta {float(thetas[index])}" if thetas[index] else NO_ROPE
    kind, family = layer_type(config, index), FAMILIES[config.model_type]
    if not family.rope or (family.rope_key and getattr(config, family.rope_key) != "rope"):
        return NO_ROPE
    if family.rope_needs_window and config.sliding_window is not None and kind != "sliding_attention":
        return NO_ROPE
    return kind if kind in (getattr(config, "rope_parameters", None) or {}) else "every layer"


def query_scale(config: HFConfig) -> tuple[float, int] | None:
    """beta and L: queries at position p are multiplied by 1 + beta log(1 + p // L)."""
    if not FAMILIES[config.model_type].query_scale:
        return None
    parameters = config.rope_parameters
    return float(parameters[QUERY_SCALE]), int(parameters["original_max_position_embeddings"])
