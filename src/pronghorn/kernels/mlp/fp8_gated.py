"""The gated activation of an MLP (gated_mlp.py), with its output and its gradient also in FP8.

    forward     a = act(gate) * up           rounded to gu's dtype; a8, scale = fp8_cast_rows(a, bound=...)
    backward    dgu, and a recomputed        as gated_activation_backward; dgu8, scale = fp8_cast_rows(dgu, column_scale, ...)

Gate and up stand side by side in a row: gu = [gate | up]. T = packed tokens, F = MLP width, G = 2F. Rows may be strided.
One row a program: it writes 16-bit values, finds the largest, and rereads them from the cache for the cast. The 16-bit rows
stay for the adapters' GEMMs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.mlp.gated_mlp import (
    Kind,
    _activation,
    backward_outputs,
    gated_activation_backward,
    gated_activation_forward,
    gated_activation_reference,
)
from pronghorn.kernels.quant.fp8_cast import E4M3, _give_part, _row_scale, _wide_part, fp8_cast_rows_reference
from pronghorn.kernels.runtime.dispatch import jit, tl, use_triton


def gated_activation_fp8_reference(gu_TG: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """(a, a8, scale)"""
    a_TF = gated_activation_reference(gu_TG, kind)
    return a_TF, *fp8_cast_rows_reference(a_TF)


class Tile(NamedTuple):
    """Columns of one step through a row, and warps."""

    columns: int
    warps: int


# For `python -m benchmarks.ops --sweep fp8`.
CONFIGS = [Tile(1024, 4), Tile(2048, 4), Tile(2048, 8), Tile(4096, 8), Tile(4096, 16)]


def _forward_tile() -> Tile:
    """8 values a thread of gate and of up: few enough registers for several rows in flight per multiprocessor."""
    return Tile(2048, 8)


def _backward_tile() -> Tile:
    return Tile(2048, 8)


@jit
def _forward_kernel(
    gu, gu_row, a, a_row, a8, a8_row, bound, scale, F: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest, squares = tl.zeros([1, BLOCK], tl.float32), tl.zeros([1, BLOCK], tl.float32)
    for first in range(0, F, BLOCK):
        gate = _wide_part(gu + row * gu_row, scale, first, F, BLOCK, False)
        up = _wide_part(gu + row * gu_row + F, scale, first, F, BLOCK, False)
        activated, _ = _activation(gate, GELU)
        stored = (activated * up).to(a.dtype.element_ty)
        _give_part(a + row * a_row, stored, first, F, BLOCK)
        value = stored.to(tl.float32)
        largest, squares = tl.maximum(largest, tl.abs(value)), squares + value * value
    row_scale, inverse = _row_scale(tl.max(largest, 1), tl.sum(squares, 1), bound, HAS_BOUND)
    tl.store(scale + row + tl.arange(0, 1), row_scale)
    tl.debug_barrier()  # another thread of the program may have written what is read below
    for first in range(0, F, BLOCK):
        value = _wide_part(a + row * a_row, scale, first, F, BLOCK, False)
        _give_part(a8 + row * a8_row, value * inverse[:, None], first, F, BLOCK)


@jit
def _backward_kernel(
    da, da_row, gu, gu_row, dgu, dgu_row, a, a_row, dgu8, dgu8_row, column_scale, bound, scale, F: tl.constexpr,
    BLOCK: tl.constexpr, GELU: tl.constexpr, NEED_A: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Each part of a row is read before it is written, so dgu may overwrite gu, and a may overwrite da."""
    row = tl.program_id(0).to(tl.int64)
    largest, squares = tl.zeros([1, BLOCK], tl.float32), tl.zeros([1, BLOCK], tl.float32)
    for first in range(0, F, BLOCK):
        grad = _wide_part(da + row * da_row, scale, first, F, BLOCK, False)
        gate = _wide_part(gu + row * gu_row, scale, first, F, BLOCK, False)
        up = _wide_part(gu + row * gu_row + F, scale, first, F, BLOCK, False)
        activated, derivative = _activation(gate, GELU)
        dgate = (grad * up * derivative).to(dgu.dtype.element_ty)
        dup = (grad * activated).to(dgu.dtype.element_ty)
        _give_part(dgu + row * dgu_row, dgate, first, F, BLOCK)
        _give_part(dgu + row * dgu_row + F, dup, first, F, BLOCK)
        if NEED_A:
            _give_part(a + row * a_row, activated * up, first, F, BLOCK)
        column = first + tl.arange(0, BLOCK)[None, :]
        value = dgate.to(tl.float32) * tl.load(column_scale + column, mask=column < F, other=0.0)
        value_2 = dup.to(tl.float32) * tl.load(column_scale + F + column, mask=column < F, other=0.0)
        largest = tl.maximum(largest, tl.maximum(tl.abs(value), tl.abs(value_2)))
        squares += value * value + value_2 * value_2
    row_scale, inverse = _row_scale(tl.max(largest, 1), tl.sum(squares, 1), bound, HAS_BOUND)
    tl.store(scale + row + tl.arange(0, 1), row_scale)
    tl.debug_barrier()
    for first in range(0, 2 * F, BLOCK):
        value = _wide_part(dgu + row * dgu_row, column_scale, first, 2 * F, BLOCK, True)
        _give_part(dgu8 + row * dgu8_row, value * inverse[:, None], first, 2 * F, BLOCK)


