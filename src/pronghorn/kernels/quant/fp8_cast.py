"""Rows of activations and gradients, and weights, in FP8 (e4m3), one scale per row.

    v = x * column_scale                     if given: a weight's scales, folded into a gradient
    scale = max(largest |v|, |v|_2 * bound) / 448        1 for a row of zeros
    x8 = round(v / scale)                    to the nearest e4m3 value: 448 at most, 3 mantissa bits

T = packed tokens, D = width of a row, O = rows of a weight. Rows may be strided (last dimension contiguous). `bound`
keeps headroom for LoRA columns that share the row's scale (fp8_lora.py): |v . a| <= |v|_2 |a|_2. Nothing saturates, since
v / scale stays within 448. A row with inf or NaN becomes NaN, which shows downstream; finite inputs never do. Bound by memory:
2 bytes read and 1 written a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.norm.rms_norm import _blocks, _give, _take
from pronghorn.kernels.norm.rms_norm import _tile as _norm_tile
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.dispatch import cuda_capability, jit, on_gpu, tl, triton, use_triton

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 2.0**-100  # lower bound of a row's largest value, so that 448 / largest stays finite


def fp8_supported(device: torch.device | str) -> str | None:
    """Why this device cannot multiply in FP8; None if it can. The CPU emulates it in fp32, for tests."""
    device = torch.device(device)
    if not on_gpu(device):
        return None if device.type == "cpu" else f"FP8 GEMMs need an NVIDIA GPU, this is {device.type}"
    if device.type == "cuda" and torch.version.cuda is None:
        return "FP8 GEMMs need a CUDA build of torch: the e4m3 format of other GPUs differs"
    if (have := cuda_capability(device)) < (8, 9):
        return f"FP8 GEMMs need compute capability 8.9 (Ada, Hopper, Blackwell), this GPU has {have[0]}.{have[1]}"
    return None


# ---- plain torch -----------------------------------------------------------------------------------------------------------


def _scale_torch(largest: Tensor, squares: Tensor | None, bound: Tensor | None) -> Tensor:
    if bound is not None and squares is not None:
        reach = squares.sqrt() * bound
        largest = torch.where((reach > largest) & (squares < torch.inf), reach, largest)
    return torch.where(largest > 0, largest.clamp_min(SMALLEST) * (1 / E4M3_MAX), 1.0)


def fp8_cast_rows_reference(
    x_TD: Tensor, column_scale_D: Tensor | None = None, bound: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(x8_TD, scale_T)"""
    v_TD = x_TD.float() if column_scale_D is None else x_TD.float() * column_scale_D
    scale_T = _scale_torch(v_TD.abs().amax(1), v_TD.square().sum(1), bound)
    return (v_TD * (1 / scale_T)[:, None]).to(E4M3), scale_T


