"""RMSNorm with two outputs: in the activations' dtype, for the adapters, and in FP8, for the frozen GEMM.

    h = multiplier * x + residual            stored in x's dtype, where there is a residual; else h is x
    y = h * rstd * w                         rms_norm.py's norm, rounded to x's dtype
    y8, scale = cast of y                    fp8_cast.py's: exactly `fp8_cast_rows(y, bound=bound)`

An FP8 GEMM cannot add the residual, as a bf16 one can, so it is added here.
T = packed tokens, D = model width. Rows may be strided. Bound by memory: at most two tensors read, three and a half written.
Backward is rms_norm_backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.norm.rms_norm import Tile, _blocks, _give, _normed, _scale_of, _take, _take_weight, rms_norm_reference
from pronghorn.kernels.norm.rms_norm import _tile as _norm_tile
from pronghorn.kernels.quant.fp8_cast import E4M3, _largest, _row_scale, fp8_cast_rows_reference
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton


class NormedRows(NamedTuple):
    y8_TD: Tensor
    scale_T: Tensor
    y_TD: Tensor
    h_TD: Tensor
    rstd_T: Tensor


def rms_norm_fp8_reference(
    x_TD: Tensor, weight_D: Tensor, eps: float, *, one_plus: bool = False, residual_TD: Tensor | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y8, scale, y)"""
    h_TD = x_TD if residual_TD is None else residual_TD + multiplier * x_TD
    y_TD = rms_norm_reference(h_TD, weight_D, eps, one_plus=one_plus)[0]
    return *fp8_cast_rows_reference(y_TD), y_TD


CONFIGS = [Tile(1, warps) for warps in (2, 4, 8, 16)]


def _tile(block: int, tail: int) -> Tile:
    return _norm_tile(block, tail)


@jit
def _read(
    x, x_row, residual, residual_row, h, h_row, multiplier, row, T, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    value = _take(x, x_row, row, T, FIRST, WIDTH, D).to(tl.float32)
    if ADD:
        other = _take(residual, residual_row, row, T, FIRST, WIDTH, D).to(tl.float32)
        stored = (value * multiplier + other).to(h.dtype.element_ty)
        _give(h, h_row, stored, row, T, FIRST, WIDTH, D)
        value = stored.to(tl.float32)
    return value


@jit
def _norm_part(
    y, y_row, value, inverse, weight, row, T, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ONE_PLUS: tl.constexpr
):
    """Stores the norm and returns its rounded value, so that the FP8 rows match what the adapters read."""
    result = value * inverse[:, None] * _scale_of(_take_weight(weight, FIRST, WIDTH, D), ONE_PLUS)
    stored = result.to(y.dtype.element_ty)
    _give(y, y_row, stored, row, T, FIRST, WIDTH, D)
    return stored.to(tl.float32)


@jit
def _forward_kernel(
    x, x_row, residual, residual_row, weight, y, y_row, h, h_row, y8, y8_row, rstd, scale, bound, eps, multiplier, T,
    D: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, ONE_PLUS: tl.constexpr, ADD: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value = _read(x, x_row, residual, residual_row, h, h_row, multiplier, row, T, 0, BLOCK, D, ADD)
    squares = tl.sum(value * value, 1)
    if TAIL > 0:
        value_2 = _read(x, x_row, residual, residual_row, h, h_row, multiplier, row, T, BLOCK, TAIL, D, ADD)
        squares += tl.sum(value_2 * value_2, 1)
    inverse = 1.0 / tl.sqrt_rn(squares / D + eps)
    tl.store(rstd + row, inverse, mask=row < T)
    value = _norm_part(y, y_row, value, inverse, weight, row, T, 0, BLOCK, D, ONE_PLUS)
    largest, squares = _largest(value), tl.sum(value * value, 1)
    if TAIL > 0:
        value_2 = _norm_part(y, y_row, value_2, inverse, weight, row, T, BLOCK, TAIL, D, ONE_PLUS)
        largest, squares = tl.maximum(largest, _largest(value_2)), squares + tl.sum(value_2 * value_2, 1)
    row_scale, inverse = _row_scale(largest, squares, bound, HAS_BOUND)
    tl.store(scale + row, row_scale, mask=row < T)
    _give(y8, y8_row, value * inverse[:, None], row, T, 0, BLOCK, D)
    if TAIL > 0:
        _give(y8, y8_row, value_2 * inverse[:, None], row, T, BLOCK, TAIL, D)


def rms_norm_fp8_forward(
    x_TD: Tensor, weight_D: Tensor, eps: float, *, one_plus: bool = False, residual_TD: Tensor | None = None,
    multiplier: float = 1.0, bound: Tensor | None = None, out: Tensor | None = None, out8: Tensor | None = None,
    h_out: Tensor | None = None,
) -> NormedRows:  # fmt: skip
    """`h_out` may be x or the residual, if no longer needed."""
    T, D = x_TD.shape
    y_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    y8_TD = torch.empty(T, D, dtype=E4M3, device=x_TD.device) if out8 is None else out8
    h_TD = x_TD
    if residual_TD is not None:
        h_TD = torch.empty(T, D, dtype=x_TD.dtype, device=x_TD.device) if h_out is None else h_out
    if not use_triton(x_TD):
        if residual_TD is not None:
            h_TD.copy_(x_TD.float() * multiplier + residual_TD.float())
        normed_TD, rstd_T = _normed(h_TD, weight_D, eps, one_plus)
        values_TD, scale_T = fp8_cast_rows_reference(y_TD.copy_(normed_TD), bound=bound)
        y8_TD.copy_(values_TD)
        return NormedRows(y8_TD, scale_T, y_TD, h_TD, rstd_T)
    rstd_T, scale_T = (torch.empty(T, dtype=torch.float32, device=x_TD.device) for _ in range(2))
    residual = x_TD if residual_TD is None else residual_TD
    block, tail = _blocks(D)
    tile = _tile(block, tail)
    _forward_kernel[(triton.cdiv(T, tile.rows),)](
        x_TD, x_TD.stride(0), residual, residual.stride(0), weight_D, y_TD, y_TD.stride(0), h_TD, h_TD.stride(0), y8_TD,
        y8_TD.stride(0), rstd_T, scale_T, scale_T if bound is None else bound, eps, multiplier, T, D=D, BLOCK=block, TAIL=tail,
        ROWS=tile.rows, ONE_PLUS=one_plus, ADD=residual_TD is not None, HAS_BOUND=bound is not None, num_warps=tile.warps,
    )  # fmt: skip
    return NormedRows(y8_TD, scale_T, y_TD, h_TD, rstd_T)
