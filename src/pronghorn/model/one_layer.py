"""A model of one decoder layer of each kind on torch's `meta` device, stored and adapted as a training method does it.

For plans (memory/dry_run.py). Within `dispatch.dry_run`, whose target decides how weights in FP8 are multiplied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoConfig

from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.model.config import empty_model
from pronghorn.model.families import (
    NO_ROPE,
    input_width,
    keys_by_layer,
    lends_keys,
    of_layer,
    rope_kind,
    shares_keys,
    text_config,
    window,
)
from pronghorn.model.formats.checkpoint import published_format
from pronghorn.model.formats.experts import StoredExperts
from pronghorn.model.formats.store import store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.heads import HEADS
from pronghorn.model.lora import with_adapter
from pronghorn.model.text_stack import backbone, beside_text, freeze_beside_text
from pronghorn.recipe_parts import Lora

OF_ALL = ("time_step_limit", "mlp_multipliers", "ssm_multipliers")  # lists that are of the whole model


def as_config(config: HFConfig) -> Any:
    """Hugging Face's config object, of itself or of a plain dict of its values."""
    return AutoConfig.for_model(**config) if isinstance(config, dict) else config


def written(config: HFConfig) -> str:
    """As JSON: equal for equal models."""
    return str(config.to_json_string(use_diff=False))


def _read(written_config: str) -> Any:
    """What `written` wrote. transformers writes infinity (Mamba-2's `time_step_limit`) as {"__float__": "Infinity"}."""

    def number(found: dict[str, Any]) -> Any:
        return float(found["__float__"]) if "__float__" in found else found

    return AutoConfig.for_model(**json.loads(written_config, object_hook=number))


@lru_cache(maxsize=64)
def layer_kinds(written_config: str) -> tuple[int, ...]:
    """For each layer the number of the first one that has the same modules and sizes, attends in the same way, and has keys and
    values of its own or lends them or not."""
    config = _plain(written_config)
    text, firsts = text_config(config), dict[Any, int]()
    layers = backbone(empty_model(config.model_type, config)).layers
    found = []
    for i, layer in enumerate(layers):
        sizes = tuple((name, parameter.shape) for name, parameter in layer.named_parameters())
        found.append(firsts.setdefault((sizes, window(text, i), rope_kind(text, i) == NO_ROPE, lends_keys(text, i)), i))
    return tuple(found)


def _plain(written_config: str) -> Any:
    config = _read(written_config)
    config.architectures = None  # a head that is already there is added to a language model here
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # sizes are those of the model it was made from
    return config


def _few_layers(config: HFConfig, kept: Sequence[int], dtype: torch.dtype) -> Any:
    """These layers alone, the others gone."""
    text = text_config(config)
    shared = [shares_keys(text, i) for i in range(text.num_hidden_layers)]
    by_layer = [{key: getattr(of_layer(text, i), key) for key in keys_by_layer(text)} for i in range(text.num_hidden_layers)]

    def cut(numbers: Sequence[int]) -> None:
        layers = int(text.num_hidden_layers)
        for name, value in list(vars(text).items()):  # what is said of each layer
            if isinstance(value, list) and len(value) == layers and name not in OF_ALL:
                setattr(text, name, [value[number] for number in numbers])
        text.num_hidden_layers = len(numbers)
        if any(shared):  # those that lend keys and values are kinds of their own, so they are among the kept ones
            text.num_kv_shared_layers = sum(shared[number] for number in numbers)
        if any(by_layer):
            text.per_layer_config = {i: by_layer[number] for i, number in enumerate(numbers)}

    if not input_width(text):  # else what makes the inputs of layers is that of all layers
        cut(range(max(kept) + 1))
    model: HFModel = empty_model(config.model_type, config, dtype)
    layers = backbone(model).layers
    backbone(model).layers = torch.nn.ModuleList([layers[number] for number in kept])
    cut(kept)
    return model


def one_layer_of_each_kind(written_config: str, storage: str, dtype: torch.dtype, lora: Lora | None, head: str = "lm") -> Any:
    """`storage`: a row of the formats' table. `lora`: None if the weights are trained themselves, in float32. `head`: a
    name of model/heads/."""
    row, firsts = FORMATS[storage], sorted(set(layer_kinds(written_config)))
    published = FORMATS.get(published_format(_read(written_config)))
    model = _few_layers(_plain(written_config), firsts, torch.float32 if lora is None else dtype)
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
