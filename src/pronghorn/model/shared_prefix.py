"""Whether a model's layers can compute a prompt once for all of its answers (kernels/attention/attention_shared.py)."""

from __future__ import annotations

from typing import Any

import torch

from pronghorn.kernels.attention.attention import pick_backend
from pronghorn.kernels.attention.attention_short import MAX_WIDTH
from pronghorn.model.causal_lm import engine_of


def why_not_shared(model: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Empty where it can. `dtype`: what the layers compute in."""
    engine = engine_of(model)
    if engine is None:
        return "the model uses the transformers layers"
    if engine.positions.by_length:
        return "its LongRoPE has other frequencies for longer documents, and a prompt is part of several"
    width = engine.layers[0].head_width
    if device.type == "cuda" and pick_backend(device, dtype, width, shared=True) != "short":
        return f"its head width is {width}, and the kernel needs Triton and head widths up to {MAX_WIDTH}"
    return ""
