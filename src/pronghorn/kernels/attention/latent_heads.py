"""Heads of multi-head latent attention: q, k and v out of what the projections of the latents make, in one launch, and back.

    q row  = [C | R] of every head          kv row = [C | V] of every head          kr row = [R], one rotated key for all heads
    q_n = [qc_n | rope(qr_n)]    k_n = [kc_n | rope(kr)]    v_n = [v_n]             filled up with zeros to H = max(C + R, V)
    dqr_n = rope'(dq_n)          dkr = rope'(sum over n of dk_n)                    in the order of n: the same bits each time

T = packed tokens, N = heads, C = columns of a head without RoPE, R = columns with it, V = width of a value, H = width of a head
as attention computes it. RoPE is (a, b) -> (a cos - b sin, b cos + a sin) for every pair: (i, i + R/2), or (2i, 2i+1) where
`neighbours`; cos and sin are fp32, [T, R/2]. Rows may be strided (last dimension contiguous). Computed in fp32, rounded once.
Bound by memory. Nothing is done in place: threads read the partners of each other's columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

Parts = tuple[Tensor, Tensor, Tensor]
VALUES = 2048  # of q, k or v that a program holds at a time, 16 a thread


class LatentHeads(NamedTuple):
    """Sizes of the heads, and how RoPE pairs their columns."""

    heads: int  # N
    plain: int  # C
    rotary: int  # R
    value: int  # V
    neighbours: bool

    @property
    def width(self) -> int:
        """H"""
        return max(self.plain + self.rotary, self.value)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Widths of the rows of q, kv and kr."""
        return self.heads * (self.plain + self.rotary), self.heads * (self.plain + self.value), self.rotary


def latent_heads_reference(
    q_TX: Tensor, kv_TY: Tensor, kr_TR: Tensor, cos_TP: Tensor, sin_TP: Tensor, sizes: LatentHeads
) -> Parts:
    """q, k, v, [T, N, H] each; differentiable."""
    N, C, R, V, neighbours = sizes
    q, qr = q_TX.unflatten(1, (N, C + R)).split([C, R], dim=-1)
    k, v = kv_TY.unflatten(1, (N, C + V)).split([C, V], dim=-1)
    qr, kr = (_rotated(x, cos_TP, sin_TP, neighbours) for x in (qr, kr_TR[:, None]))
    q, k = torch.cat([q, qr], dim=-1), torch.cat([k, kr.expand(-1, N, -1)], dim=-1)
    q, k, v = (F.pad(x, (0, sizes.width - x.shape[-1])) for x in (q, k, v))
    return q, k, v