def gated_activation_fp8_forward(
    gu_TG: Tensor, kind: Kind, *, bound: Tensor | None = None, out: Tensor | None = None, out8: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(a_TF, a8_TF, scale_T)"""
    T, F = gu_TG.shape[0], gu_TG.shape[1] // 2
    a_TF = torch.empty(T, F, dtype=gu_TG.dtype, device=gu_TG.device) if out is None else out
    a8_TF = torch.empty(T, F, dtype=E4M3, device=gu_TG.device) if out8 is None else out8
    if not use_triton(gu_TG):
        values_TF, scale_T = fp8_cast_rows_reference(gated_activation_forward(gu_TG, kind, out=a_TF), bound=bound)
        a8_TF.copy_(values_TF)
        return a_TF, a8_TF, scale_T
    scale_T = torch.empty(T, dtype=torch.float32, device=gu_TG.device)
    tile = _forward_tile()
    _forward_kernel[(T,)](
        gu_TG, gu_TG.stride(0), a_TF, a_TF.stride(0), a8_TF, a8_TF.stride(0), scale_T if bound is None else bound, scale_T, F=F,
        BLOCK=tile.columns, GELU=kind == "gelu_tanh", HAS_BOUND=bound is not None, num_warps=tile.warps,
    )  # fmt: skip
    return a_TF, a8_TF, scale_T


def gated_activation_fp8_backward(
    da_TF: Tensor, gu_TG: Tensor, kind: Kind, column_scale_G: Tensor, *, bound: Tensor | None = None,
    need_activation: bool = True, out: Tensor | None = None, out8: Tensor | None = None, activation_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dgu_TG, dgu8_TG, scale_T, a_TF or None). `out` may be gu itself, `activation_out` may be da itself."""
    T, F = da_TF.shape
    dgu8_TG = torch.empty(T, 2 * F, dtype=E4M3, device=gu_TG.device) if out8 is None else out8
    if not use_triton(gu_TG):
        dgu_TG, a_TF = gated_activation_backward(
            da_TF, gu_TG, kind, need_activation=need_activation, out=out, activation_out=activation_out
        )
        values_TG, scale_T = fp8_cast_rows_reference(dgu_TG, column_scale_G, bound)
        return dgu_TG, dgu8_TG.copy_(values_TG), scale_T, a_TF
    dgu_TG, a_TF = backward_outputs(gu_TG, need_activation, out, activation_out)
    scale_T = torch.empty(T, dtype=torch.float32, device=gu_TG.device)
    tile, a = _backward_tile(), da_TF if a_TF is None else a_TF
    _backward_kernel[(T,)](
        da_TF, da_TF.stride(0), gu_TG, gu_TG.stride(0), dgu_TG, dgu_TG.stride(0), a, a.stride(0), dgu8_TG, dgu8_TG.stride(0),
        column_scale_G, scale_T if bound is None else bound, scale_T, F=F, BLOCK=tile.columns, GELU=kind == "gelu_tanh",
        NEED_A=need_activation, HAS_BOUND=bound is not None, num_warps=tile.warps,
    )  # fmt: skip
    return dgu_TG, dgu8_TG, scale_T, a_TF
