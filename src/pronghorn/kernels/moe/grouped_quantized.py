"""Grouped GEMMs with frozen experts in 4 or 8 bits: each program dequantizes the tile of weights that it multiplies.

As grouped_gemm.py: S rows sorted by expert, E experts, weights [E, O, D], D a multiple of 64, `offsets_E1` on the device. The
stack is stored (kernels/quant/stored.py) as

    nf4      one weight of shape (E * O, D): as bitsandbytes stores a stack, experts one under the other
    nvfp4    the same, with one scale for the whole stack beside those of its blocks
    mxfp4    (E, O, D): a gpt-oss checkpoint as it is
    fp8      (E, O, D), a scale for each row

    forward     y_s  = W_e x_s  + sB_e xa_s          backward     dx_s = W_e^T dy_s + A_e^T dyb_s

with the adapters' part (grouped_lora.py: x_ext = [x | xa], dy_ext = [dy | dyb]) in the same sum. W is rounded to the rows'
dtype before it is multiplied, as a dequantized stack would be: 16-bit results agree with it up to the order of sums. No more
than a tile of W is ever there in 16 bits. The tile is W's, so it is the left operand, which tensor cores take from registers:
programs make the transpose of y, O or D by S. A tile has many rows of x: each dequantizes its weights once more.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.moe.grouped_gemm import (
    Tile,
    expert_tile,
    grouped_linear_backward_input,
    grouped_linear_forward,
    precision_of,
)
from pronghorn.kernels.moe.grouped_lora import RANK_MULTIPLE, AdaptedBesideExperts, ExpertAdapter
from pronghorn.kernels.quant.mxfp4 import mxfp4_level, mxfp4_power
from pronghorn.kernels.quant.nf4_levels import nf4_shuffled_levels
from pronghorn.kernels.quant.nvfp4 import nvfp4_level, nvfp4_scale
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.add_dot import EXACT_INNER, add_dot
from pronghorn.kernels.runtime.dispatch import KERNELS_ARE_INTERPRETED, Chip, chip_of, jit, tl, triton, use_triton
from pronghorn.kernels.runtime.work import count

DEPTH = 64  # columns of W in a tile: a block of NF4, two of MXFP4, four of NVFP4
MOST_PARTS = 6  # tensors of a stored stack that the kernels take


class QuantizedStack(NamedTuple):
    """A stack of experts in few bits, as [E, O, D]."""

    stored: StoredTensor
    shape: tuple[int, int, int]

    @staticmethod
    def of(stored: StoredTensor, experts: int) -> QuantizedStack:
        *rows, D = stored.shape
        return QuantizedStack(stored, (experts, prod(rows) // experts, D))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The whole stack, [E, O, D]: for the CPU, and for tests."""
        return self.stored.dequantize(dtype=dtype).view(self.shape)


# For `python -m benchmarks.ops --sweep grouped_quantized`. Columns are outputs; backward sums `inner` at a time, forward DEPTH.
CONFIGS = [Tile(128, 128, 64, 8, 3), Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(128, 256, 64, 8, 3),
           Tile(64, 128, 64, 4, 4), Tile(128, 64, 64, 4, 4)]  # fmt: skip


def _tile(S: int, E: int, dtype: torch.dtype, chip: Chip) -> Tile:
    if dtype == torch.float32:
        return Tile(32, 64, EXACT_INNER, 4, 1)
    if not chip.large:
        return Tile(128 if S > 64 * E else 64, 64, 64, 8, 2)  # with four warps some spill
    return CONFIGS[0] if S > 64 * E else CONFIGS[4]


