"""Decay and step of the delta rule, token by token and value head by value head, in float32.

T = packed tokens, N = value heads; A_log, dt_bias [N]:

    g = -exp(A_log) softplus(a + dt_bias)         log of the state's decay, <= 0
    beta = sigmoid(b)                             how much of the error a token corrects

    da = -dg exp(A_log) sigmoid(a + dt_bias);  db = dbeta beta (1 - beta)
    dA_log = sum over t of dg g;  ddt_bias = sum over t of da      in tiles of rows, added in order: the same bits each time
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.runtime.first_order import Ctx, first_order


def delta_gates_reference(a_TN: Tensor, b_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor) -> tuple[Tensor, Tensor]:
    """g_TN and beta_TN, in the dtype of a."""
    A_log_N, dt_bias_N = A_log_N.to(a_TN.dtype), dt_bias_N.to(a_TN.dtype)
    return -A_log_N.exp() * F.softplus(a_TN + dt_bias_N), b_TN.sigmoid()


# ---- forward and backward --------------------------------------------------------------------------------------------------


def delta_gates_forward(a_TN: Tensor, b_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor) -> tuple[Tensor, Tensor]:
    """g_TN and beta_TN in float32. a and b may be columns of wider rows, in 16 or 32 bits."""
    wide = torch.promote_types(a_TN.dtype, torch.float32)
    return delta_gates_reference(a_TN.to(wide), b_TN.to(wide), A_log_N, dt_bias_N)


def delta_gates_backward(
    dg_TN: Tensor, dbeta_TN: Tensor, a_TN: Tensor, b_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor, *,
    need_weights: bool = True, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(da_TN, db_TN, dA_log_N, ddt_bias_N); the last two in float32, or None. `out`: where to put da and db, which may be
    columns of wider rows."""
    da_TN, db_TN = (torch.empty(a_TN.shape, dtype=x.dtype, device=x.device) for x in (a_TN, b_TN)) if out is None else out
    wide = torch.promote_types(a_TN.dtype, torch.float32)
    given_TN = a_TN.to(wide) + dt_bias_N.to(wide)
    speed_TN = dg_TN * -A_log_N.to(wide).exp()
    beta_TN, wide_da_TN = b_TN.to(wide).sigmoid(), speed_TN * given_TN.sigmoid()
    da_TN.copy_(wide_da_TN)
    db_TN.copy_(dbeta_TN * beta_TN * (1 - beta_TN))
    if not need_weights:
        return da_TN, db_TN, None, None
    return da_TN, db_TN, (speed_TN * F.softplus(given_TN)).sum(0), wide_da_TN.sum(0)


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, a_TN: Tensor, b_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a_TN, b_TN, A_log_N, dt_bias_N)
        return delta_gates_forward(a_TN, b_TN, A_log_N, dt_bias_N)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, dg_TN: Tensor, dbeta_TN: Tensor) -> tuple[Tensor | None, ...]:
        a_TN, b_TN, A_log_N, dt_bias_N = ctx.saved_tensors
        da, db, *weights = delta_gates_backward(
            dg_TN.contiguous(),
            dbeta_TN.contiguous(),
            a_TN,
            b_TN,
            A_log_N,
            dt_bias_N,
            need_weights=any(ctx.needs_input_grad[2:]),
        )
        dA_log, ddt_bias = (
            None if each is None else each.to(like.dtype) for each, like in zip(weights, (A_log_N, dt_bias_N), strict=True)
        )
        return da, db, dA_log, ddt_bias


def delta_gates(a_TN: Tensor, b_TN: Tensor, A_log_N: Tensor, dt_bias_N: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiable g_TN and beta_TN."""
    g_TN, beta_TN = _DeltaGates.apply(a_TN, b_TN, A_log_N, dt_bias_N)  # type: ignore[no-untyped-call]
    return g_TN, beta_TN
