"""Numbers that a family keeps in float32 whatever the model's dtype is: the bias of a router's choice, for one, whose steps of
0.001 bf16 would lose beside a value near 1. transformers honours them when it loads; here they are honoured when we do, and
when a model is cast."""

from __future__ import annotations

import re
from typing import Any

import torch


def stays_wide(model: Any, name: str) -> bool:
    """Whether this parameter or buffer stays in float32."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){part}($|\.)", name) for part in kept)


def cast(model: Any, dtype: torch.dtype) -> Any:
    """`model.to(dtype)`, with what stays in float32 as it was."""
    wide = {name: buffer.float() for name, buffer in model.named_buffers() if stays_wide(model, name)}
    parameters = {name: parameter.data.float() for name, parameter in model.named_parameters() if stays_wide(model, name)}
    model = model.to(dtype)
    for name, value in wide.items():
        owner, _, leaf = name.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value
    for name, value in parameters.items():
        model.get_parameter(name).data = value
    return model
