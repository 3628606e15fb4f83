"""The layer as separate differentiable ops, for what the hand-written node does not cover: DoRA, LoRA dropout, several
adapters, unknown linears. The linears run as modules; norms, RoPE, attention and activation are our kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention import attention
from pronghorn.kernels.attention.rope import qk_rope
from pronghorn.kernels.mlp.gated_mlp import gated_activation
from pronghorn.kernels.norm.rms_norm import rms_norm

if TYPE_CHECKING:
    from pronghorn.model.layers.layer import DecoderLayer
    from pronghorn.model.layers.linears import LinearGroup
    from pronghorn.model.layers.mlp import DenseMlp
    from pronghorn.model.layers.norms import Norm
    from pronghorn.model.layers.types import Documents


def composed_layer(layer: DecoderLayer, h_TD: Tensor, documents: Documents) -> Tensor:
    half, mlp = layer.attention, layer.mlp
    cos, sin = documents.rotary[half.rope]
    qkv = _project(half.qkv, _normed(half.before, h_TD))
    q, k, v = qk_rope(qkv, cos, sin, **half.rope_options())
    if documents.query_scale_T is not None:
        q = (q * documents.query_scale_T[:, None, None]).to(q.dtype)
    o = attention(q, k, v, **half.options_for(documents))
    h_TD = h_TD + layer.multiplier * _normed(layer.after_attention, _project(half.out, o.flatten(1)))
    y = mlp.composed(_normed(mlp.before, h_TD), documents)
    return h_TD + layer.multiplier * _normed(mlp.after, y)


def composed_mlp(mlp: DenseMlp, x_TD: Tensor) -> Tensor:
    return _project(mlp.down, gated_activation(_project(mlp.gate_up, x_TD), mlp.activation))


def _normed(norm: Norm | None, x: Tensor) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps, one_plus=norm.one_plus)[0]


def _project(group: LinearGroup, x: Tensor) -> Tensor:
    """Each module's own forward; a batch of one, because some PEFT variants count dimensions."""
    parts = [module(x[None])[0] for module in group.modules()]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return y.to(x.dtype)  # PEFT's float32 adapters under bf16 may return float32
