"""Gemma 4 against transformers, document by document: loss and all gradients, for every way of training.

Documents are longer than the window, layers are of both kinds, and norms and the factor of each layer are drawn."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from test_short_conv_mixer import assert_as_dequantized, assert_same, engine, fast, own
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.errors import ModelError
from pronghorn.model.causal_lm import install
from pronghorn.model.config_check import require_consistent
from pronghorn.model.families import keys_by_layer, why_not_fast
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.isolated_documents import require_isolated_documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.shared_prefix import why_not_shared
from pronghorn.model.verify import verify
from pronghorn.recipe_parts import Lora
from samples import small
from tables import first_of

SMALL = small(
    num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=12, head_dim=8,
    global_head_dim=16, num_global_key_value_heads=1, final_logit_softcapping=3.0, initializer_range=0.1,
)  # fmt: skip
DENSE = {"hidden_size_per_layer_input": 0}  # the class's default has embeddings of each layer
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("gemma4_text", DENSE),
    "gemma4, keys are values": ("gemma4_text", DENSE | {"attention_k_eq_v": True}),
    "gemma4, as E2B": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": SMALL["vocab_size"],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "initializer_range": 0.2,  # in FP8, its gate multiplies more errors
        },
    ),
    "gemma4, experts": (
        "gemma4_text",
        DENSE | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
    ),
    "gemma4 unified": ("gemma4_unified_text", {"attention_k_eq_v": True, "tie_word_embeddings": False}),
}


def config_of(kind: str, **changes: Any) -> Any:
    name, own_keys = KINDS[kind]
    return AutoConfig.for_model(name, **(SMALL | own_keys | changes))


def drawn(model: Any) -> Any:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            # Scores of q and k of length sqrt(H) without a factor decide all: float32 in transformers' norms would be seen.
            torch.nn.init.normal_(tensor, mean=0.4 if "q_norm" in name or "k_norm" in name else 1.0, std=0.1)
    return model


def model_of(kind: str, method: str) -> Any:
    torch.manual_seed(0)
    model = drawn(AutoModelForCausalLM.from_config(config_of(kind)))
    if method == "full":
        return model.train()
    if method in ("nf4", "fp8"):
        store_linears_(model, FORMATS[method])
    model.requires_grad_(False)
    model = add_adapter(model, Lora(r=4, dora=method == "dora"), seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


@pytest.mark.parametrize(
    ("kind", "method"), [*itertools.product(KINDS, ["lora", "full"]), *first_of([(kind, "dora") for kind in KINDS][::-1])]
)
def test_all_gradients_are_those_of_transformers(kind: str, method: str) -> None:
    model = model_of(kind, method)
    expected = own(model)
    assert install(model) == ""
    assert_same(fast(model), expected, 1e-5)
    assert all(layer.fused == (method != "dora") for layer in engine(model).layers)
    for length in (5, 40):  # a document by itself
        assert_same(fast(model, (length,)), own(model, (length,)), 1e-5)
    widths = [(layer.mixer.head_width, layer.mixer.kv_heads, layer.mixer.keys_are_values) for layer in engine(model).layers]
    one_kv_head = KINDS[kind][1].get("attention_k_eq_v", False)
    assert widths == [(8, 2, False), (16, 1 if one_kv_head else 2, one_kv_head)] * 2
    assert min(gradient.cosine for gradient in verify(model).gradients) > 0.99999


@pytest.mark.parametrize("kind", first_of(["gemma4, keys are values", "gemma4"]))
def test_float64_agrees_to_more_digits(kind: str) -> None:
    model = model_of(kind, "full").double()
    expected = own(model)
    assert install(model) == ""
    assert_same(fast(model), expected, 1e-6)  # cos and sin are float32


@pytest.mark.parametrize(
    ("kind", "stored"),
    [
        *itertools.product(["gemma4, keys are values", "gemma4, as E2B"], ["nf4", "fp8"]),
        ("gemma4, experts", "nf4"),  # rounded rows would choose other experts: test_fp8_moe_layer.py
    ],
)
def test_frozen_weights_in_few_bits(kind: str, stored: str) -> None:
    model, twin = model_of(kind, stored), model_of(kind, stored)
    assert_as_dequantized(model, twin, stored)


def test_documents_do_not_see_each_other() -> None:
    model = model_of("gemma4 unified", "lora")
    assert install(model) == ""
    require_isolated_documents(model, torch.device("cpu"), 259)


def test_heads_of_layers_must_divide_too() -> None:
    config = config_of("gemma4, keys are values", num_global_key_value_heads=3)
    with pytest.raises(ModelError, match="4 attention heads and 3 key/value heads"):
        require_consistent(config, "a/model")


def test_what_is_refused_says_so() -> None:
    for kind in KINDS:
        assert why_not_fast(config_of(kind)) == ""
        assert why_not_shared(config_of(kind), torch.device("cpu"), torch.float32) == ""
    assert why_not_fast(config_of("gemma4 unified", use_bidirectional_attention="vision")) == ""
    for changes, why in (
        ({"num_kv_shared_layers": 3}, "and there is none (num_kv_shared_layers"),
        ({"enable_moe_block": True, "num_experts": 4}, "how many each token uses"),
        ({"use_bidirectional_attention": "all"}, "not causal"),
        ({"attention_bias": True}, ""),
        ({"per_layer_config": {1: {"intermediate_size": 32}}}, "different values of intermediate_size by layer"),
    ):
        found = why_not_fast(config_of("gemma4", **changes))
        assert (why in found) if why else not found, (changes, found)
    llama = AutoConfig.for_model("llama", **small(per_layer_config={1: {"num_key_value_heads": 1}}))
    assert keys_by_layer(llama) == {"num_key_value_heads"}
    assert "num_key_value_heads" in why_not_fast(llama)
