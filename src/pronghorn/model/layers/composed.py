"""Norms and linears as separate differentiable ops, for what the hand-written node does not cover: DoRA, LoRA dropout, several
adapters, unknown linears. The linears run as modules; norms, RoPE, attention and activation are our kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.norm.rms_norm import rms_norm
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.split_linears import SplitLinears


def normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps, **norm.form)[0]


def projected(group: LinearGroup | SplitLinears, x: Tensor) -> Tensor:
    """Each module's own forward; a batch of one, because some PEFT variants count dimensions."""
    parts = [module(x[None])[0] for module in group.modules()]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y.to(x.dtype)  # PEFT's float32 adapters under bf16 may return float32
