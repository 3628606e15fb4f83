"""RMSNorm of each head by itself, without a weight: the values of Gemma 4.

    y = x * rstd                              rstd = 1 / sqrt(mean(x^2) + eps), of each token and head
    dx = (dy - y * mean(dy * y)) * rstd       plus what is there already, where `add`: values that are keys, too

T = packed tokens, K = heads, H = head width. Heads are contiguous, rows may be strided. Computed in fp32, rounded once. Bound
by memory: each tensor is read or written once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

VALUES = 2048  # of a program, 16 a thread, as in attention/rope.py; not timed


def head_norm_reference(x_TKH: Tensor, eps: float) -> Tensor:
    wide = _wide(x_TKH)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x_TKH.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _tile(heads: int, width: int) -> dict[str, int]:
    """Heads that a program takes of one token, the columns that it reads of each, and its warps."""
    block = int(triton.next_power_of_2(width))
    rows = max(1, min(int(triton.next_power_of_2(heads)), VALUES // block))
    return {"ROWS": rows, "BLOCK": block, "num_warps": max(1, min(4, rows * block // 512))}


@jit
def _place(K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(token, heads, their columns in a row, which of them there are) of this program."""
    TILES: tl.constexpr = (K + ROWS - 1) // ROWS
    head = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (head < K)[:, None] & (column < H)[None, :]
    return (tl.program_id(0) // TILES).to(tl.int64), head, (head * H)[:, None] + column[None, :], inside


@jit
def _forward_kernel(x, x_row, y, y_row, rstd, eps, K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    token, head, at, inside = _place(K, H, ROWS, BLOCK)
    value = tl.load(x + token * x_row + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / H + eps)
    tl.store(rstd + token * K + head, inverse, mask=head < K)
    tl.store(y + token * y_row + at, (value * inverse[:, None]).to(y.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    dy, dy_row, x, x_row, rstd, dx, dx_row, K: tl.constexpr, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    token, head, at, inside = _place(K, H, ROWS, BLOCK)
    inverse = tl.load(rstd + token * K + head, mask=head < K, other=0.0)[:, None]
    grad = tl.load(dy + token * dy_row + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(x + token * x_row + at, mask=inside, other=0.0).to(tl.float32) * inverse
    found = (grad - y * (tl.sum(grad * y, 1) / H)[:, None]) * inverse
    if ADD:
        found += tl.load(dx + token * dx_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx + token * dx_row + at, found.to(dx.dtype.element_ty), mask=inside)


def head_norm_forward(x_TKH: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y_TKH, rstd_TK in fp32)"""
    T, K, H = x_TKH.shape
    if not use_triton(x_TKH):
        wide = _wide(x_TKH)
        rstd = torch.rsqrt(wide.square().mean(-1) + eps)
        return (wide * rstd[..., None]).to(x_TKH.dtype), rstd
    y_TKH = torch.empty(x_TKH.shape, dtype=x_TKH.dtype, device=x_TKH.device)
    rstd_TK, tile = torch.empty(T, K, dtype=torch.float32, device=x_TKH.device), _tile(K, H)
    _forward_kernel[(T * triton.cdiv(K, tile["ROWS"]),)](
        x_TKH, x_TKH.stride(0), y_TKH, y_TKH.stride(0), rstd_TK, eps, K=K, H=H, **tile
    )
    return y_TKH, rstd_TK


def head_norm_backward(dy_TKH: Tensor, x_TKH: Tensor, rstd_TK: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """Writes `out`, which may be dy, or adds to it."""
    T, K, H = x_TKH.shape
    if not use_triton(dy_TKH):
        dy, inverse = _wide(dy_TKH), rstd_TK[..., None]
        y = _wide(x_TKH) * inverse
        dx = (dy - y * (dy * y).mean(-1, keepdim=True)) * inverse
        return out.copy_(dx + _wide(out) if add else dx)
    tile = _tile(K, H)
    _backward_kernel[(T * triton.cdiv(K, tile["ROWS"]),)](
        dy_TKH, dy_TKH.stride(0), x_TKH, x_TKH.stride(0), rstd_TK, out, out.stride(0), K=K, H=H, ADD=add, **tile
    )
    return out


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x_TKH: Tensor, eps: float) -> Tensor:
        y_TKH, rstd_TK = head_norm_forward(x_TKH, eps)
        ctx.save_for_backward(x_TKH, rstd_TK)
        return y_TKH

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x_TKH, rstd_TK = ctx.saved_tensors
        return head_norm_backward(incoming[0].contiguous(), x_TKH, rstd_TK, torch.empty_like(incoming[0])), None


def head_norm(x_TKH: Tensor, eps: float) -> Tensor:
    """Differentiable."""
    y_TKH: Tensor = _HeadNorm.apply(x_TKH, eps)  # type: ignore[no-untyped-call]
    return y_TKH