def fp8_dequantize(q_OD: Tensor, scale_O: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows times their scales."""
    return (q_OD.float() * scale_O[..., None]).to(dtype)


@dataclass(frozen=True, slots=True, eq=False)
class FP8Tensor(StoredTensor):
    """A weight [O, D] or a stack [E, O, D] in e4m3, with a scale for each row. Its bytes are uint8: casting a model must not
    touch them, and PEFT would give adapters the dtype of a weight that is a floating-point number."""

    name = "fp8"
    packed: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def values(self) -> Tensor:
        return self.packed.view(E4M3)

    @property
    def kernel_parts(self) -> tuple[Tensor, ...]:
        return self.values, self.scales

    def dequantize(self, out: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """To float32 by default, which loses nothing."""
        found = fp8_dequantize(self.values, self.scales, dtype or (torch.float32 if out is None else out.dtype))
        return found if out is None else out.copy_(found)


def fp8_quantize_weight(weight_OD: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q_OD in e4m3, scale_O): one scale per output channel. Runs once, at loading, some rows at a time.

    No scale is below 2^-8 of the largest: with a smaller one, the adapter of a near-zero row would exceed the range. e4m3 spans
    2^18, so such rows lose no precision.
    """
    weight_OD = weight_OD.detach()
    q_OD = torch.empty(weight_OD.shape, dtype=E4M3, device=weight_OD.device) if out is None else out
    largest_O = torch.linalg.vector_norm(weight_OD, torch.inf, dim=1).float()
    scale_O = _scale_torch(torch.maximum(largest_O, largest_O.max() * 2.0**-8), None, None)
    for first in range(0, len(weight_OD), 2048):
        rows = slice(first, first + 2048)
        q_OD[rows] = (weight_OD[rows].float() * (1 / scale_O[rows])[:, None]).to(E4M3)
    return q_OD, scale_O


def fp8_quantize(weight: Tensor) -> FP8Tensor:
    """A weight, or a stack, each expert of which is scaled by itself."""
    q, each = torch.empty(weight.shape, dtype=E4M3, device=weight.device), weight if weight.ndim == 3 else weight[None]
    scales = [fp8_quantize_weight(one, out=part)[1] for one, part in zip(each, q.view(each.shape), strict=True)]
    return FP8Tensor(q.view(torch.uint8), torch.stack(scales).view(weight.shape[:-1]), weight.dtype)


# ---- Triton: cast ----------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Rows a program takes, its warps, and the columns of one step through a row (0: the row stays in registers)."""

    rows: int
    warps: int
    columns: int = 0


# For `python -m benchmarks.ops --sweep fp8`. Several rows a program read the columns' scales, 16 kB at D = 4096, once for all.
CONFIGS = [Tile(*config) for config in (
    (1, 4), (1, 8), (1, 16), (2, 8), (2, 16), (4, 8), (4, 16), (1, 4, 1024), (1, 4, 2048), (1, 8, 2048), (1, 8, 4096),
    (1, 16, 4096),
)]  # fmt: skip
IN_REGISTERS = 16384  # the widest row that stays in registers: 32 values a thread with 16 warps, 64 registers


def _tile(D: int) -> Tile:
    """As the norm's: 16 values a thread, two 16-byte loads in flight, and several programs per multiprocessor."""
    if D > IN_REGISTERS:
        return Tile(1, 8, 4096 if D % 4096 == 0 else 2048)
    block, tail = _blocks(D)
    return Tile(*_norm_tile(block, tail))


@jit
def _largest(values):
    return tl.max(tl.abs(values), 1)


@jit
def _row_scale(largest, squares, bound, HAS_BOUND: tl.constexpr):
    """(scale, 1 / scale). Comparisons with NaN are false: a row of NaN has scale 1 and keeps its NaN. With inf in a row,
    1 / scale is 0 and inf * 0 is NaN; a cast would saturate to 448."""
    if HAS_BOUND:
        reach = tl.sqrt_rn(squares) * tl.load(bound)
        largest = tl.where((reach > largest) & (squares < float("inf")), reach, largest)
    scale = tl.where(largest > 0, tl.maximum(largest, 7.888609052210118e-31) * 0.002232142857142857, 1.0)
    return scale, tl.div_rn(scale * 0.0 + 1.0, scale)


@jit
def _take_columns(column_scale, first, WIDTH: tl.constexpr, D: tl.constexpr):
    """[1, WIDTH], in the same thread layout as the rows it multiplies."""
    column = first + tl.arange(0, WIDTH)[None, :]
    return tl.load(column_scale + column, mask=column < D, other=0.0)


@jit
def _cast_kernel(
    x, x_row, column_scale, bound, out, out_row, scale, T, D: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, HAS_COLUMN: tl.constexpr, HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value = _take(x, x_row, row, T, 0, BLOCK, D).to(tl.float32)
    if TAIL > 0:
        value_2 = _take(x, x_row, row, T, BLOCK, TAIL, D).to(tl.float32)
    if HAS_COLUMN:
        value *= _take_columns(column_scale, 0, BLOCK, D)
        if TAIL > 0:
            value_2 *= _take_columns(column_scale, BLOCK, TAIL, D)
    largest, squares = _largest(value), tl.sum(value * value, 1)
    if TAIL > 0:
        largest, squares = tl.maximum(largest, _largest(value_2)), squares + tl.sum(value_2 * value_2, 1)
    row_scale, inverse = _row_scale(largest, squares, bound, HAS_BOUND)
    tl.store(scale + row, row_scale, mask=row < T)
    _give(out, out_row, value * inverse[:, None], row, T, 0, BLOCK, D)
    if TAIL > 0:
        _give(out, out_row, value_2 * inverse[:, None], row, T, BLOCK, TAIL, D)


@jit
def _cast_wide_kernel(
    x, x_row, column_scale, bound, out, out_row, scale, D: tl.constexpr, BLOCK: tl.constexpr, HAS_COLUMN: tl.constexpr,
    HAS_BOUND: tl.constexpr,
):  # fmt: skip
    """One row a program, read twice, the second time from the cache (57 kB at D = 28,672)."""
    row = tl.program_id(0).to(tl.int64)
    largest, squares = tl.zeros([1, BLOCK], tl.float32), tl.zeros([1, BLOCK], tl.float32)
    for first in range(0, D, BLOCK):
        value = _wide_part(x + row * x_row, column_scale, first, D, BLOCK, HAS_COLUMN)
        largest, squares = tl.maximum(largest, tl.abs(value)), squares + value * value
    row_scale, inverse = _row_scale(tl.max(largest, 1), tl.sum(squares, 1), bound, HAS_BOUND)
    tl.store(scale + row + tl.arange(0, 1), row_scale)
    for first in range(0, D, BLOCK):
        value = _wide_part(x + row * x_row, column_scale, first, D, BLOCK, HAS_COLUMN)
        _give_part(out + row * out_row, value * inverse[:, None], first, D, BLOCK)


@jit
def _wide_part(x, column_scale, first, D: tl.constexpr, BLOCK: tl.constexpr, HAS_COLUMN: tl.constexpr):
    """[1, BLOCK] values of one row, from column `first` on, times their column's scale."""
    column = first + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x + column, mask=column < D, other=0.0).to(tl.float32)
    if HAS_COLUMN:
        value *= _take_columns(column_scale, first, BLOCK, D)
    return value


@jit
def _give_part(out, values, first, D: tl.constexpr, BLOCK: tl.constexpr):
    column = first + tl.arange(0, BLOCK)[None, :]
    tl.store(out + column, values.to(out.dtype.element_ty), mask=column < D)


def fp8_cast_rows(
    x_TD: Tensor, column_scale_D: Tensor | None = None, *, bound: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(x8_TD, scale_T): x * column_scale = x8 * scale, to half a step of e4m3. column_scale and bound (one value) are fp32."""
    T, D = x_TD.shape
    x8_TD = torch.empty(T, D, dtype=E4M3, device=x_TD.device) if out is None else out
    if not use_triton(x_TD):
        values_TD, scale_T = fp8_cast_rows_reference(x_TD, column_scale_D, bound)
        x8_TD.copy_(values_TD)
        return x8_TD, scale_T
    scale_T = torch.empty(T, dtype=torch.float32, device=x_TD.device)
    flags = {"HAS_COLUMN": column_scale_D is not None, "HAS_BOUND": bound is not None}
    arguments = (
        x_TD, x_TD.stride(0), scale_T if column_scale_D is None else column_scale_D, scale_T if bound is None else bound,
        x8_TD, x8_TD.stride(0), scale_T,
    )  # fmt: skip
    tile = _tile(D)
    if tile.columns:
        _cast_wide_kernel[(T,)](*arguments, D=D, BLOCK=tile.columns, num_warps=tile.warps, **flags)
        return x8_TD, scale_T
    block, tail = _blocks(D)
    _cast_kernel[(triton.cdiv(T, tile.rows),)](
        *arguments, T, D=D, BLOCK=block, TAIL=tail, ROWS=tile.rows, num_warps=tile.warps, **flags
    )
    return x8_TD, scale_T


# ---- Triton: transpose -----------------------------------------------------------------------------------------------------


class TransposeTile(NamedTuple):
    """Rows and columns, in bytes, that a program transposes, and its warps."""

    rows: int
    columns: int
    warps: int


TRANSPOSE_CONFIGS = [TransposeTile(*c) for c in (
    (128, 128, 4), (128, 128, 8), (256, 128, 8), (128, 256, 8), (256, 256, 8), (64, 256, 4), (256, 64, 4),
)]  # fmt: skip


def _transpose_tile() -> TransposeTile:
    """Reads and writes of 128 bytes, whole lines; 32 words a thread."""
    return TRANSPOSE_CONFIGS[0]


@jit
def _transpose_kernel(q, q_row, out, out_row, rows, columns, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """In words of 4 bytes; sizes and strides count 16 bytes, so that the compiler knows the alignment.

    Four words in a column are 4 x 4 bytes, transposed in registers; the words then go through shared memory, where single bytes
    would take four times as many steps.
    """
    q_row, out_row, quads, words = q_row * 4, out_row * 4, rows * 4, columns * 4
    tiles = tl.cdiv(words, WORDS)
    quad = (tl.program_id(0) // tiles) * ROWS + tl.arange(0, ROWS)  # four rows of q, one word of a row of out
    word = (tl.program_id(0) % tiles) * WORDS + tl.arange(0, WORDS)
    inside = (quad < quads)[:, None] & (word < words)[None, :]
    source = q + quad.to(tl.int64)[:, None] * 4 * q_row + word[None, :]
    w0 = tl.load(source, mask=inside, other=0)
    w1 = tl.load(source + q_row, mask=inside, other=0)
    w2 = tl.load(source + 2 * q_row, mask=inside, other=0)
    w3 = tl.load(source + 3 * q_row, mask=inside, other=0)
    low_0, low_1 = (w0 & 0x00FF00FF) | ((w1 & 0x00FF00FF) << 8), ((w0 >> 8) & 0x00FF00FF) | (w1 & -16711936)
    low_2, low_3 = (w2 & 0x00FF00FF) | ((w3 & 0x00FF00FF) << 8), ((w2 >> 8) & 0x00FF00FF) | (w3 & -16711936)
    target = out + word.to(tl.int64)[:, None] * 4 * out_row + quad[None, :]
    inside = (quad < quads)[None, :] & (word < words)[:, None]
    tl.store(target, tl.trans((low_0 & 0xFFFF) | (low_2 << 16)), mask=inside)
    tl.store(target + out_row, tl.trans((low_1 & 0xFFFF) | (low_3 << 16)), mask=inside)
    tl.store(target + 2 * out_row, tl.trans(((low_0 >> 16) & 0xFFFF) | (low_2 & -65536)), mask=inside)
    tl.store(target + 3 * out_row, tl.trans(((low_1 >> 16) & 0xFFFF) | (low_3 & -65536)), mask=inside)


def fp8_pitch(columns: int) -> int:
    """Row stride in bytes: whole lines of 128, which a GEMM reads faster (8B down, 16,384 tokens, 14,384 columns:
    1.46 ms instead of 1.67 with rows back to back; H200)."""
    return -(-columns // 128) * 128


def fp8_rows(rows: int, columns: int, device: torch.device | str) -> Tensor:
    """An uninitialized GEMM operand."""
    return torch.empty(rows, fp8_pitch(columns), dtype=E4M3, device=device)[:, :columns]


def fp8_transpose(q_OD: Tensor, out: Tensor | None = None) -> Tensor:
    """q_DO, transposed in memory, as Hopper's FP8 GEMMs need it. Rows of either may be strided."""
    rows, columns = q_OD.shape
    q_DO = fp8_rows(columns, rows, q_OD.device) if out is None else out
    whole = all(number % 16 == 0 for t in (q_OD, q_DO) for number in (t.stride(0), t.shape[1], t.data_ptr()))
    if not (whole and use_triton(q_OD)):
        q_DO.view(torch.uint8).copy_(q_OD.view(torch.uint8).T)
        return q_DO
    tile = _transpose_tile()
    _transpose_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)](
        q_OD.view(torch.int32), q_OD.stride(0) // 16, q_DO.view(torch.int32), q_DO.stride(0) // 16, rows // 16, columns // 16,
        ROWS=tile.rows // 4, WORDS=tile.columns // 4, num_warps=tile.warps,
    )  # fmt: skip
    return q_DO
