"""Which config values are looked at after loading, and that what stays as it was costs nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_changes import IDS, SIZES, assert_same_step
from test_decoder_layer import FAMILIES as DENSE
from test_experts import ROWS as MIXTURES
from test_gated_delta_mixer import CONFIGS as STATES
from test_mamba_mixer import CONFIGS as MAMBA
from test_short_conv_mixer import CONFIGS as CONVOLUTIONS
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.compat.changes import CONFIG
from pronghorn.compat.hf_forward import install
from pronghorn.model.families import FAMILIES
from pronghorn.model.heads.lm import LmHead

# Of every config, read at every call, and without an effect on a text model's numbers.
NO_EFFECT = {
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation",
    "decoder",
    "generator",
    "_experts_implementation_internal",
    "_heterogeneity_spec",
    "is_heterogeneous",
    "per_layer_config",
    "get_text_config",
    "text_config",
    "is_encoder_decoder",
    "layers_block_type",  # another name of layer_types, which is looked at
    "num_kv_shared_layers",
    "number_of_conv_states",  # of a cache
    "return_dict",
    "use_cache",
    "output_attentions",
    "_output_attentions",
    "output_hidden_states",
    "vocab_size",
    "vision_aspect_ratio",
    "vision_feature_layer",
    "vision_feature_select_strategy",
}
OF_IMAGES = {  # text models that stand in another
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "glm4v_text",
    "glm_ocr_text",
    "glm4v_moe_text",
}


def test_every_config_value_that_a_forward_reads_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each family's own forward, loss and masks ask the config for: looked at here, or without effect on the result."""
    tables = (DENSE, MIXTURES, CONVOLUTIONS, STATES, MAMBA)
    configs = {config.get_text_config().model_type: config for table in tables for config in table.values()}
    assert configs.keys() == FAMILIES.keys() - OF_IMAGES
    for kind, config in configs.items():
        model, text = LmHead.auto_class(config).from_config(copy.deepcopy(config)), config.get_text_config()
        read: set[str] = set()
        ids = IDS % text.vocab_size
        own = type(text).__getattribute__

        def noted(self: Any, name: str, own: Any = own, read: set[str] = read) -> Any:
            read.add(name)
            return own(self, name)

        with monkeypatch.context() as watching:
            watching.setattr(type(text), "__getattribute__", noted)
            model(input_ids=ids, labels=ids)
        read = {name for name in read if not name.startswith("__")}
        assert "layer_types" in read, kind  # it was watched
        assert read - NO_EFFECT <= set(CONFIG), kind


def test_a_scale_of_queries_changed_after_loading() -> None:
    """Ministral 3 reads it at every call."""
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 4,
        "llama_4_scaling_beta": 0.5,
    }
    config = AutoConfig.for_model("ministral3", **SIZES, head_dim=8, rope_parameters=parameters)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config)
    fast = copy.deepcopy(plain)
    assert install(fast) == ""
    assert_same_step(plain, fast)
    for model in (plain, fast):
        model.config.rope_parameters["llama_4_scaling_beta"] = 2.0
    assert_same_step(plain, fast)
