"""RMS norm of each value head, multiplied by a gate (Gated DeltaNet's output).

T = packed tokens, N = value heads, V = value width, X = N V. o_TNV, z_TX; weight_V is multiplied as it is, not 1 + weight:

    n = o / sqrt(mean over V of o^2 + eps);  y = n weight silu(z)

    dz = dy n weight (sigmoid(z) + z sigmoid(z) (1 - sigmoid(z)));  u = dy weight silu(z)
    do = (u - n mean over V of (u n)) / sqrt(mean of o^2 + eps);  dweight = sum over t and heads of dy n silu(z), in a fixed order

Bound by memory: forward reads 2 X and writes X values a token, backward reads 3 X and writes 2 X.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.runtime.first_order import Ctx, first_order


def gated_norm_reference(o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """y_TX"""
    normed_TNV = o_TNV * torch.rsqrt(o_TNV.square().mean(-1, keepdim=True) + eps) * weight_V.to(o_TNV.dtype)
    return normed_TNV.flatten(1) * F.silu(z_TX)


# ---- forward and backward --------------------------------------------------------------------------------------------------


def gated_norm_forward(o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """y_TX. o is contiguous; z and `out` may be columns of wider rows."""
    y_TX = torch.empty(z_TX.shape, dtype=o_TNV.dtype, device=o_TNV.device) if out is None else out
    wide = torch.promote_types(o_TNV.dtype, torch.float32)
    return y_TX.copy_(gated_norm_reference(o_TNV.to(wide), z_TX.to(wide), weight_V, eps))


def gated_norm_backward(
    dy_TX: Tensor,
    o_TNV: Tensor,
    z_TX: Tensor,
    weight_V: Tensor,
    eps: float,
    *,
    need_weight: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(do_TNV, dz_TX, dweight_V in float32 or None). `out`: where to put dz; it and dy may be columns of wider rows."""
    do_TNV = torch.empty(o_TNV.shape, dtype=o_TNV.dtype, device=o_TNV.device)
    dz_TX = torch.empty(z_TX.shape, dtype=z_TX.dtype, device=z_TX.device) if out is None else out
    wide = torch.promote_types(o_TNV.dtype, torch.float32)
    dy, o, z = dy_TX.to(wide).view(o_TNV.shape), o_TNV.to(wide), z_TX.to(wide).view(o_TNV.shape)
    rstd, opened, weight = torch.rsqrt(o.square().mean(-1, keepdim=True) + eps), z.sigmoid(), weight_V.to(wide)
    normed, silu = o * rstd, z * opened
    u = dy * weight * silu
    do_TNV.copy_(rstd * (u - normed * (u * normed).mean(-1, keepdim=True)))
    dz_TX.copy_((dy * normed * weight * (opened + silu * (1 - opened))).flatten(1))
    return do_TNV, dz_TX, (dy * normed * silu).sum((0, 1)) if need_weight else None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(o_TNV, z_TX, weight_V)
        ctx.eps = eps
        return gated_norm_forward(o_TNV, z_TX, weight_V, eps)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        o_TNV, z_TX, weight_V = ctx.saved_tensors
        dy_TX = incoming[0] if incoming[0].stride(-1) == 1 else incoming[0].contiguous()
        do, dz, dw = gated_norm_backward(dy_TX, o_TNV, z_TX, weight_V, ctx.eps, need_weight=ctx.needs_input_grad[2])
        return do, dz, None if dw is None else dw.to(weight_V.dtype), None


def gated_norm(o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """Differentiable y_TX of a contiguous o."""
    y_TX: Tensor = _GatedNorm.apply(o_TNV, z_TX, weight_V, eps)  # type: ignore[no-untyped-call]
    return y_TX
