"""Grouped GEMM: rows times the weights of their expert, all experts in one launch.

S = rows, sorted by expert; E = experts, D = width of the input, O = rows of an expert's weight. `offsets_E1` (int32, on the
device): rows offsets[e] to offsets[e + 1] belong to expert e, perhaps none.

    forward            y_s = W_e x_s + bias_e                x may be unsorted: row s is then x[order[s] // K] (routing.py)
    backward, input    dx_s = W_e^T dy_s
    backward, weight   dW_e = sum of dy_s x_s^T              summed in fp32, rounded once; zero for an expert without rows

W is [E, O, D] with any strides: gpt-oss stores [E, D, O], which is `.transpose(1, 2)`. The host never reads the offsets: the
grid is an upper bound from the shapes, S / tile + E tiles, and each program finds its expert.

torch._grouped_mm computes the dense ones (bf16 on Hopper and datacenter Blackwell, 16-byte rows; otherwise it loops on the
host). On Blackwell it leaves garbage in the gradient of an expert without rows (pytorch issue 172439), so Triton computes that
one outside Hopper. Triton also does fp16 and fp32, other chips, gathered rows, biases, and thin GEMMs (LoRA).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.add_dot import EXACT_INNER, add_dot
from pronghorn.kernels.runtime.dispatch import (
    HOPPER,
    Chip,
    address,
    chip_of,
    cuda_capability,
    is_gpu,
    jit,
    tl,
    triton,
    use_triton,
)
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.kernels.runtime.work import count, count_mm

THIN = 64  # up to so many outputs the GEMM is bound by memory


def grouped_linear_reference(x_SD: Tensor, weight_EOD: Tensor, offsets_E1: Tensor, bias_EO: Tensor | None = None) -> Tensor:
    """A loop over the experts; synchronizes with the host."""
    parts = []
    for expert, (start, stop) in enumerate(pairwise(offsets_E1.tolist())):
        bias = None if bias_EO is None else bias_EO[expert]
        parts.append(torch.nn.functional.linear(x_SD[start:stop], weight_EOD[expert], bias))
    return torch.cat(parts)


class Tile(NamedTuple):
    """Rows and columns of a program, terms per step, warps, and loads in flight."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# For `python -m benchmarks.ops --sweep grouped_gemm`. The first needs 144 kB of a Hopper processor's 227 and 192 fp32 sums a
# thread; 64 rows are for few tokens an expert.
CONFIGS = [Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 4, 4),
           Tile(256, 128, 64, 8, 3), Tile(64, 256, 64, 8, 4)]  # fmt: skip


def _tile(S: int, E: int, outputs: int, dtype: torch.dtype, chip: Chip) -> Tile:
    if dtype == torch.float32:
        return Tile(64, 64, EXACT_INNER, 4, 2)
    if outputs <= THIN:  # reads x once, in long runs
        return Tile(64, max(16, triton.next_power_of_2(outputs)), 128, 4, 4 if chip.large else 2)
    rows = 128 if S > 64 * E else 64
    if chip == HOPPER and outputs > 128:
        return CONFIGS[0]._replace(rows=rows)
    return Tile(rows, 128, 64, 8 if rows == 128 else 4, 3)  # 96 kB: Ada and small Blackwell have 99


def _weight_tile(outputs: int, D: int, dtype: torch.dtype, chip: Chip) -> Tile:
    """rows: of O, columns: of D, inner: tokens."""
    if dtype == torch.float32:
        return Tile(64, 64 if D > 32 else max(16, triton.next_power_of_2(D)), EXACT_INNER, 4, 2)
    if D <= THIN:
        return Tile(128, max(16, triton.next_power_of_2(D)), 64, 4, 4 if chip.large else 3)
    if chip == HOPPER:  # on 10.0 so wide a tile spills 96 to 328 bytes
        return Tile(128, 256, 64, 8, 3)
    return Tile(128, 128, 64, 8, 3)


