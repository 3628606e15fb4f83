"""Every number of a config, changed one at a time: the fast layers follow it or are refused, and where they would not follow
it, `verify` finds that, however long a document must be to show it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, GptOssConfig

from pronghorn.errors import ModelError
from pronghorn.model import causal_lm
from pronghorn.model.causal_lm import ENGINE, FastCausalLM, install
from pronghorn.model.verify import verify
from samples import one_document, small
from tables import first_of

SMALL = small(
    vocab_size=97, intermediate_size=32, head_dim=8, initializer_range=0.2, max_position_embeddings=256, rms_norm_eps=0.05
)
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 100}  # wider than verify's documents
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 128}  # fmt: skip
MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "attention_multiplier": 0.2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 100},
    "phi3": {"rope_parameters": LONG, "original_max_position_embeddings": 128},
    "gemma2": {**KINDS, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "granite_swa": {**KINDS, **MULTIPLIERS, "residual_multiplier": 0.5, "layer_rope_theta": [0, 100.0]},
    "hyperclovax": MULTIPLIERS,
    "nanochat": {"final_logit_softcapping": 3.0},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "smollm3": {"no_rope_layers": [1, 0], "num_hidden_layers": 2},
    "exaone4": KINDS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "falcon_h1": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 3.0,
        "key_multiplier": 0.75,
        "attention_in_multiplier": 1.25,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.875, 1.125, 0.75, 1.25, 0.625],
        "mlp_multipliers": [1.4, 0.7],
    },
    "olmoe": {key: EXPERTS[key] for key in ("num_experts", "num_experts_per_tok")},
    "gpt_oss": {
        **KINDS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": YARN,
        # a number of the code in transformers 5.17: a config with another is refused there
        **({"swiglu_limit": 0.5} if hasattr(GptOssConfig(), "swiglu_limit") else {}),
    },
}
FIRST = ("phi3", "gemma2", "granite_swa", "ministral3", "gpt_oss", "falcon_h1")  # which have all kinds of numbers
# Other shapes, or other tokens: not numbers of the formula.
SIZES = {*SMALL, "num_experts", "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "bos_token_id",
         "eos_token_id", "tie_word_embeddings", "chunk_size_feed_forward", "attention_bias", "mlp_bias", "qkv_bias", "use_bias",
         "return_dict", "output_hidden_states", "is_encoder_decoder", "use_cache", "pretraining_tp", "mlp_only_layers",
         "output_router_logits", "decoder_sparse_step", "no_rope_layer_interval", "use_post_norm",
         "partial_rotary_factor", "mamba_n_heads", "mamba_d_head", "mamba_d_ssm", "mamba_d_state", "mamba_d_conv",
         "mamba_n_groups", "mamba_rms_norm", "mamba_conv_bias", "mamba_proj_bias", "projectors_bias",
         } - {"max_position_embeddings", "rms_norm_eps"}  # fmt: skip
TOKENS = 260


def changed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, list):
        return value[1:] + value[:1]
    return type(value)(value * 2) if value else type(value)(1)


def numbers(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, the config with this number changed)"""
    for key, value in sorted(vars(config).items()):
        if key in SIZES or key.startswith("_") or value is None or not isinstance(value, (bool, int, float, list, dict)):
            continue
        if key == "rope_parameters":
            for name, inner in value.items():
                if name not in SIZES and isinstance(inner, (int, float, list)):
                    other = copy.deepcopy(config)
                    other.rope_parameters = {**value, name: changed(inner)}
                    yield f"rope_parameters.{name}", other
        elif not isinstance(value, dict):
            other = copy.deepcopy(config)
            setattr(other, key, changed(value))
            yield key, other


def model_of(config: Any, like: Any = None) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "norm" in name or "sinks" in name or "experts" in name or ".gate." in name or "router" in name:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    if like is not None:
        model.load_state_dict(like.state_dict())
    return model.eval()


@torch.no_grad()
def own_loss(model: Any, ids: torch.Tensor) -> float:
    return float(F.cross_entropy(model(input_ids=ids[None], use_cache=False).logits[0, :-1], ids[1:], reduction="sum"))


@torch.no_grad()
def fast_loss(engine: FastCausalLM, ids: torch.Tensor) -> float:
    return float(engine.packed_loss(one_document(ids, ids.roll(-1), torch.arange(TOKENS - 1)))[0])


def found(model: Any) -> bool:
    try:
        verify(model)
    except ModelError as error:
        return "fast layers differ" in error.what
    return False


@pytest.mark.parametrize("kind", first_of(sorted(CONFIGS, key=lambda kind: kind not in FIRST), len(FIRST)))
def test_a_number_is_followed_or_refused_and_never_ignored(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model(kind, **(SMALL | CONFIGS[kind]))
    base = model_of(config)
    ids = torch.randint(0, 97, (TOKENS,), generator=torch.Generator().manual_seed(1))
    before, matters = own_loss(base, ids), []
    for name, other in numbers(config):
        model = model_of(other, base)
        own = own_loss(model, ids)
        stale = model_of(other, base)  # its fast layers were made for the config before
        real, stale.config = stale.config, config
        object.__setattr__(stale, ENGINE, FastCausalLM(stale))
        stale.config = real
        if abs(own - before) > 1e-5 * before:
            matters.append(name)
        if why := install(model):
            assert name.rsplit(".", 1)[-1] in why, name
        else:
            assert fast_loss(getattr(model, ENGINE), ids) == pytest.approx(own, rel=3e-6), f"{name} is not followed"
        if abs(fast_loss(getattr(stale, ENGINE), ids) - own) > 2e-5 * own:
            monkeypatch.setattr(causal_lm, "why_not_fast", lambda _: "")
            assert found(stale), f"verify does not see {name}"
            monkeypatch.undo()
    assert len(matters) >= 3  # else nothing was tried