def _rotated(x_TNR: Tensor, cos_TP: Tensor, sin_TP: Tensor, neighbours: bool) -> Tensor:
    """With -sin it is the transpose."""
    wide = torch.promote_types(x_TNR.dtype, torch.float32)
    cos, sin, x = cos_TP.to(wide)[:, None], sin_TP.to(wide)[:, None], x_TNR.to(wide)
    a, b = (x[..., 0::2], x[..., 1::2]) if neighbours else x.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return (torch.stack([a, b], dim=-1).flatten(-2) if neighbours else torch.cat([a, b], dim=-1)).to(x_TNR.dtype)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _turn(cos, sin, R: tl.constexpr, R_BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Partner, cosine, and sine with its sign, for every rotated column."""
    column = tl.arange(0, R_BLOCK)
    if NEIGHBOURS:
        pair = column // 2
        second = column % 2
        partner = column + 1 - 2 * second
    else:
        pair = column % (R // 2)
        second = column // (R // 2)
        partner = (column + R // 2) % R
    c = tl.load(cos + pair, mask=column < R, other=0.0)
    s = tl.load(sin + pair, mask=column < R, other=0.0)
    return partner, c[None, :], (s * (2 * second - 1))[None, :]


@jit
def _copy(source, target, inside, FIRST: tl.constexpr, COUNT: tl.constexpr, END: tl.constexpr, BLOCK: tl.constexpr):
    """Columns FIRST : FIRST + COUNT of some rows, and zeros up to END."""
    column = FIRST + tl.arange(0, BLOCK)[None, :]
    values = tl.load(source[:, None] + column, mask=inside[:, None] & (column < FIRST + COUNT), other=0.0)
    tl.store(target[:, None] + column, values.to(target.dtype.element_ty), mask=inside[:, None] & (column < END))


@jit
def _forward_kernel(
    q, q_row, kv, kv_row, kr, kr_row, cos, cos_row, sin, sin_row, q_out, k_out, v_out, N: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, V: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, C_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr,
    H_BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """One program: some heads of one token."""
    TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    token = (tl.program_id(0) // TILES).to(tl.int64)
    head = (tl.program_id(0) % TILES) * ROWS + tl.arange(0, ROWS)
    inside = head < N
    q += token * q_row + head * (C + R)
    kv += token * kv_row + head * (C + V)
    kr += token * kr_row
    out = token * N * H + head * H
    _copy(q, q_out + out, inside, 0, C, C, C_BLOCK)
    _copy(kv, k_out + out, inside, 0, C, C, C_BLOCK)
    _copy(kv + C, v_out + out, inside, 0, V, H, H_BLOCK)
    partner, c, s = _turn(cos + token * cos_row, sin + token * sin_row, R, R_BLOCK, NEIGHBOURS)
    column = tl.arange(0, R_BLOCK)
    turning = inside[:, None] & (column < R)[None, :]
    own = tl.load((q + C)[:, None] + column[None, :], mask=turning, other=0.0).to(tl.float32)
    other = tl.load((q + C)[:, None] + partner[None, :], mask=turning, other=0.0).to(tl.float32)
    place = out[:, None] + C + column[None, :]
    tl.store(q_out + place, (own * c + other * s).to(q_out.dtype.element_ty), mask=turning)
    own = tl.load(kr + column, mask=column < R, other=0.0).to(tl.float32)[None, :]
    other = tl.load(kr + partner, mask=column < R, other=0.0).to(tl.float32)[None, :]
    turned = tl.broadcast_to(own * c + other * s, [ROWS, R_BLOCK])
    tl.store(k_out + place, turned.to(k_out.dtype.element_ty), mask=turning)
    if C + R < H:
        rest = C + R + tl.arange(0, H_BLOCK)
        beyond = inside[:, None] & (rest < H)[None, :]
        nothing = tl.zeros([ROWS, H_BLOCK], q_out.dtype.element_ty)
        tl.store(q_out + out[:, None] + rest[None, :], nothing, mask=beyond)
        tl.store(k_out + out[:, None] + rest[None, :], nothing, mask=beyond)


@jit
def _backward_kernel(
    dq, dq_row, dk, dk_row, dv, dv_row, cos, cos_row, sin, sin_row, dq_out, dq_out_row, dkv_out, dkv_out_row, dkr_out,
    dkr_out_row, N: tl.constexpr, C: tl.constexpr, R: tl.constexpr, V: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr,
    C_BLOCK: tl.constexpr, R_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """One program: all heads of one token, some at a time, whose shared key's gradients are added up."""
    token = tl.program_id(0).to(tl.int64)
    partner, c, s = _turn(cos + token * cos_row, sin + token * sin_row, R, R_BLOCK, NEIGHBOURS)
    s = -s
    column = tl.arange(0, R_BLOCK)
    own_sum = tl.zeros([ROWS, R_BLOCK], tl.float32)
    other_sum = tl.zeros([ROWS, R_BLOCK], tl.float32)
    dq += token * dq_row
    dk += token * dk_row
    dv += token * dv_row
    dq_out += token * dq_out_row
    dkv_out += token * dkv_out_row
    for first in range(0, N, ROWS):
        head = first + tl.arange(0, ROWS)
        inside = head < N
        turning = inside[:, None] & (column < R)[None, :]
        _copy(dq + head * H, dq_out + head * (C + R), inside, 0, C, C, C_BLOCK)
        _copy(dk + head * H, dkv_out + head * (C + V), inside, 0, C, C, C_BLOCK)
        _copy(dv + head * H, dkv_out + head * (C + V) + C, inside, 0, V, V, V_BLOCK)
        own_at = (head * H + C)[:, None] + column[None, :]
        other_at = (head * H + C)[:, None] + partner[None, :]
        own = tl.load(dq + own_at, mask=turning, other=0.0).to(tl.float32)
        other = tl.load(dq + other_at, mask=turning, other=0.0).to(tl.float32)
        place = dq_out + (head * (C + R) + C)[:, None] + column[None, :]
        tl.store(place, (own * c + other * s).to(dq_out.dtype.element_ty), mask=turning)
        own_sum += tl.load(dk + own_at, mask=turning, other=0.0).to(tl.float32)
        other_sum += tl.load(dk + other_at, mask=turning, other=0.0).to(tl.float32)
    turned = tl.sum(own_sum * c + other_sum * s, axis=0)
    tl.store(dkr_out + token * dkr_out_row + column, turned.to(dkr_out.dtype.element_ty), mask=column < R)


def _blocks(sizes: LatentHeads) -> tuple[dict[str, int], int]:
    """The sizes as kernels take them, and their warps."""
    N, C, R, V, neighbours = sizes
    up = triton.next_power_of_2
    rows = max(1, min(up(N), VALUES // up(sizes.width)))
    blocks = {"N": N, "C": C, "R": R, "V": V, "H": sizes.width, "ROWS": rows, "C_BLOCK": up(C), "R_BLOCK": up(R)}
    return blocks | {"NEIGHBOURS": neighbours}, max(1, min(4, rows * up(sizes.width) // 512))


# ---- forward and backward --------------------------------------------------------------------------------------------------


def latent_heads_forward(
    q_TX: Tensor, kv_TY: Tensor, kr_TR: Tensor, cos_TP: Tensor, sin_TP: Tensor, sizes: LatentHeads
) -> Parts:
    """q, k, v, [T, N, H] each, in memory of their own."""
    if 2 * cos_TP.shape[-1] != sizes.rotary:
        raise ValueError(f"cos and sin rotate {2 * cos_TP.shape[-1]} columns, not {sizes.rotary}")
    if not use_triton(q_TX):
        return latent_heads_reference(
            q_TX, kv_TY, kr_TR, cos_TP, sin_TP, sizes
        )  # `pad` copies even where there is nothing to add
    T = len(q_TX)
    q, k, v = (torch.empty(T, sizes.heads, sizes.width, dtype=q_TX.dtype, device=q_TX.device) for _ in range(3))
    blocks, warps = _blocks(sizes)
    _forward_kernel[(T * triton.cdiv(sizes.heads, blocks["ROWS"]),)](
        q_TX, q_TX.stride(0), kv_TY, kv_TY.stride(0), kr_TR, kr_TR.stride(0), cos_TP, cos_TP.stride(0), sin_TP,
        sin_TP.stride(0), q, k, v, **blocks, H_BLOCK=triton.next_power_of_2(sizes.width), num_warps=warps,
    )  # fmt: skip
    return q, k, v


def latent_heads_backward(
    dq_TNH: Tensor, dk_TNH: Tensor, dv_TNH: Tensor, cos_TP: Tensor, sin_TP: Tensor, sizes: LatentHeads,
    out: Parts | None = None,
) -> Parts:  # fmt: skip
    """The gradients of the rows of q, kv and kr, in `out` where it is given, which must not be dq, dk or dv."""
    T, (N, C, R, V, neighbours) = len(dq_TNH), sizes
    if out is None:
        dq, dkv, dkr = (torch.empty(T, width, dtype=dq_TNH.dtype, device=dq_TNH.device) for width in sizes.columns)
    else:
        dq, dkv, dkr = out
    if use_triton(dq_TNH):
        blocks, warps = _blocks(sizes)
        _backward_kernel[(T,)](
            dq_TNH, dq_TNH.stride(0), dk_TNH, dk_TNH.stride(0), dv_TNH, dv_TNH.stride(0), cos_TP, cos_TP.stride(0), sin_TP,
            sin_TP.stride(0), dq, dq.stride(0), dkv, dkv.stride(0), dkr, dkr.stride(0), **blocks,
            V_BLOCK=triton.next_power_of_2(V), num_warps=warps,
        )  # fmt: skip
        return dq, dkv, dkr
    wide = torch.promote_types(dq_TNH.dtype, torch.float32)
    dqr, dkr_sum = dq_TNH[..., C : C + R], dk_TNH[..., C : C + R].to(wide).sum(1, keepdim=True)
    dq.unflatten(1, (N, C + R)).copy_(torch.cat([dq_TNH[..., :C], _rotated(dqr, cos_TP, -sin_TP, neighbours)], dim=-1))
    dkv.unflatten(1, (N, C + V)).copy_(torch.cat([dk_TNH[..., :C], dv_TNH[..., :V]], dim=-1))
    dkr.copy_(_rotated(dkr_sum, cos_TP, -sin_TP, neighbours)[:, 0])
    return dq, dkv, dkr


class _LatentHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, q_TX: Tensor, kv_TY: Tensor, kr_TR: Tensor, cos_TP: Tensor, sin_TP: Tensor, sizes: LatentHeads
    ) -> Parts:
        ctx.save_for_backward(cos_TP, sin_TP)
        ctx.sizes = sizes
        return latent_heads_forward(q_TX, kv_TY, kr_TR, cos_TP, sin_TP, sizes)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cos_TP, sin_TP), (dq, dk, dv) = ctx.saved_tensors, (grad.contiguous() for grad in grads)
        return (*latent_heads_backward(dq, dk, dv, cos_TP, sin_TP, ctx.sizes), None, None, None)


def latent_heads(q_TX: Tensor, kv_TY: Tensor, kr_TR: Tensor, cos_TP: Tensor, sin_TP: Tensor, sizes: LatentHeads) -> Parts:
    """Differentiable q, k, v, [T, N, H] each, of the projections' rows."""
    parts: Parts = _LatentHeads.apply(q_TX, kv_TY, kr_TR, cos_TP, sin_TP, sizes)  # type: ignore[no-untyped-call]
    return parts