@jit
def expert_tile(offsets, program, columns, E: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """(expert, its first row here, the end of its rows, tile of columns); no rows if there is nothing to do.

    The row tiles of an expert follow each other, then its next columns: programs that run together share W in L2.
    """
    expert = tl.arange(0, E_BLOCK)
    start = tl.load(offsets + expert, mask=expert < E, other=0)
    end = tl.load(offsets + expert + 1, mask=expert < E, other=0)
    tiles = (end - start + ROWS - 1) // ROWS
    upto = tl.cumsum(tiles, axis=0) * columns
    own = tl.sum((upto <= program).to(tl.int32), axis=0)
    is_own = expert == own
    row_tiles = tl.maximum(tl.sum(tl.where(is_own, tiles, 0), axis=0), 1)
    local = program - tl.sum(tl.where(is_own, upto - tiles * columns, 0), axis=0)
    first = tl.sum(tl.where(is_own, start, 0), axis=0) + (local % row_tiles) * ROWS
    return own, first, tl.sum(tl.where(is_own, end, 0), axis=0), local // row_tiles


@jit
def _product_kernel(
    x, x_row, order, weight, weight_e, weight_o, weight_d, bias, y, y_row, offsets, D, OUTPUTS, K, E: tl.constexpr,
    E_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, GATHER: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, first, end, column_tile = expert_tile(offsets, tl.program_id(0), tl.cdiv(OUTPUTS, COLUMNS), E, E_BLOCK, ROWS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    source = tl.minimum(row, end - 1)  # rows beyond the end repeat the last one and are not written
    if GATHER:
        source = tl.load(order + source) // K
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    x += source.to(tl.int64)[:, None] * x_row + inner[None, :]
    weight += expert.to(tl.int64) * weight_e + (column % OUTPUTS).to(tl.int64)[None, :] * weight_o
    weight += inner.to(tl.int64)[:, None] * weight_d
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for d in range(0, D, INNER):
        if EVEN:
            a = tl.load(x)
            b = tl.load(weight)
        else:
            a = tl.load(x, mask=(d + inner < D)[None, :], other=0.0)
            b = tl.load(weight, mask=(d + inner < D)[:, None], other=0.0)
        sums = add_dot(sums, a, b, PRECISION)
        x += INNER
        weight += INNER * weight_d
    inside = column < OUTPUTS
    if BIAS:
        sums += tl.load(bias + expert.to(tl.int64) * OUTPUTS + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    target = y + row.to(tl.int64)[:, None] * y_row + column[None, :]
    written = (row < end)[:, None] & inside[None, :]
    if ADD:
        sums += tl.load(target, mask=written, other=0.0).to(tl.float32)
    tl.store(target, sums.to(y.dtype.element_ty), mask=written)


@jit
def _weight_kernel(
    dy, dy_row, x, x_row, out, out_e, out_o, out_d, offsets, OUTPUTS, D, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(OUTPUTS, ROWS), tl.cdiv(D, COLUMNS)
    program = tl.program_id(0)
    expert = (program // (row_tiles * column_tiles)).to(tl.int64)
    o = (program // column_tiles % row_tiles) * ROWS + tl.arange(0, ROWS)
    d = (program % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, INNER):
        row = first + tl.arange(0, INNER)
        inside = (row < end)[:, None]
        place = row.to(tl.int64)[:, None]
        a = tl.load(dy + place * dy_row + o[None, :], mask=inside & (o < OUTPUTS)[None, :], other=0.0)
        b = tl.load(x + place * x_row + d[None, :], mask=inside & (d < D)[None, :], other=0.0)
        sums = add_dot(sums, tl.trans(a), b, PRECISION)
    target = out + expert * out_e + o.to(tl.int64)[:, None] * out_o + d.to(tl.int64)[None, :] * out_d
    inside = (o < OUTPUTS)[:, None] & (d < D)[None, :]
    if ADD:
        sums += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, sums.to(out.dtype.element_ty), mask=inside)


@jit
def _bias_kernel(
    dy, dy_row, order, weights, out, offsets, OUTPUTS, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr
):
    tiles = tl.cdiv(OUTPUTS, COLUMNS)
    expert = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(offsets + expert + 1)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(tl.load(offsets + expert), end, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < OUTPUTS)[None, :]
        values = tl.load(dy + row.to(tl.int64)[:, None] * dy_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            slot = tl.load(order + row, mask=row < end, other=0)
            values *= tl.load(weights + slot, mask=row < end, other=0.0)[:, None]
        sums += values
    tl.store(out + expert * OUTPUTS + column, tl.sum(sums, axis=0).to(out.dtype.element_ty), mask=column < OUTPUTS)


# ---- raw functions ---------------------------------------------------------------------------------------------------------


def precision_of(dtype: torch.dtype) -> str | None:
    """True fp32, not TF32."""
    return "ieee" if dtype == torch.float32 else None


def _aligned(matrix: Tensor) -> bool:
    """Whether torch._grouped_mm accepts it: rows or columns contiguous, start and stride aligned to 16 bytes."""
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.stride()[-2:]
    apart = row if column == 1 and row >= columns else column if row == 1 and column >= rows else 0
    steps = (apart, *matrix.stride()[:-2])
    in_bytes = address(matrix) % 16 == 0 and all(step * matrix.element_size() % 16 == 0 for step in steps)
    return apart > 0 and in_bytes


def _torch_can(a: Tensor, b: Tensor, chips: tuple[int, ...]) -> bool:
    """Whether torch's grouped GEMM runs its kernel here, not its loop on the host."""
    if not is_gpu(a) or a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16 or cuda_capability(a.device)[0] not in chips:
        return False
    return min(*a.shape[-2:], *b.shape[-2:]) > 0 and _aligned(a) and _aligned(b)


def _bounds(offsets_E1: Tensor) -> list[tuple[int, int, int]]:
    """(expert, start, stop) on the host: only for CPU tensors."""
    return [(expert, start, stop) for expert, (start, stop) in enumerate(pairwise(offsets_E1.tolist()))]


def sorted_rows(x_TD: Tensor, order_S: Tensor | None, K: int) -> Tensor:
    return x_TD if order_S is None else x_TD[(order_S // K).long()]


def grouped_linear_forward(
    x_SD: Tensor, weight_EOD: Tensor, offsets_E1: Tensor, bias_EO: Tensor | None = None, *, order_S: Tensor | None = None,
    K: int = 1, out: Tensor | None = None, add: bool = False,
) -> Tensor:  # fmt: skip
    """y_SO. With `order_S`, x is [T, D] unsorted, and its rows are gathered inside. `add`: to what `out` holds."""
    S, (E, outputs, D) = x_SD.shape[0] if order_S is None else len(order_S), weight_EOD.shape
    plain = bias_EO is None and order_S is None and out is None and outputs > THIN
    if plain and _torch_can(x_SD, weight_EOD, (9, 10)):
        if x_SD.is_meta:
            product = x_SD.new_empty(S, outputs)
            count_mm(x_SD, weight_EOD.transpose(1, 2), product)
            return product
        product = torch._grouped_mm(x_SD, weight_EOD.transpose(1, 2), offs=offsets_E1[1:])
        return product
    y_SO = torch.empty(S, outputs, dtype=x_SD.dtype, device=x_SD.device) if out is None else out
    if not use_triton(x_SD):
        rows_SD = sorted_rows(x_SD, order_S, K)
        for expert, start, stop in _bounds(offsets_E1):
            y = rows_SD[start:stop].contiguous() @ weight_EOD[expert].T
            y = y if bias_EO is None else y + bias_EO[expert]
            y_SO[start:stop] = y_SO[start:stop] + y if add else y
        return y_SO
    count("bf16", 2.0 * S * D * outputs)
    tile = _tile(S, E, outputs, x_SD.dtype, chip_of(x_SD.device))
    _product_kernel[((triton.cdiv(S, tile.rows) + E) * triton.cdiv(outputs, tile.columns),)](
        x_SD, x_SD.stride(0), offsets_E1 if order_S is None else order_S, weight_EOD, *weight_EOD.stride(),
        weight_EOD if bias_EO is None else bias_EO, y_SO, y_SO.stride(0), offsets_E1, D, outputs, K, E=E,
        E_BLOCK=triton.next_power_of_2(E), ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner,
        GATHER=order_S is not None, BIAS=bias_EO is not None, ADD=add, EVEN=D % tile.inner == 0,
        PRECISION=precision_of(x_SD.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y_SO


def grouped_linear_backward_input(
    dy_SO: Tensor, weight_EOD: Tensor, offsets_E1: Tensor, *, out: Tensor | None = None
) -> Tensor:
    """dx_SD, sorted. `moe_combine.py` sums a token's rows."""
    return grouped_linear_forward(dy_SO, weight_EOD.transpose(1, 2), offsets_E1, out=out)


def grouped_linear_backward_weight(
    dy_SO: Tensor, x_SD: Tensor, offsets_E1: Tensor, *, dtype: torch.dtype | None = None, out: Tensor | None = None,
    add: bool = False,
) -> Tensor:  # fmt: skip
    """dW_EOD in `dtype` (default: x's), or in `out` (any strides), or added to it. The narrower operand should be x: for
    dA [E, R, D] of an adapter pass `out.transpose(1, 2)`."""
    E, outputs, D = len(offsets_E1) - 1, dy_SO.shape[1], x_SD.shape[1]
    dtype = (dtype or x_SD.dtype) if out is None else out.dtype
    if out is None and dtype == torch.bfloat16 and min(outputs, D) > THIN and _torch_can(dy_SO, x_SD, (9,)):
        if x_SD.is_meta:
            product = x_SD.new_empty(E, outputs, D)
            count_mm(dy_SO.T, x_SD, product)
            return product
        product = torch._grouped_mm(dy_SO.T, x_SD, offs=offsets_E1[1:])
        return product
    dW_EOD = torch.empty(E, outputs, D, dtype=dtype, device=x_SD.device) if out is None else out
    if not use_triton(x_SD):
        wide = torch.promote_types(x_SD.dtype, torch.float32)
        for expert, start, stop in _bounds(offsets_E1):
            sums = dy_SO[start:stop].to(wide).T @ x_SD[start:stop].to(wide)
            dW_EOD[expert] = dW_EOD[expert] + sums if add else sums
        return dW_EOD
    count("bf16", 2.0 * len(x_SD) * D * outputs)
    tile = _weight_tile(outputs, D, x_SD.dtype, chip_of(x_SD.device))
    _weight_kernel[(E * triton.cdiv(outputs, tile.rows) * triton.cdiv(D, tile.columns),)](
        dy_SO, dy_SO.stride(0), x_SD, x_SD.stride(0), dW_EOD, *dW_EOD.stride(), offsets_E1, outputs, D, ROWS=tile.rows,
        COLUMNS=tile.columns, INNER=tile.inner, ADD=add, PRECISION=precision_of(x_SD.dtype), num_warps=tile.warps,
        num_stages=tile.stages,
    )  # fmt: skip
    return dW_EOD


def grouped_linear_backward_bias(
    dy_SO: Tensor, offsets_E1: Tensor, *, weights_TK: Tensor | None = None, order_S: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """dbias_EO: the sum of an expert's rows, each times its routing weight if dy is not weighted yet."""
    E, outputs = len(offsets_E1) - 1, dy_SO.shape[1]
    dbias_EO = torch.empty(E, outputs, dtype=dtype or dy_SO.dtype, device=dy_SO.device)
    if not use_triton(dy_SO):
        wide = dy_SO.to(torch.promote_types(dy_SO.dtype, torch.float32))
        if weights_TK is not None and order_S is not None:
            wide = wide * weights_TK.view(-1)[order_S.long()][:, None]
        for expert, start, stop in _bounds(offsets_E1):
            dbias_EO[expert] = wide[start:stop].sum(0)
        return dbias_EO
    _bias_kernel[(E * triton.cdiv(outputs, 64),)](
        dy_SO, dy_SO.stride(0), offsets_E1 if order_S is None else order_S, dy_SO if weights_TK is None else weights_TK,
        dbias_EO, offsets_E1, outputs, ROWS=16, COLUMNS=64, WEIGHTED=weights_TK is not None, num_warps=4,
    )  # fmt: skip
    return dbias_EO


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, x_SD: Tensor, weight_EOD: Tensor, offsets_E1: Tensor, bias_EO: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_SD, weight_EOD, offsets_E1)
        ctx.bias_dtype = None if bias_EO is None else bias_EO.dtype
        return grouped_linear_forward(x_SD, weight_EOD, offsets_E1, bias_EO)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        dy_SO = grad_outputs[0] if grad_outputs[0].stride(-1) == 1 else grad_outputs[0].contiguous()
        x_SD, weight_EOD, offsets_E1 = ctx.saved_tensors
        need_x, need_weight, _, need_bias = ctx.needs_input_grad
        dx = grouped_linear_backward_input(dy_SO, weight_EOD, offsets_E1) if need_x else None
        dW = grouped_linear_backward_weight(dy_SO, x_SD, offsets_E1, dtype=weight_EOD.dtype) if need_weight else None
        return dx, dW, None, grouped_linear_backward_bias(dy_SO, offsets_E1, dtype=ctx.bias_dtype) if need_bias else None


def grouped_linear(x_SD: Tensor, weight_EOD: Tensor, offsets_E1: Tensor, bias_EO: Tensor | None = None) -> Tensor:
    """Differentiable in x, the weight and the bias."""
    y_SO: Tensor = _GroupedLinear.apply(x_SD, weight_EOD, offsets_E1, bias_EO)  # type: ignore[no-untyped-call]
    return y_SO
