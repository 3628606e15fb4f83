"""Whether a config describes a model that can be built, before anything is: sizes within reason, numbers that fit together, and
no more weights than the files hold. Types are checked by transformers' own config classes.

Without it a config.json of ten million layers is built in silence for hours, and a width of -64 ends in a traceback.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pronghorn.errors import ModelError, counted
from pronghorn.hf_types import HFConfig
from pronghorn.model.families import keys_by_layer, of_layer
from pronghorn.model.weight_files import Stored, wrong_weights

# The most that is believed, about ten times what the largest known model has: 126 layers (Llama 3.1 405B), a width of 18,432,
# a vocabulary of 262,208 (Gemma 3), 512 experts. A thousand empty layers are built in 2 s.
LAYERS, WIDTH, HEADS, EXPERTS, VOCABULARY, POSITIONS = 1 << 10, 1 << 20, 1 << 14, 1 << 13, 1 << 24, 1 << 40
SIZES: dict[str, int] = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "head_dim",
            "global_head_dim",
            "n_embd",
            "n_inner",
            "d_model",
            "ffn_dim",
            "d_ff",
            "ffn_hidden_size",
        ),
        WIDTH,
    ),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads"), HEADS),
    "num_global_key_value_heads": HEADS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "top_k_experts"), EXPERTS),
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), POSITIONS),
}
MAY_BE_ZERO = {
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "shared_expert_intermediate_size",
    "moe_intermediate_size",
    "sliding_window",
}  # none of it
POSITIVE = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_local_base_freq",
    "norm_eps",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "attn_logit_softcapping",
)
FINITE = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
    "initializer_range",
    "router_aux_loss_coef",
)
SHARES = ("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "hidden_dropout", "router_jitter_noise")
REAL = POSITIVE + FINITE + SHARES
OBJECTS = ("quantization_config", "rope_scaling", "rope_parameters", "text_config")
NUMBERS = (
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "repetition_penalty",
    "length_penalty",
    "no_repeat_ngram_size",
    "diversity_penalty",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "guidance_scale",
    "max_time",
)
COUNTS = {"num_beams": 64, "num_return_sequences": 64}
SWITCHES = (
    *("do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "return_dict_in_generate", "token_healing"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "disable_compile", "low_memory"),
)
VALUES_A_BYTE = 8  # no checkpoint packs more


def require_sane_numbers(content: Mapping[str, Any], where: str, path: str = "") -> None:
    """Refuses absurd numbers in config.json before a config class makes lists as long as the number of layers."""
    for key, value in content.items():
        here = f"{path}{key}"
        if key in OBJECTS and not (value is None or isinstance(value, dict)):
            raise _refused(here, value, "it must be an object with keys", where)
        if isinstance(value, dict) and key not in REAL:
            require_sane_numbers(value, where, f"{here}.")
        elif isinstance(value, bool) or value is None:
            if isinstance(value, bool) and (key in REAL or (key in SIZES and key not in MAY_BE_ZERO)):
                raise _refused(here, value, "it must be a number", where)
        elif key in SIZES and isinstance(value, int):
            lowest = 0 if key in MAY_BE_ZERO else 1
            if not lowest <= value <= SIZES[key]:
                raise _refused(here, value, f"it must be from {lowest} to {SIZES[key]:,}", where)
        elif key in SIZES and isinstance(value, str | float):
            raise _refused(here, value, "it must be a whole number", where)
        elif key in POSITIVE and not (_finite(value) and value > 0):
            raise _refused(here, value, "it must be greater than 0", where)
        elif key in SHARES and not (_finite(value) and 0 <= value < 1):
            raise _refused(here, value, "it must be a fraction, from 0 to less than 1", where)
        elif key in FINITE and not _finite(value):
            raise _refused(here, value, "it must be finite", where)
        elif isinstance(value, int) and value.bit_length() > 63:
            raise _refused(here, value, "numbers must fit into 63 bits", where)


def _finite(value: object) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _refused(path: str, value: object, what_it_is: str, where: str) -> ModelError:
    shown = repr(value)
    return _changed(f"config.json says {path}: {shown if len(shown) < 40 else shown[:36] + '...'}", where, what_it_is)


def _changed(what: str, where: str, why: str = "", file: str = "config.json") -> ModelError:
    return ModelError(what, where=where, why=why, fix=f"restore the model's original {file}")


def require_architectures(content: Mapping[str, Any], where: str) -> None:
    """transformers takes any value, and fails over it where it looks for a class."""
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise _changed(f"config.json says architectures: {str(names)[:40]!r}", where, "it must be a list of class names")


def require_consistent(config: HFConfig, where: str) -> None:
    """Checks the config as transformers understands it: heads that divide each other, a head width that RoPE can halve."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int) or heads < 1:
        return  # a kind of layer without heads
    layers = getattr(text, "num_hidden_layers", None)
    by_layer = "num_key_value_heads" in keys_by_layer(text)
    for i in range(layers if by_layer and isinstance(layers, int) else 1):
        kv_heads = getattr(of_layer(text, i) if by_layer else text, "num_key_value_heads", None) or heads
        if isinstance(kv_heads, int) and heads % kv_heads:
            raise _changed(
                f"config.json says {heads} attention heads and {kv_heads} key/value heads",
                where,
                "the number of attention heads must be a multiple of the number of key/value heads",
            )
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    if isinstance(chosen, int) and isinstance(experts, int) and chosen > experts > 0:
        raise _changed(f"config.json says {chosen} experts per token out of {experts}", where)
    types = getattr(text, "layer_types", None)
    if isinstance(types, list | tuple) and isinstance(layers, int) and len(types) != layers:
        raise _changed(f"config.json says {counted(layers, 'layer')} but lists {len(types)} layer types", where)


