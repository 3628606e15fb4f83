"""Decay and step of the delta rule, token by token and value head by value head, in float32.

T = packed tokens, N = value heads; A_log, dt_bias [N]:

    g = -exp(A_log) softplus(a + dt_bias)         log of the state's decay, <= 0
    beta = sigmoid(b)                             how much of the error a token corrects

    da = -dg exp(A_log) sigmoid(a + dt_bias);  db = dbeta beta (1 - beta)

Mamba-2 has one of both, a step, without b (DELTA off):

    beta = softplus(a + dt_bias) within two limits;  g = -exp(A_log) beta
    da = (dbeta - dg exp(A_log)) sigmoid(a + dt_bias), 0 beyond the limits

    dA_log = sum over t of dg g;  ddt_bias = sum over t of da      in tiles of rows, added in order: the same bits each time
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

TILE = 512  # values of a program
Limits = tuple[float, float]  # of Mamba-2's steps
NO_LIMITS = (0.0, math.inf)


def delta_gates_reference(
    a_TN: Tensor, b_TN: Tensor | None, A_log_N: Tensor, dt_bias_N: Tensor, limits: Limits = NO_LIMITS
) -> tuple[Tensor, Tensor]:
    """g_TN and beta_TN, in the dtype of a. Without b: of Mamba-2."""
    A_log_N, dt_bias_N = A_log_N.to(a_TN.dtype), dt_bias_N.to(a_TN.dtype)
    step_TN = F.softplus(a_TN + dt_bias_N)
    if b_TN is None:
        step_TN = step_TN.clamp(*limits)
    return -A_log_N.exp() * step_TN, step_TN if b_TN is None else b_TN.sigmoid()


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _softplus(x):
    """log(1 + e^x). Rounding 1 + e loses what log needs of a small e; the quotient, 1 in exact arithmetic, gives it back."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    return tl.maximum(x, 0.0) + tl.where(rounded == 1.0, small, tl.log(rounded) * (small / (rounded - 1.0)))


@jit
def _given(a, a_row, dt_bias, row, head, inside, N: tl.constexpr):
    """a + dt_bias"""
    bias = tl.load(dt_bias + head, mask=head < N, other=0.0).to(tl.float32)
    return tl.load(a + row[:, None] * a_row + head[None, :], mask=inside, other=0.0).to(tl.float32) + bias[None, :]


@jit
def _forward_kernel(
    a, a_row, b, b_row, A_log, dt_bias, g, beta, low, high, T, N: tl.constexpr, NP: tl.constexpr, ROWS: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, NP)
    inside = (row < T)[:, None] & (head < N)[None, :]
    speed = tl.exp(tl.load(A_log + head, mask=head < N, other=0.0).to(tl.float32))
    place = row[:, None] * N + head[None, :]
    step = _softplus(_given(a, a_row, dt_bias, row, head, inside, N))
    if not DELTA:
        step = tl.minimum(tl.maximum(step, low), high)
    tl.store(g + place, -speed[None, :] * step, mask=inside)
    if DELTA:
        step = tl.sigmoid(tl.load(b + row[:, None] * b_row + head[None, :], mask=inside, other=0.0).to(tl.float32))
    tl.store(beta + place, step, mask=inside)


@jit
def _backward_kernel(
    dg, dbeta, a, a_row, b, b_row, A_log, dt_bias, da, da_row, db, db_row, parts, low, high, T, N: tl.constexpr,
    NP: tl.constexpr, ROWS: tl.constexpr, NEED_WEIGHTS: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """parts [programs, 2, N]: each program's part of dA_log and ddt_bias."""
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, NP)
    inside = (row < T)[:, None] & (head < N)[None, :]
    place = row[:, None] * N + head[None, :]
    speed = tl.exp(tl.load(A_log + head, mask=head < N, other=0.0).to(tl.float32))
    given = _given(a, a_row, dt_bias, row, head, inside, N)
    scaled = tl.load(dg + place, mask=inside, other=0.0) * -speed[None, :]
    length = _softplus(given)
    if DELTA:
        found = scaled * tl.sigmoid(given)
        step = tl.sigmoid(tl.load(b + row[:, None] * b_row + head[None, :], mask=inside, other=0.0).to(tl.float32))
        dstep = tl.load(dbeta + place, mask=inside, other=0.0) * step * (1.0 - step)
        tl.store(db + row[:, None] * db_row + head[None, :], dstep.to(db.dtype.element_ty), mask=inside)
    else:
        found = (scaled + tl.load(dbeta + place, mask=inside, other=0.0)) * tl.sigmoid(given)
        found = tl.where((length >= low) & (length <= high), found, 0.0)
        length = tl.minimum(tl.maximum(length, low), high)
    tl.store(da + row[:, None] * da_row + head[None, :], found.to(da.dtype.element_ty), mask=inside)
    if NEED_WEIGHTS:
        part = parts + tl.program_id(0) * 2 * N + head
        tl.store(part, tl.sum(scaled * length, 0), mask=head < N)
        tl.store(part + N, tl.sum(found, 0), mask=head < N)


# ---- forward and backward --------------------------------------------------------------------------------------------------


