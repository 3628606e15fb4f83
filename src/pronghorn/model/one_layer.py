"""A model of one decoder layer on torch's `meta` device, stored and adapted as a training method does it: sizes, no contents.

For plans (memory/dry_run.py). Within `dispatch.dry_run`, whose target decides how weights in FP8 are multiplied.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoConfig

from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.model.config import empty_model
from pronghorn.model.families import text_config
from pronghorn.model.formats.checkpoint import published_format
from pronghorn.model.formats.experts import StoredExperts
from pronghorn.model.formats.store import store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.heads import HEADS
from pronghorn.model.lora import with_adapter
from pronghorn.model.text_stack import beside_text, freeze_beside_text
from pronghorn.recipe import Lora


def as_config(config: HFConfig) -> Any:
    """Hugging Face's config object, of itself or of a plain dict of its values."""
    return AutoConfig.for_model(**config) if isinstance(config, dict) else config


def written(config: HFConfig) -> str:
    """As JSON: equal for equal models."""
    return str(config.to_json_string(use_diff=False))


def one_layer_model(written_config: str, storage: str, dtype: torch.dtype, lora: Lora | None, head: str = "lm") -> Any:
    """`storage`: a row of the formats' table. `lora`: None if the weights are trained themselves, in float32. `head`: a
    name of model/heads/."""
    config, row = AutoConfig.for_model(**json.loads(written_config)), FORMATS[storage]
    config.architectures = None  # a head that is already there is added to a language model here
    text, layers = text_config(config), int(text_config(config).num_hidden_layers)
    for name, value in list(vars(text).items()):  # what is said of each layer
        if isinstance(value, list) and len(value) == layers:
            setattr(text, name, value[:1])
    text.num_hidden_layers = 1
    published = FORMATS.get(published_format(config))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # sizes are those of the model it was made from
    model: HFModel = empty_model(config.model_type, config, torch.float32 if lora is None else dtype)
    model = HEADS[head].attach(model, seed=0)
    if lora is None:
        model.requires_grad_(True)
        freeze_beside_text(model)
        return model
    if row.quantize:
        beside = [name for part in beside_text(model) for name, _ in model.get_submodule(part).named_modules(prefix=part)]
        if published is None or published.read:  # else its linears are in 16 bits
            store_linears_(model, published if published and row.as_published else row, skip=(*row.wide, *beside))
        store_experts_(model, row)
        for experts in (module for module in model.modules() if isinstance(module, StoredExperts)):
            for name in experts.quantized:
                delattr(experts.own_module[0], name)  # its 16 bits
    model.requires_grad_(False)
    with torch.device("meta"):
        return with_adapter(model, lora)
