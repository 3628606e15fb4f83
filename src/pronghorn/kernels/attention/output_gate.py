"""The gate of attention's output (Qwen3.5, Muse Glimmer): y = o * sigmoid(gate), head by head.

T = packed tokens, N = heads, H = head width. Rows may be strided, and heads of the gate too: where it has no projection of its
own, it lies behind each query head in the output of their common one (rope.py). Computed in fp32, rounded once. Bound by
memory: forward reads 2 N H values a token and writes N H, backward reads 3 N H and writes 2 N H.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

BLOCK = 1024  # values of a row that a program takes: 8 a thread


def output_gate_reference(o_TNH: Tensor, gate_TNH: Tensor) -> Tensor:
    wide = torch.promote_types(o_TNH.dtype, torch.float32)
    return (o_TNH.to(wide) * gate_TNH.to(wide).sigmoid()).to(o_TNH.dtype)


@jit
def _forward_kernel(
    o, o_row, gate, gate_row, y, y_row, PITCH: tl.constexpr, H: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < X
    of_gate = column // H * PITCH + column % H
    value = tl.load(o + row * o_row + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(gate + row * gate_row + of_gate, mask=inside, other=0.0).to(tl.float32))
    tl.store(y + row * y_row + column, (value * opened).to(y.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    dy, dy_row, o, o_row, gate, gate_row, do, do_row, dgate, dgate_row, PITCH: tl.constexpr, H: tl.constexpr, X: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program reads all it needs before it writes, so do may overwrite dy."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < X
    of_gate = column // H * PITCH + column % H
    grad = tl.load(dy + row * dy_row + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(o + row * o_row + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.sigmoid(tl.load(gate + row * gate_row + of_gate, mask=inside, other=0.0).to(tl.float32))
    tl.store(do + row * do_row + column, (grad * opened).to(do.dtype.element_ty), mask=inside)
    found = grad * value * opened * (1.0 - opened)
    tl.store(dgate + row * dgate_row + of_gate, found.to(dgate.dtype.element_ty), mask=inside)


def _grid(o_TNH: Tensor) -> tuple[int, int]:
    return o_TNH.shape[0], triton.cdiv(o_TNH.shape[1] * o_TNH.shape[2], BLOCK)


def output_gate_forward(o_TNH: Tensor, gate_TNH: Tensor, *, out: Tensor) -> Tensor:
    """`out` may be o."""
    if not use_triton(o_TNH):
        return out.copy_(output_gate_reference(o_TNH, gate_TNH))
    _, N, H = o_TNH.shape
    _forward_kernel[_grid(o_TNH)](
        o_TNH, o_TNH.stride(0), gate_TNH, gate_TNH.stride(0), out, out.stride(0), PITCH=gate_TNH.stride(1), H=H, X=N * H,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def output_gate_backward(dy_TNH: Tensor, o_TNH: Tensor, gate_TNH: Tensor, *, out: Tensor, gate_out: Tensor) -> Tensor:
    """do, in `out`, which may be dy; the gradient of the gate in `gate_out`, which has the gate's distance between heads."""
    assert gate_out.stride(1) == gate_TNH.stride(1)
    if not use_triton(dy_TNH):
        wide = torch.promote_types(dy_TNH.dtype, torch.float32)
        dy, opened = dy_TNH.to(wide), gate_TNH.to(wide).sigmoid()
        gate_out.copy_(dy * o_TNH * opened * (1 - opened))
        return out.copy_(dy * opened)
    _, N, H = o_TNH.shape
    _backward_kernel[_grid(o_TNH)](
        dy_TNH, dy_TNH.stride(0), o_TNH, o_TNH.stride(0), gate_TNH, gate_TNH.stride(0), out, out.stride(0), gate_out,
        gate_out.stride(0), PITCH=gate_TNH.stride(1), H=H, X=N * H, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out
