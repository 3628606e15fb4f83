"""RMS norm of each value head, multiplied by a gate (Gated DeltaNet's output).

T = packed tokens, N = value heads, V = value width, X = N V. o_TNV, z_TX; weight_V is multiplied as it is, not 1 + weight:

    n = o / sqrt(mean over V of o^2 + eps);  y = n weight silu(z)

    dz = dy n weight (sigmoid(z) + z sigmoid(z) (1 - sigmoid(z)));  u = dy weight silu(z)
    do = (u - n mean over V of (u n)) / sqrt(mean of o^2 + eps);  dweight = sum of dy n silu(z), in a fixed order

Mamba-2's output has the gate first (GATE_FIRST): N groups of V columns, weight_X,

    x = o silu(z);  n = x / sqrt(mean over V of x^2 + eps);  y = n weight
    u = dy weight;  dx = (u - n mean over V of (u n)) / sqrt(...);  do = dx silu(z);  dz = dx o silu'(z);  dweight = sum of dy n

Bound by memory: forward reads 2 X and writes X values a token, backward reads 3 X and writes 2 X.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.norm.rms_norm import sum_rows
from pronghorn.kernels.runtime.dispatch import jit, processor_count, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

TILE = 2048  # values of a program: 16 heads of 128
PROGRAMS = 8  # on a multiprocessor, where each sums its part of the weight's gradient


def gated_norm_reference(o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float, *, gate_first: bool = False) -> Tensor:
    """y_TX. `gate_first`: V are the columns of a group, and the weight has all X."""
    if gate_first:
        x_TNV = o_TNV * F.silu(z_TX).view(o_TNV.shape)
        return (x_TNV * torch.rsqrt(x_TNV.square().mean(-1, keepdim=True) + eps)).flatten(1) * weight_V.to(o_TNV.dtype)
    normed_TNV = o_TNV * torch.rsqrt(o_TNV.square().mean(-1, keepdim=True) + eps) * weight_V.to(o_TNV.dtype)
    return normed_TNV.flatten(1) * F.silu(z_TX)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _heads(x, x_row, row, column, inside, N: tl.constexpr, V: tl.constexpr):
    """Rows are heads of tokens: N to a row of x."""
    place = x + (row // N * x_row + row % N * V)[:, None] + column[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32)


@jit
def _put_heads(x, x_row, row, column, inside, values, N: tl.constexpr, V: tl.constexpr):
    place = x + (row // N * x_row + row % N * V)[:, None] + column[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)


@jit
def _forward_kernel(
    o, z, z_row, weight, y, y_row, eps, rows, N: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, ROWS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, VP)
    inside = (row < rows)[:, None] & (column < V)[None, :]
    value, gate = _heads(o, N * V, row, column, inside, N, V), _heads(z, z_row, row, column, inside, N, V)
    if GATE_FIRST:
        value *= gate * tl.sigmoid(gate)
        scale, gate = _heads(weight, 0, row, column, inside, N, V), 1.0
    else:
        scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
        gate *= tl.sigmoid(gate)
    normed = value * (1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / V + eps))[:, None]
    _put_heads(y, y_row, row, column, inside, normed * scale * gate, N, V)


@jit
def _backward_kernel(
    dy, dy_row, o, z, z_row, weight, do, dz, dz_row, parts, eps, rows, N: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    ROWS: tl.constexpr, NEED_WEIGHT: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th tile; parts [programs, V]: each program's part of dweight. GATE_FIRST: parts [programs, ROWS, V];
    programs go on by a multiple of N rows, so that a row of theirs is always of the same group."""
    column = tl.arange(0, VP)
    scale = tl.load(weight + column, mask=column < V, other=0.0).to(tl.float32)[None, :]
    if GATE_FIRST:
        of_group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        scale = _heads(weight, 0, of_group, column, (column < V)[None, :] & (of_group >= 0)[:, None], N, V)
    total = tl.zeros([ROWS, VP], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < rows)[:, None] & (column < V)[None, :]
        grad, value = _heads(dy, dy_row, row, column, inside, N, V), _heads(o, N * V, row, column, inside, N, V)
        gate = _heads(z, z_row, row, column, inside, N, V)
        opened = tl.sigmoid(gate)
        silu = gate * opened
        if GATE_FIRST:
            gated = value * silu
            inverse = (1.0 / tl.sqrt_rn(tl.sum(gated * gated, 1) / V + eps))[:, None]
            normed, u = gated * inverse, grad * scale
            dgated = inverse * (u - normed * (tl.sum(u * normed, 1) / V)[:, None])
            _put_heads(do, N * V, row, column, inside, dgated * silu, N, V)
            _put_heads(dz, dz_row, row, column, inside, dgated * value * (opened + silu * (1.0 - opened)), N, V)
            total += grad * normed
        else:
            inverse = (1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / V + eps))[:, None]
            normed, u = value * inverse, grad * scale * silu
            _put_heads(do, N * V, row, column, inside, inverse * (u - normed * (tl.sum(u * normed, 1) / V)[:, None]), N, V)
            _put_heads(dz, dz_row, row, column, inside, grad * normed * scale * (opened + silu * (1.0 - opened)), N, V)
            total += grad * normed * silu
    if NEED_WEIGHT and GATE_FIRST:
        part = parts + (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None] * V + column[None, :]
        tl.store(part, total, mask=(column < V)[None, :])
    elif NEED_WEIGHT:
        tl.store(parts + tl.program_id(0) * V + column, tl.sum(total, 0), mask=column < V)


# ---- forward and backward --------------------------------------------------------------------------------------------------