@jit
def _weights(
    values, scales, nested_absmax, nested_code, offset, code, row, first, D, ROWS: tl.constexpr, FORMAT: tl.constexpr,
    NESTED: tl.constexpr, SHUFFLE: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS] (int64, of all experts together) and columns first to first + 64 of W, fp32; FP8 without its scale."""
    if FORMAT == "nf4":
        block = row * (D // 64) + first // 64
        scale = tl.load(scales + block)
        if NESTED:
            scale = tl.load(nested_code + scale.to(tl.int32)) * tl.load(nested_absmax + block // 256) + tl.load(offset)
        if SHUFFLE:
            place = block[:, None] * 8 + tl.arange(0, 8)[None, :]
            levels = nf4_shuffled_levels(code, tl.load(values.to(tl.pointer_type(tl.int32)) + place))
        else:
            pair = tl.load(values + block[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.int32)
            levels = tl.reshape(tl.join(tl.load(code + (pair >> 4)), tl.load(code + (pair & 15))), (ROWS, 64))
        result = levels * scale[:, None]
    elif FORMAT == "mxfp4":
        block = row * (D // 32) + first // 32
        pair = tl.load(values + block[:, None] * 16 + tl.arange(0, 32)[None, :]).to(tl.int32)
        power = mxfp4_power(tl.load(scales + block[:, None] + tl.arange(0, 2)[None, :]))
        levels = tl.reshape(tl.join(mxfp4_level(pair & 15), mxfp4_level(pair >> 4)), (ROWS, 2, 32))
        result = tl.reshape(levels * power[:, :, None], (ROWS, 64))
    elif FORMAT == "nvfp4":
        block = row * (D // 16) + first // 16
        pair = tl.load(values + block[:, None] * 8 + tl.arange(0, 32)[None, :]).to(tl.int32)
        scale = nvfp4_scale(tl.load(scales + block[:, None] + tl.arange(0, 4)[None, :]))
        levels = tl.reshape(tl.join(nvfp4_level(pair & 15), nvfp4_level(pair >> 4)), (ROWS, 4, 16))
        result = tl.reshape(levels * scale[:, :, None] * tl.load(nested_absmax), (ROWS, 64))
    else:
        result = tl.load(values + row[:, None] * D + first + tl.arange(0, 64)[None, :]).to(tl.float32)
    return result


@jit
def _forward_kernel(
    x, x_row, values, scales, nested_absmax, nested_code, offset, code, sB, sB_e, sB_o, y, y_row, offsets, D, OUTPUTS,
    R: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FORMAT: tl.constexpr,
    NESTED: tl.constexpr, SHUFFLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, first, end, column_tile = expert_tile(offsets, tl.program_id(0), tl.cdiv(OUTPUTS, COLUMNS), E, E_BLOCK, ROWS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    output = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    weight_row = expert.to(tl.int64) * OUTPUTS + output % OUTPUTS
    x += tl.minimum(row, end - 1).to(tl.int64)[:, None] * x_row
    inner = tl.arange(0, 64)
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for d in range(0, D, 64):
        a = tl.load(x + (d + inner)[None, :])
        w = _weights(values, scales, nested_absmax, nested_code, offset, code, weight_row, d, D, COLUMNS, FORMAT, NESTED,
                     SHUFFLE)  # fmt: skip
        sums = add_dot(sums, w.to(a.dtype), tl.trans(a), PRECISION)
    if FORMAT == "fp8":
        sums *= tl.load(scales + weight_row)[:, None]
    if R > 0:
        rank = tl.arange(0, R)
        xa = tl.load(x + (D + rank)[None, :])
        thin = tl.load(sB + expert.to(tl.int64) * sB_e + (output % OUTPUTS).to(tl.int64)[:, None] * sB_o + rank[None, :])
        sums = add_dot(sums, thin, tl.trans(xa), PRECISION)
    target = y + row.to(tl.int64)[None, :] * y_row + output[:, None]
    tl.store(target, sums.to(y.dtype.element_ty), mask=(row < end)[None, :] & (output < OUTPUTS)[:, None])


@jit
def _backward_kernel(
    dy, dy_row, values, scales, nested_absmax, nested_code, offset, code, A, A_e, A_r, dx, dx_row, offsets, D, OUTPUTS,
    R: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr, BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr, NESTED: tl.constexpr, SHUFFLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCKS times 64 columns of dx; INNER rows of W at a time."""
    COLUMNS: tl.constexpr = BLOCKS * 64
    expert, first, end, column_tile = expert_tile(offsets, tl.program_id(0), tl.cdiv(D, COLUMNS), E, E_BLOCK, ROWS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    dy += tl.minimum(row, end - 1).to(tl.int64)[:, None] * dy_row
    inner, block = tl.arange(0, INNER), tl.arange(0, BLOCKS)
    blocks = D // 64
    block = tl.minimum(column_tile * BLOCKS + block, blocks - 1)  # columns beyond D are made of the last, and not written
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for o in range(0, OUTPUTS, INNER):
        there = o + inner < OUTPUTS
        a = tl.load(dy + (o + inner)[None, :], mask=there[None, :], other=0.0)
        weight_row = expert.to(tl.int64) * OUTPUTS + tl.minimum(o + inner, OUTPUTS - 1)
        # Rows of W and blocks of 64 in them as one list of "rows" of 64.
        piece = tl.reshape(weight_row[:, None] * blocks + block[None, :], (INNER * BLOCKS,))
        w = _weights(values, scales, nested_absmax, nested_code, offset, code, piece, 0, 64, INNER * BLOCKS, FORMAT, NESTED,
                     SHUFFLE)  # fmt: skip
        w = tl.reshape(w, (INNER, COLUMNS))
        if FORMAT == "fp8":
            w *= tl.load(scales + weight_row)[:, None]
        sums = add_dot(sums, tl.trans(w.to(a.dtype)), tl.trans(a), PRECISION)
    if R > 0:
        rank = tl.arange(0, R)
        dyb = tl.load(dy + (OUTPUTS + rank)[None, :])
        thin = tl.load(A + expert.to(tl.int64) * A_e + rank.to(tl.int64)[None, :] * A_r + tl.minimum(column, D - 1)[:, None])
        sums = add_dot(sums, thin, tl.trans(dyb), PRECISION)
    target = dx + row.to(tl.int64)[None, :] * dx_row + column[:, None]
    tl.store(target, sums.to(dx.dtype.element_ty), mask=(row < end)[None, :] & (column < D)[:, None])


# ---- raw functions ---------------------------------------------------------------------------------------------------------


def _stored(stack: QuantizedStack) -> tuple[Tensor, ...]:
    """values, scales, nested_absmax (of NVFP4: the tensor's scale), nested_code, offset, code: the scales stand for what the
    format does not have."""
    parts = stack.stored.kernel_parts
    return parts + parts[1:2] * (MOST_PARTS - len(parts))


def _options(stack: QuantizedStack, dtype: torch.dtype) -> dict[str, object]:
    return {
        "E": stack.shape[0], "E_BLOCK": triton.next_power_of_2(stack.shape[0]), "FORMAT": stack.stored.name,
        "NESTED": stack.stored.nested, "SHUFFLE": not KERNELS_ARE_INTERPRETED,
        "PRECISION": precision_of(dtype), "enable_fp_fusion": False,
    }  # fmt: skip


def grouped_quantized_forward(
    x_ext: Tensor, stack: QuantizedStack, offsets_E1: Tensor, sB_EOR: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """y_SO. x_ext is [S, D], or [S, D + R] where there is an adapter; sB's last dimension is contiguous."""
    (E, outputs, D), S = stack.shape, len(x_ext)
    y_SO = torch.empty(S, outputs, dtype=x_ext.dtype, device=x_ext.device) if out is None else out
    if not use_triton(x_ext):
        y = grouped_linear_forward(x_ext[:, :D], stack.dequantized(x_ext.dtype), offsets_E1)
        return y_SO.copy_(y if sB_EOR is None else y + grouped_linear_forward(x_ext[:, D:], sB_EOR, offsets_E1))
    assert D % DEPTH == 0 or y_SO.is_meta, f"a row of {D} values is not a multiple of {DEPTH}"
    count("stored", 2.0 * S * D * outputs)
    tile = _tile(S, E, x_ext.dtype, chip_of(x_ext.device))
    thin = x_ext if sB_EOR is None else sB_EOR
    _forward_kernel[((triton.cdiv(S, tile.rows) + E) * triton.cdiv(outputs, tile.columns),)](
        x_ext, x_ext.stride(0), *_stored(stack), thin, thin.stride(0), thin.stride(1), y_SO, y_SO.stride(0), offsets_E1, D,
        outputs, R=0 if sB_EOR is None else sB_EOR.shape[2], ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps,
        num_stages=tile.stages, **_options(stack, x_ext.dtype),
    )  # fmt: skip
    return y_SO


def grouped_quantized_backward(
    dy_ext: Tensor, stack: QuantizedStack, offsets_E1: Tensor, A_ERD: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """dx_SD. dy_ext is [S, O], or [S, O + R] where there is an adapter; A's last dimension is contiguous."""
    (E, outputs, D), S = stack.shape, len(dy_ext)
    dx_SD = torch.empty(S, D, dtype=dy_ext.dtype, device=dy_ext.device) if out is None else out
    if not use_triton(dy_ext):
        weight_EOD = stack.dequantized(dy_ext.dtype)
        dx = grouped_linear_backward_input(dy_ext[:, :outputs].contiguous(), weight_EOD, offsets_E1)
        return dx_SD.copy_(dx if A_ERD is None else dx + grouped_linear_backward_input(dy_ext[:, outputs:], A_ERD, offsets_E1))
    assert D % DEPTH == 0 or dx_SD.is_meta, f"a row of {D} values is not a multiple of {DEPTH}"
    count("stored", 2.0 * S * D * outputs)
    tile = _tile(S, E, dy_ext.dtype, chip_of(dy_ext.device))
    thin = dy_ext if A_ERD is None else A_ERD
    _backward_kernel[((triton.cdiv(S, tile.rows) + E) * triton.cdiv(D, tile.columns),)](
        dy_ext, dy_ext.stride(0), *_stored(stack), thin, thin.stride(0), thin.stride(1), dx_SD, dx_SD.stride(0), offsets_E1, D,
        outputs, R=0 if A_ERD is None else A_ERD.shape[1], ROWS=tile.rows, INNER=tile.inner, BLOCKS=tile.columns // DEPTH,
        num_warps=tile.warps, num_stages=tile.stages, **_options(stack, dy_ext.dtype),
    )  # fmt: skip
    return dx_SD


class QuantizedExpertGroup(AdaptedBesideExperts):
    """`grouped_lora.ExpertGroup` with frozen experts in 4 or 8 bits: the same calls."""

    def __init__(
        self, stack: QuantizedStack, adapter: ExpertAdapter | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.stack = stack
        self.E, self.outputs, self.D = stack.shape
        self.R = 0 if adapter is None else triton_rank(adapter.rank)
        self.adapt(adapter, dtype, stack.stored.device)

    def forward(self, x_ext: Tensor, offsets_E1: Tensor) -> Tensor:
        return grouped_quantized_forward(x_ext, self.stack, offsets_E1, self.sB_EOR if self.R else None)

    def backward_input(self, dy_ext: Tensor, offsets_E1: Tensor) -> Tensor:
        return grouped_quantized_backward(dy_ext, self.stack, offsets_E1, self.A_ERD if self.R else None)


def triton_rank(rank: int) -> int:
    """R of these kernels: a tile's inner dimension, so a power of two."""
    return max(RANK_MULTIPLE, 1 << (rank - 1).bit_length())
