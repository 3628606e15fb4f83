"""Configs that describe does not describe a valid model: a sentence with the key and the reason, before anything is built."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pronghorn.errors import ModelError
from pronghorn.model.config import read_config
from pronghorn.model.config_check import require_sane_numbers
from pronghorn.model.load import inspect_model, load_model
from tables import table

CPU = torch.device("cpu")


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def change(folder: Path, file: str = "config.json", **values: Any) -> None:
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | values))


def refused(folder: Path) -> ModelError:
    found = []
    for use in (lambda: inspect_model(str(folder)), lambda: load_model(str(folder), torch.float32, CPU)):
        began = time.monotonic()
        with pytest.raises(ModelError) as caught:
            use()
        assert time.monotonic() - began < 30  # milliseconds; hours, where it would be built
        assert caught.value.where == str(folder)
        found.append(caught.value)
    assert found[0].what == found[1].what
    return found[0]


@table(
    ("values", "said"),
    [
        ({"hidden_size": "64"}, "hidden_size: '64'"),
        ({"hidden_size": -64}, "hidden_size: -64"),
        ({"hidden_size": 64.5}, "hidden_size: 64.5"),
        ({"hidden_size": True}, "hidden_size: True"),
        *(({"architectures": value}, "architectures: ") for value in (5, True, 0.5, "LlamaForCausalLM", {"a": 1}, [None])),
        ({"hidden_size": 10**6}, "weights, but the weight files have"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0"),
        ({"num_key_value_heads": 3}, "4 attention heads and 3 key/value heads"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: 10000000"),
        ({"num_hidden_layers": 900}, "900 layers, but the weight files have 2"),
        ({"vocab_size": 10**12}, "vocab_size: 1000000000000"),
        ({"vocab_size": 10**7}, "weights, but the weight files have"),
        ({"intermediate_size": 10**6}, "weights, but the weight files have"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps: -1e-05"),
        ({"rope_parameters": {"rope_theta": 0.0, "rope_type": "default"}}, "rope_parameters.rope_theta: 0.0"),
        ({"attention_dropout": 10**12}, "attention_dropout: 1000000000000"),
        ({"residual_multiplier": {"a": 1}}, "residual_multiplier: {'a': 1}"),
        ({"rope_parameters": 3}, "rope_parameters: 3"),
        ({"quantization_config": "nf4"}, "quantization_config: 'nf4'"),
        ({"eos_token_id": "two"}, "eos_token_id: 'two'"),
        ({"pad_token_id": 10**40}, "does not describe a valid model|pad_token_id"),
        ({"layer_types": ["full_attention"]}, "does not describe a valid model"),
        ({"attention_bias": "yes"}, "does not describe a valid model"),
        ({"hidden_act": "no-such"}, "does not describe a valid model"),
        ({"model_type": ["llama"]}, "does not describe a valid model"),
        ({"rope_parameters": {"rope_type": "no-such"}}, "does not describe a valid model"),
    ],
)
def test_each_is_a_sentence(folder: Path, values: dict[str, Any], said: str) -> None:
    change(folder, **values)
    told = refused(folder)
    assert any(part in told.what for part in said.split("|")), told
    assert "\n" not in told.what + told.why
    assert told.exit_code == 2


def test_bounds_hold_without_weights(folder: Path) -> None:
    """A plan needs none."""
    (folder / "model.safetensors").unlink()
    sound = read_config(str(folder)).to_dict()
    for key in ("num_hidden_layers", "vocab_size", "hidden_size"):
        change(folder, **{key: 10**12})
        with pytest.raises(ModelError, match=f"{key}: 1000000000000"):
            read_config(str(folder))
        change(folder, **{key: sound[key]})


@table(
    "content",
    [
        b"{}",
        b'{"eos_token_id": [2, "x"]}',
        b'{"max_length": "x"}',
        b'{"temperature": {}}',
        b"[]",
        b'{"do_sample": 1}',
        b'{"output_hidden_states": [{"type": "function"}]}',
        b'{"num_beams": 10000000}',
        b'{"top_p": NaN}',
        b"\xff",
    ],
)
def test_a_generation_config_that_cannot_be_used(folder: Path, content: bytes) -> None:
    (folder / "generation_config.json").write_bytes(content)
    if content == b"{}":
        load_model(str(folder), torch.float32, CPU)
        return
    for storage in ("bf16", "nf4"):
        with pytest.raises(ModelError, match=r"generation_config.json"):
            load_model(str(folder), torch.float32, CPU, storage=storage)


def test_configs_of_real_models_pass() -> None:
    """The largest of their kind, and what looks odd but is right."""
    for content in (
        {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 128256},  # Llama 3.1 405B
        {"vocab_size": 262208, "sliding_window": None, "query_pre_attn_scalar": 168, "rope_theta": 1000000},  # Gemma 3
        {"num_experts": 512, "num_experts_per_tok": 10, "time_step_limit": [0.0, float("inf")], "rope_scaling": None},
        {"max_position_embeddings": 1048576, "sliding_window": 0, "initializer_range": 0.02, "rope_theta": 5e8},
    ):
        require_sane_numbers(content, "a model")
