"""What a job says of a model, and what plans are tried for it."""

from __future__ import annotations

from typing import Any

import pytest
from real_layers import DENSE, EXPERTS, SMALL
from transformers import AutoConfig

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import ModelError
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.job import Job, pieces_worth_trying, shape_of, target_of
from tables import table


def test_a_family_without_fast_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="does not support this model"):
        shape_of({"model_type": "mamba"})


KINDS: dict[str, tuple[dict[str, Any], str]] = {  # of five layers
    "qwen3_moe": ({"mlp_only_layers": [1, 4]}, "abaab"),
    "qwen2_moe": ({"decoder_sparse_step": 2}, "ababa"),
    "dots1": ({"first_k_dense_replace": 2}, "aabbb"),
    "glm4_moe": ({"first_k_dense_replace": 1}, "abbbb"),
    "glm4_moe_lite": ({}, "abbbb"),
    "hy_v3": ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "dense"]}, "abbba"),
    "gpt_oss": ({}, "ababa"),
    "granite_swa": ({"layer_rope_theta": [0, 500.0, 500.0, 500.0, 0], "layer_types": ["full_attention"] * 5}, "abbba"),
    "llama": ({}, "aaaaa"),
    "gemma4_text": (
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2},
        "ababb",
    ),
}


@table("family", KINDS)
def test_layers_are_of_one_kind_if_they_have_the_same_modules_and_attend_alike(family: str) -> None:
    """Dense or with experts, with a window, without RoPE."""
    changes, kinds = KINDS[family]
    shape = shape_of({"model_type": family} | SMALL | (DENSE | EXPERTS)[family] | {"num_hidden_layers": 5, **changes})
    assert "".join("abc"[kind] for kind in shape.kinds) == kinds


def test_the_shape_is_the_configs() -> None:
    shape = shape_of(MODELS["gpt-oss-20b"])
    assert (shape.experts, shape.chosen, shape.layers) == (32, 4, 24)
    assert shape_of(MODELS["llama-8b"]) == shape_of(AutoConfig.for_model(**MODELS["llama-8b"]))
    assert shape_of(MODELS["llama-8b"]) != shape_of(MODELS["llama-8b"] | {"attention_bias": True})


def test_pieces_are_not_too_small() -> None:
    shape = shape_of(MODELS["llama-8b"])
    assert pieces_worth_trying(Job(shape, 16384)) == (1, 2, 4, 8)
    assert pieces_worth_trying(Job(shape, 3000)) == (1,)
    assert pieces_worth_trying(Job(shape, 2**20)) == (1, 2, 4, 8, 16, 32)
    assert pieces_worth_trying(Job(shape, 16384, method="fp8")) == (1, 2, 4, 8)
    assert pieces_worth_trying(Job(shape, 16384, method="full", compute="fp8")) == (1,)
    assert pieces_worth_trying(Job(shape_of(MODELS["gpt-oss-20b"]), 16384)) == (1,)


def test_a_target_is_the_gpus_chip() -> None:
    assert target_of(GPUS["rtx4090"]) == (CHIPS[8, 9], False, 132)
    assert target_of(GPUS["h200"]) == (HOPPER, True, 132) == Job(shape_of(MODELS["tiny"]), 64).target
    assert all(target_of(gpu).chip.capability == gpu.capability for gpu in GPUS.values())