def require_weights_for(config: HFConfig, stored: Stored | None, where: str) -> None:
    """Before the model is built, even without memory: as many layers as the files have, and embeddings that they can hold.
    `stored` None: the files are not there to look at."""
    if stored is None or not stored.tensors:
        return
    text = config.get_text_config()
    layers, there = getattr(text, "num_hidden_layers", None), stored.layers()
    if isinstance(layers, int) and there and layers > there:
        raise wrong_weights(f"config.json says {counted(layers, 'layer')}, but the weight files have {there}", where)
    vocabulary, width = getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)
    if isinstance(vocabulary, int) and isinstance(width, int):
        require_enough_weights(vocabulary * width, stored, where)


def require_enough_weights(parameters: int, stored: Stored | None, where: str) -> None:
    if stored is not None and stored.tensors and parameters > VALUES_A_BYTE * stored.bytes:
        what = f"config.json needs {parameters:,} weights, but the weight files have {stored.bytes:,} bytes"
        raise wrong_weights(what, where)


def require_generation_numbers(content: Mapping[str, Any], file: str, where: str) -> None:
    """transformers takes any value, and fails over it when the first answer is generated."""
    require_token_ids(content, file, where)
    for key, value in content.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < POSITIONS
        wrong = (
            (key in NUMBERS and not number)
            or (key in COUNTS and not (number and 1 <= value <= COUNTS[key]))
            or (key in SWITCHES and not isinstance(value, bool))
        )
        if value is not None and wrong:
            why = "it must be true or false" if key in SWITCHES else "it makes generation impossible"
            raise _changed(f"{file} says {key}: {str(value)[:40]!r}", where, why, file)


def require_token_ids(content: Mapping[str, Any], file: str, where: str) -> None:
    """Ids of special tokens are numbers, or lists of them."""
    for key, value in content.items():
        if key.endswith("_token_id") and value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(one, int) and not isinstance(one, bool) and abs(one) < VOCABULARY for one in ids):
                raise _changed(f"{file} says {key}: {str(value)[:40]!r}", where, "it must be a token id", file)
