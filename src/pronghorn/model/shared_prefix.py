"""Whether a model's layers can compute a prompt once for all of its answers (kernels/attention/attention_shared.py,
kernels/conv/shared_prompts.py)."""

from __future__ import annotations

import torch

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.attention.attention import pick_backend
from pronghorn.kernels.attention.attention_short import ALONE_WIDTH, MAX_WIDTH
from pronghorn.model.families import heads_of, why_not_fast


def why_not_shared(config: HFConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Empty where it can, on the fast layers. `dtype`: what they compute in. Asked before weights are loaded: packs depend on
    it."""
    if why := why_not_fast(config):
        return why
    text = config.get_text_config()
    if "longrope" in str(getattr(text, "rope_parameters", None)):
        return "its LongRoPE frequencies depend on the document length, and a shared prompt is part of several documents"
    width = max(heads_of(text, i)[1] for i in range(int(text.num_hidden_layers)))
    if device.type == "cuda" and pick_backend(device, dtype, width, shared=True) != "short":
        return f"its head width is {width}; the kernel needs Triton and head widths up to {ALONE_WIDTH} ({MAX_WIDTH} in fp32)"
    return ""
