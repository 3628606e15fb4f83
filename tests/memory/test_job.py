"""What a job says of a model, and what plans are tried for it."""

from __future__ import annotations

import pytest
from real_layers import EXPERTS, SMALL
from transformers import AutoConfig

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import ModelError
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.job import Job, Mixture, pieces_worth_trying, shape_of, target_of


def test_a_family_without_fast_layers_is_refused() -> None:
    with pytest.raises(ModelError, match="does not support this model"):
        shape_of({"model_type": "mamba"})


def test_layers_that_are_not_alike_are_refused() -> None:
    for changes in ({"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        with pytest.raises(ModelError, match="does not support this model") as refused:
            shape_of({"model_type": "qwen3_moe"} | SMALL | EXPERTS["qwen3_moe"] | changes)
        assert "some do not" in str(refused.value)


def test_the_shape_is_the_configs() -> None:
    shape = shape_of(MODELS["gpt-oss-20b"])
    assert (shape.mixture, shape.mlp_width) == (Mixture(32, 4, 2880), 0)
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