def delta_gates_forward(
    a_TN: Tensor, b_TN: Tensor | None, A_log_N: Tensor, dt_bias_N: Tensor, limits: Limits = NO_LIMITS
) -> tuple[Tensor, Tensor]:
    """g_TN and beta_TN in float32. a and b may be columns of wider rows, in 16 or 32 bits; the weights are contiguous. Without
    b: of Mamba-2, with steps within the limits."""
    wide = torch.promote_types(a_TN.dtype, torch.float32)
    if not use_triton(a_TN):
        return delta_gates_reference(a_TN.to(wide), None if b_TN is None else b_TN.to(wide), A_log_N, dt_bias_N, limits)
    g_TN, beta_TN = (torch.empty(a_TN.shape, dtype=torch.float32, device=a_TN.device) for _ in range(2))
    programs, sizes = _tiles(a_TN)
    b = a_TN if b_TN is None else b_TN  # not read where there is none
    _forward_kernel[(programs,)](
        a_TN, a_TN.stride(0), b, b.stride(0), A_log_N, dt_bias_N, g_TN, beta_TN, *limits, len(a_TN), **sizes,
        DELTA=b_TN is not None, num_warps=4,
    )  # fmt: skip
    return g_TN, beta_TN


def _tiles(a_TN: Tensor) -> tuple[int, dict[str, int]]:
    """(programs, sizes of a tile)"""
    (T, N), NP = a_TN.shape, int(triton.next_power_of_2(a_TN.shape[1]))
    rows = max(1, TILE // NP)
    return int(triton.cdiv(T, rows)), {"N": N, "NP": NP, "ROWS": rows}


def delta_gates_backward(
    dg_TN: Tensor, dbeta_TN: Tensor, a_TN: Tensor, b_TN: Tensor | None, A_log_N: Tensor, dt_bias_N: Tensor,
    limits: Limits = NO_LIMITS, *, need_weights: bool = True, out: tuple[Tensor, Tensor] | tuple[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(da_TN, db_TN, dA_log_N, ddt_bias_N); the last two in float32, or None. dg, dbeta: contiguous, float32.
    `out`: where to put da and db, which may be columns of wider rows. Without b, db is da."""
    given = [a_TN] if b_TN is None else [a_TN, b_TN]
    outs = [torch.empty(a_TN.shape, dtype=x.dtype, device=x.device) for x in given] if out is None else [*out]
    da_TN, db_TN = outs[0], outs[-1]
    if use_triton(a_TN):
        programs, sizes = _tiles(a_TN)
        parts = torch.empty(programs if need_weights else 0, 2, a_TN.shape[1], dtype=torch.float32, device=a_TN.device)
        _backward_kernel[(programs,)](
            dg_TN, dbeta_TN, a_TN, a_TN.stride(0), given[-1], given[-1].stride(0), A_log_N, dt_bias_N, da_TN, da_TN.stride(0),
            db_TN, db_TN.stride(0), parts, *limits, len(a_TN), **sizes, NEED_WEIGHTS=need_weights, DELTA=b_TN is not None,
            num_warps=4,
        )  # fmt: skip
        return da_TN, db_TN, *(parts.sum(0) if need_weights else (None, None))
    wide = torch.promote_types(a_TN.dtype, torch.float32)
    given_TN = a_TN.to(wide) + dt_bias_N.to(wide)
    speed_TN, step_TN = dg_TN * -A_log_N.to(wide).exp(), F.softplus(given_TN)
    if b_TN is None:
        free_TN = (step_TN >= limits[0]) & (step_TN <= limits[1])
        wide_da_TN, step_TN = (speed_TN + dbeta_TN) * given_TN.sigmoid() * free_TN, step_TN.clamp(*limits)
    else:
        beta_TN, wide_da_TN = b_TN.to(wide).sigmoid(), speed_TN * given_TN.sigmoid()
        db_TN.copy_(dbeta_TN * beta_TN * (1 - beta_TN))
    da_TN.copy_(wide_da_TN)
    if not need_weights:
        return da_TN, db_TN, None, None
    return da_TN, db_TN, (speed_TN * step_TN).sum(0), wide_da_TN.sum(0)


class _DeltaGates(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, a_TN: Tensor, b_TN: Tensor | None, A_log_N: Tensor, dt_bias_N: Tensor, limits: Limits
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a_TN, b_TN, A_log_N, dt_bias_N)
        ctx.limits = limits
        return delta_gates_forward(a_TN, b_TN, A_log_N, dt_bias_N, limits)

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
            ctx.limits,
            need_weights=any(ctx.needs_input_grad[2:4]),
        )
        dA_log, ddt_bias = (
            None if each is None else each.to(like.dtype) for each, like in zip(weights, (A_log_N, dt_bias_N), strict=True)
        )
        return da, None if b_TN is None else db, dA_log, ddt_bias, None


def delta_gates(
    a_TN: Tensor, b_TN: Tensor | None, A_log_N: Tensor, dt_bias_N: Tensor, limits: Limits = NO_LIMITS
) -> tuple[Tensor, Tensor]:
    """Differentiable g_TN and beta_TN."""
    g_TN, beta_TN = _DeltaGates.apply(a_TN, b_TN, A_log_N, dt_bias_N, limits)  # type: ignore[no-untyped-call]
    return g_TN, beta_TN