def gated_norm_forward(
    o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float, *, gate_first: bool = False, out: Tensor | None = None
) -> Tensor:
    """y_TX. o is contiguous; z and `out` may be columns of wider rows."""
    y_TX = torch.empty(z_TX.shape, dtype=o_TNV.dtype, device=o_TNV.device) if out is None else out
    if use_triton(o_TNV):
        tiles, sizes = _tiles(o_TNV)
        _forward_kernel[(tiles,)](
            o_TNV,
            z_TX,
            z_TX.stride(0),
            weight_V,
            y_TX,
            y_TX.stride(0),
            eps,
            o_TNV.shape[0] * o_TNV.shape[1],
            **sizes,
            GATE_FIRST=gate_first,
            num_warps=_warps(sizes),
        )
        return y_TX
    wide = torch.promote_types(o_TNV.dtype, torch.float32)
    return y_TX.copy_(gated_norm_reference(o_TNV.to(wide), z_TX.to(wide), weight_V, eps, gate_first=gate_first))


def _warps(sizes: dict[str, int]) -> int:
    """A thread has 16 values of each tensor, also of a group of 8,192."""
    return min(32, max(4, sizes["ROWS"] * sizes["VP"] // 512))


def _tiles(o_TNV: Tensor) -> tuple[int, dict[str, int]]:
    """(tiles, their sizes)"""
    (T, N, V), VP = o_TNV.shape, int(triton.next_power_of_2(o_TNV.shape[2]))
    rows = max(1, TILE // VP)
    return int(triton.cdiv(T * N, rows)), {"N": N, "V": V, "VP": VP, "ROWS": rows}


def gated_norm_backward(
    dy_TX: Tensor,
    o_TNV: Tensor,
    z_TX: Tensor,
    weight_V: Tensor,
    eps: float,
    *,
    gate_first: bool = False,
    need_weight: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(do_TNV, dz_TX, dweight_V in float32 or None). `out`: where to put dz; it and dy may be columns of wider rows."""
    do_TNV = torch.empty(o_TNV.shape, dtype=o_TNV.dtype, device=o_TNV.device)
    dz_TX = torch.empty(z_TX.shape, dtype=z_TX.dtype, device=z_TX.device) if out is None else out
    if use_triton(o_TNV):
        tiles, sizes = _tiles(o_TNV)
        programs, N = min(tiles, PROGRAMS * processor_count(o_TNV.device)) if need_weight else tiles, sizes["N"]
        of_program = 1
        if gate_first:
            programs, of_program = -(-programs // N) * N, sizes["ROWS"]
        rows = programs * of_program if need_weight else 0
        parts = torch.empty(rows, sizes["V"], dtype=torch.float32, device=o_TNV.device)
        _backward_kernel[(programs,)](
            dy_TX, dy_TX.stride(0), o_TNV, z_TX, z_TX.stride(0), weight_V, do_TNV, dz_TX, dz_TX.stride(0), parts, eps,
            o_TNV.shape[0] * N, **sizes, NEED_WEIGHT=need_weight, GATE_FIRST=gate_first, num_warps=_warps(sizes),
        )  # fmt: skip
        return do_TNV, dz_TX, sum_rows(parts.view(-1, len(weight_V)))[0] if need_weight else None
    wide = torch.promote_types(o_TNV.dtype, torch.float32)
    dy, o, z = dy_TX.to(wide).view(o_TNV.shape), o_TNV.to(wide), z_TX.to(wide).view(o_TNV.shape)
    opened, weight = z.sigmoid(), weight_V.to(wide)
    silu = z * opened
    value = o * silu if gate_first else o
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    normed = value * rstd
    if gate_first:
        u = dy * weight.view(o.shape[1:])
        dvalue = rstd * (u - normed * (u * normed).mean(-1, keepdim=True))
        do_TNV.copy_(dvalue * silu)
        dz_TX.copy_((dvalue * o * (opened + silu * (1 - opened))).flatten(1))
        return do_TNV, dz_TX, (dy * normed).sum(0).flatten() if need_weight else None
    u = dy * weight * silu
    do_TNV.copy_(rstd * (u - normed * (u * normed).mean(-1, keepdim=True)))
    dz_TX.copy_((dy * normed * weight * (opened + silu * (1 - opened))).flatten(1))
    return do_TNV, dz_TX, (dy * normed * silu).sum((0, 1)) if need_weight else None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float, gate_first: bool) -> Tensor:
        ctx.save_for_backward(o_TNV, z_TX, weight_V)
        ctx.eps, ctx.gate_first = eps, gate_first
        return gated_norm_forward(o_TNV, z_TX, weight_V, eps, gate_first=gate_first)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        o_TNV, z_TX, weight_V = ctx.saved_tensors
        dy_TX = incoming[0] if incoming[0].stride(-1) == 1 else incoming[0].contiguous()
        options = {"gate_first": ctx.gate_first, "need_weight": ctx.needs_input_grad[2]}
        do, dz, dw = gated_norm_backward(dy_TX, o_TNV, z_TX, weight_V, ctx.eps, **options)
        return do, dz, None if dw is None else dw.to(weight_V.dtype), None, None


def gated_norm(o_TNV: Tensor, z_TX: Tensor, weight_V: Tensor, eps: float, *, gate_first: bool = False) -> Tensor:
    """Differentiable y_TX of a contiguous o."""
    y_TX: Tensor = _GatedNorm.apply(o_TNV, z_TX, weight_V, eps, gate_first)  # type: ignore[no-untyped-call]
    return y_TX
