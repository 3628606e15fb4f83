"""RMSNorm of packed tokens, together with the residual addition before or after it.

    h = x + residual                         stored in x's dtype; the norm reads the rounded h
    y = h * rstd * w                         rstd = 1 / sqrt(mean(h^2) + eps); w is 1 + w where `one_plus` (Gemma)

and, for families that norm the output of a branch (Gemma 2 and 3, OLMo 2):

    h = residual + x * rstd * w

`centered` is LayerNorm without a bias (Cohere): the same of h - mean(h). Backward computes the mean again.

T = packed tokens, D = model width. Rows may be strided (last dimension contiguous). Everything is computed in fp32 and
rounded once. Bound by memory: each tensor is read or written once, a row stays in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pronghorn.kernels.runtime.dispatch import jit, processor_count, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order


def rms_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, one_plus: bool = False,
    residual_TD: torch.Tensor | None = None, centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (y, h)."""
    h_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide_TD = _wide(h_TD, centered)
    scale_D = _scale(weight_D, one_plus, wide_TD.dtype)
    y_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps) * scale_D
    return y_TD.to(x_TD.dtype), h_TD


def _wide(x: torch.Tensor, centered: bool = False) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide - wide.mean(-1, keepdim=True) if centered else wide


def _scale(weight_D: torch.Tensor, one_plus: bool, dtype: torch.dtype) -> torch.Tensor:
    return weight_D.to(dtype) + 1 if one_plus else weight_D.to(dtype)


class Tile(NamedTuple):
    """Rows a program takes at a time, and its warps."""

    rows: int
    warps: int


class WeightGradTile(NamedTuple):
    """The same for the backward pass with a weight gradient: a program loops over many groups of rows and sums the gradient in
    registers. Loads of the next `stages` - 1 groups are in flight, to shared memory, while one is computed; `programs` per
    multiprocessor."""

    rows: int
    warps: int
    stages: int
    programs: int


# For `python -m benchmarks.ops --sweep rms_norm`.
CONFIGS = [Tile(rows, warps) for rows in (1, 2, 4) for warps in (2, 4, 8, 16)]
WEIGHT_GRAD_CONFIGS = [WeightGradTile(1, *config) for config in (
    (8, 3, 2), (8, 2, 2), (16, 3, 2), (16, 2, 2), (8, 3, 4), (4, 3, 2), (4, 3, 3), (4, 2, 4), (4, 3, 4), (4, 3, 5), (8, 1, 4),
)]  # fmt: skip


def _blocks(D: int) -> tuple[int, int]:
    """A row as one power of two of columns, or as two where that leaves fewer lanes idle: 5120 = 4096 + 1024."""
    whole = triton.next_power_of_2(D)
    tail = triton.next_power_of_2(max(1, D - whole // 2))
    return (whole // 2, tail) if tail < whole // 2 else (whole, 0)


def _tile(block: int, tail: int) -> Tile:
    """16 values a thread: two 16-byte loads of each tensor in bf16, and three fp32 copies of a row fit the registers.

    With a tail, few enough warps that a thread reads 16 bytes of it (else the two parts have different thread layouts, which
    costs barriers), but at most 40 values a thread: 5120 has 4 warps, 64 registers forward (eight programs and 80 KB in flight
    per multiprocessor, where one block of 8192 had three and 30 KB) and 168 backward.
    """
    rows = max(1, 1024 // block)
    if not tail:
        return Tile(rows, min(16, max(1, rows * block // 512)))
    fewest = triton.next_power_of_2(triton.cdiv(rows * (block + tail), 40 * 32))
    return Tile(rows, min(16, max(fewest, rows * tail // 256)))


def _weight_grad_tile(block: int, tail: int, itemsize: int) -> WeightGradTile:
    """Two groups of rows are being loaded while one is computed, where they fit 64 KB. At D = 4096 (compiled for sm_90) two
    programs of 97 registers fit a multiprocessor, with 98 KB in flight."""
    rows, warps = _tile(block, tail)
    group_bytes = 3 * rows * (block + tail) * itemsize
    return WeightGradTile(rows, warps, 1 + min(2, 65536 // group_bytes), 2 if block >= 4096 else 4)


@jit
def _take(x, x_row, row, T, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Columns FIRST to FIRST + WIDTH of some rows, as they are stored."""
    column = FIRST + tl.arange(0, WIDTH)
    inside = (row < T)[:, None] & (column < D)[None, :]
    return tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0)


@jit
def _give(y, y_row, values, row, T, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    inside = (row < T)[:, None] & (column < D)[None, :]
    tl.store(y + row[:, None] * y_row + column[None, :], values.to(y.dtype.element_ty), mask=inside)


@jit
def _take_weight(weight, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    column = FIRST + tl.arange(0, WIDTH)
    return tl.load(weight + column, mask=column < D, other=0.0)[None, :]


@jit
def _scale_of(weight, ONE_PLUS: tl.constexpr):
    scale = weight.to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    return scale


@jit
def _forward_read(
    x, x_row, residual, residual_row, h, h_row, row, T, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ADD_BEFORE: tl.constexpr, ADD_AFTER: tl.constexpr,
):  # fmt: skip
    """The norm's input, and what is added afterwards."""
    value = _take(x, x_row, row, T, FIRST, WIDTH, D).to(tl.float32)
    other = value
    if ADD_BEFORE or ADD_AFTER:
        other = _take(residual, residual_row, row, T, FIRST, WIDTH, D).to(tl.float32)
    if ADD_BEFORE:
        stored = (value + other).to(h.dtype.element_ty)
        _give(h, h_row, stored, row, T, FIRST, WIDTH, D)
        value = stored.to(tl.float32)
    return value, other


@jit
def _forward_write(
    y, y_row, value, other, inverse, weight, row, T, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    ONE_PLUS: tl.constexpr, ADD_AFTER: tl.constexpr,
):  # fmt: skip
    result = value * inverse[:, None] * _scale_of(_take_weight(weight, FIRST, WIDTH, D), ONE_PLUS)
    if ADD_AFTER:
        result += other
    _give(y, y_row, result, row, T, FIRST, WIDTH, D)


@jit
def _row_mean(first, second, D: tl.constexpr, TAIL: tl.constexpr):
    """The mean over both blocks; without a tail, over the first."""
    total = tl.sum(first, 1)
    if TAIL > 0:
        total += tl.sum(second, 1)
    return (total / D)[:, None]


@jit
def _without(value, mean, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """value - mean, and still 0 beyond the row."""
    return tl.where((FIRST + tl.arange(0, WIDTH) < D)[None, :], value - mean, 0.0)


@jit
def _forward_kernel(
    x, x_row, residual, residual_row, weight, y, y_row, h, h_row, rstd, eps, T, D: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, ROWS: tl.constexpr, ONE_PLUS: tl.constexpr, ADD_BEFORE: tl.constexpr, ADD_AFTER: tl.constexpr,
    CENTERED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    value, other = _forward_read(x, x_row, residual, residual_row, h, h_row, row, T, 0, BLOCK, D, ADD_BEFORE, ADD_AFTER)
    if TAIL > 0:
        value_2, other_2 = _forward_read(
            x, x_row, residual, residual_row, h, h_row, row, T, BLOCK, TAIL, D, ADD_BEFORE, ADD_AFTER
        )
    if CENTERED:
        mean = _row_mean(value, value_2 if TAIL > 0 else value, D, TAIL)
        value = _without(value, mean, 0, BLOCK, D)
        if TAIL > 0:
            value_2 = _without(value_2, mean, BLOCK, TAIL, D)
    squares = tl.sum(value * value, 1)
    if TAIL > 0:
        squares += tl.sum(value_2 * value_2, 1)
    inverse = 1.0 / tl.sqrt_rn(squares / D + eps)
    tl.store(rstd + row, inverse, mask=row < T)
    _forward_write(y, y_row, value, other, inverse, weight, row, T, 0, BLOCK, D, ONE_PLUS, ADD_AFTER)
    if TAIL > 0:
        _forward_write(y, y_row, value_2, other_2, inverse, weight, row, T, BLOCK, TAIL, D, ONE_PLUS, ADD_AFTER)


@jit
def _backward_rows(
    dy, dy_row, h, h_row, weight, weight_2, rstd, add, add_row, dx, dx_row, row, T, D: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, ONE_PLUS: tl.constexpr, HAS_ADD: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """Writes dx of some rows; returns their shares of the weight gradient in the two blocks (without a tail the first twice).

    All loads come before the sums, whose barriers would delay them.
    """
    inverse = tl.load(rstd + row, mask=row < T, other=0.0)[:, None]
    grad = _take(dy, dy_row, row, T, 0, BLOCK, D)
    value = _take(h, h_row, row, T, 0, BLOCK, D)
    grad_2, value_2 = grad, value
    if HAS_ADD:
        more = _take(add, add_row, row, T, 0, BLOCK, D)
    if TAIL > 0:
        grad_2 = _take(dy, dy_row, row, T, BLOCK, TAIL, D)
        value_2 = _take(h, h_row, row, T, BLOCK, TAIL, D)
        if HAS_ADD:
            more_2 = _take(add, add_row, row, T, BLOCK, TAIL, D)
    value, value_2 = value.to(tl.float32), value_2.to(tl.float32)
    if CENTERED:  # columns beyond the row get -mean: their gradient is 0
        mean = _row_mean(value, value_2, D, TAIL)
        value, value_2 = value - mean, value_2 - mean
    normed = value * inverse
    dw = grad.to(tl.float32) * normed
    dw_2 = dw
    shared = tl.sum(dw * _scale_of(weight, ONE_PLUS), 1)
    if TAIL > 0:
        normed_2 = value_2 * inverse
        dw_2 = grad_2.to(tl.float32) * normed_2
        shared += tl.sum(dw_2 * _scale_of(weight_2, ONE_PLUS), 1)
    shared = (shared / D)[:, None]
    result = inverse * (grad.to(tl.float32) * _scale_of(weight, ONE_PLUS) - normed * shared)
    if CENTERED:
        scaled = grad.to(tl.float32) * _scale_of(weight, ONE_PLUS)
        level = inverse * _row_mean(scaled, grad_2.to(tl.float32) * _scale_of(weight_2, ONE_PLUS), D, TAIL)
        result -= level
    if HAS_ADD:
        result += more.to(tl.float32)
    _give(dx, dx_row, result, row, T, 0, BLOCK, D)
    if TAIL > 0:
        result_2 = inverse * (grad_2.to(tl.float32) * _scale_of(weight_2, ONE_PLUS) - normed_2 * shared)
        if CENTERED:
            result_2 -= level
        if HAS_ADD:
            result_2 += more_2.to(tl.float32)
        _give(dx, dx_row, result_2, row, T, BLOCK, TAIL, D)
    return dw, dw_2


@jit
def _backward_kernel(
    dy, dy_row, h, h_row, weight, rstd, add, add_row, dx, dx_row, partial_dw, T, D: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, ONE_PLUS: tl.constexpr, HAS_ADD: tl.constexpr,
    NEED_DW: tl.constexpr, CENTERED: tl.constexpr,
):  # fmt: skip
    """One group of rows a program; with a weight gradient every num_programs-th group."""
    program = tl.program_id(0).to(tl.int64)
    first_row = program * ROWS
    w = _take_weight(weight, 0, BLOCK, D)
    w_2 = w
    if TAIL > 0:
        w_2 = _take_weight(weight, BLOCK, TAIL, D)
    if NEED_DW:
        column = tl.arange(0, BLOCK)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        if TAIL > 0:
            total_2 = tl.zeros([ROWS, TAIL], tl.float32)
        for first in tl.range(first_row, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
            row = first + tl.arange(0, ROWS).to(tl.int64)
            dw, dw_2 = _backward_rows(
                dy,
                dy_row,
                h,
                h_row,
                w,
                w_2,
                rstd,
                add,
                add_row,
                dx,
                dx_row,
                row,
                T,
                D,
                BLOCK,
                TAIL,
                ONE_PLUS,
                HAS_ADD,
                CENTERED,
            )
            total += dw
            if TAIL > 0:
                total_2 += dw_2
        tl.store(partial_dw + program * D + column, tl.sum(total, 0), mask=column < D)
        if TAIL > 0:
            column_2 = BLOCK + tl.arange(0, TAIL)
            tl.store(partial_dw + program * D + column_2, tl.sum(total_2, 0), mask=column_2 < D)
    else:
        row = first_row + tl.arange(0, ROWS).to(tl.int64)
        _backward_rows(
            dy, dy_row, h, h_row, w, w_2, rstd, add, add_row, dx, dx_row, row, T, D, BLOCK, TAIL, ONE_PLUS, HAS_ADD, CENTERED
        )


@jit
def _sum_rows_kernel(partial, other, out, rows, other_rows, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """out[0] = the sum of the rows of `partial`, out[1] that of `other`'s (program_id(1) says which); BLOCK columns each."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    second = tl.program_id(1) == 1
    if second:
        partial = other
    count = tl.where(second, other_rows, rows)  # not `rows = other_rows`: Triton specializes a 1 as a constant
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < count)[:, None] & (column < D)[None, :]
        total += tl.load(partial + row[:, None] * D + column[None, :], mask=inside, other=0.0)
    tl.store(out + tl.program_id(1) * D + column, tl.sum(total, 0), mask=column < D)


def sum_rows(partial_PD: torch.Tensor, other_PD: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of the rows, in a fixed order, of one or two contiguous fp32 matrices of a width: [1 or 2, D], in one launch."""
    D = partial_PD.shape[1]
    other = partial_PD if other_PD is None else other_PD
    sums = torch.empty(1 if other_PD is None else 2, D, dtype=torch.float32, device=partial_PD.device)
    block = min(16, triton.next_power_of_2(D))  # 64 bytes of a row: narrow, for enough programs
    # All rows at once, 32 values a thread: 264 rows (RMSNorm) and 880 (QK-norm) wait for memory once, not four times.
    _sum_rows_kernel[(triton.cdiv(D, block), len(sums))](
        partial_PD, other, sums, len(partial_PD), len(other), D=D, BLOCK=block, ROWS=1024, num_warps=16
    )
    return sums


def _launch_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, one_plus: bool, residual_TD: torch.Tensor | None,
    out_TD: torch.Tensor, h_TD: torch.Tensor | None, centered: bool,
) -> torch.Tensor:  # fmt: skip
    """The sum goes to h_TD before the norm, or, where there is no h_TD, into the output after it. Returns rstd."""
    T, D = x_TD.shape
    rstd_T = torch.empty(T, dtype=torch.float32, device=x_TD.device)
    residual = x_TD if residual_TD is None else residual_TD
    h = x_TD if h_TD is None else h_TD
    block, tail = _blocks(D)
    tile = _tile(block, tail)
    _forward_kernel[(triton.cdiv(T, tile.rows),)](
        x_TD, x_TD.stride(0), residual, residual.stride(0), weight_D, out_TD, out_TD.stride(0), h, h.stride(0), rstd_T, eps, T,
        D=D, BLOCK=block, TAIL=tail, ROWS=tile.rows, ONE_PLUS=one_plus, ADD_BEFORE=h_TD is not None,
        ADD_AFTER=residual_TD is not None and h_TD is None, CENTERED=centered, num_warps=tile.warps,
    )  # fmt: skip
    return rstd_T


def _normed(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, one_plus: bool, centered: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch: the norm in fp32 and rstd."""
    wide_TD = _wide(x_TD, centered)
    rstd_T = torch.rsqrt(wide_TD.square().mean(-1) + eps)
    return wide_TD * rstd_T[:, None] * _scale(weight_D, one_plus, wide_TD.dtype), rstd_T


def rms_norm_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, one_plus: bool = False,
    residual_TD: torch.Tensor | None = None, out: torch.Tensor | None = None, in_place: bool = False, centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (y, h, rstd); without a residual h is x itself. `in_place`: h takes x's place."""
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    if use_triton(x_TD):
        h_TD = None
        if residual_TD is not None:
            h_TD = x_TD if in_place else torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        rstd_T = _launch_forward(x_TD, weight_D, eps, one_plus, residual_TD, y_TD, h_TD, centered)
        return y_TD, x_TD if h_TD is None else h_TD, rstd_T
    h_TD = x_TD if residual_TD is None else torch.add(x_TD, residual_TD, out=x_TD if in_place else None)
    normed_TD, rstd_T = _normed(h_TD, weight_D, eps, one_plus, centered)
    return y_TD.copy_(normed_TD), h_TD, rstd_T


def rms_norm_then_add_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_TD: torch.Tensor, *, one_plus: bool = False,
    out: torch.Tensor | None = None, centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (residual + norm(x), rstd). Backward: dx is rms_norm_backward(dh, x, weight, rstd), the residual's is dh."""
    h_TD = torch.empty(x_TD.shape, dtype=residual_TD.dtype, device=x_TD.device) if out is None else out
    if use_triton(x_TD):
        return h_TD, _launch_forward(x_TD, weight_D, eps, one_plus, residual_TD, h_TD, None, centered)
    normed_TD, rstd_T = _normed(x_TD, weight_D, eps, one_plus, centered)
    return h_TD.copy_(normed_TD + residual_TD), rstd_T


def rms_norm_backward(
    dy_TD: torch.Tensor, h_TD: torch.Tensor, weight_D: torch.Tensor, rstd_T: torch.Tensor, *, one_plus: bool = False,
    add_TD: torch.Tensor | None = None, need_weight_grad: bool = False, out: torch.Tensor | None = None, centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns (dx + add, dw in fp32 or None). `add`: the gradient of the residual stream; `out` may be dy or add.

    The weight gradient is deterministic: each program sums its rows, a second kernel sums the programs.
    """
    T, D = h_TD.shape
    dx_TD = torch.empty(h_TD.shape, dtype=h_TD.dtype, device=h_TD.device) if out is None else out
    if not use_triton(h_TD):
        grad_TD, normed_TD = _wide(dy_TD), _wide(h_TD, centered) * rstd_T[:, None]
        dw_D = (grad_TD * normed_TD).sum(0) if need_weight_grad else None
        grad_TD = grad_TD * _scale(weight_D, one_plus, grad_TD.dtype)
        result_TD = rstd_T[:, None] * (grad_TD - normed_TD * (grad_TD * normed_TD).mean(-1, keepdim=True))
        if centered:
            result_TD = result_TD - rstd_T[:, None] * grad_TD.mean(-1, keepdim=True)
        return dx_TD.copy_(result_TD if add_TD is None else result_TD + add_TD), dw_D
    block, tail = _blocks(D)
    rows, warps = _tile(block, tail)
    programs, stages = triton.cdiv(T, rows), 1
    if need_weight_grad:
        rows, warps, stages, each = _weight_grad_tile(block, tail, h_TD.element_size())
        programs = min(triton.cdiv(T, rows), each * processor_count(h_TD.device))
    partial_PD = torch.empty(programs if need_weight_grad else 1, D, dtype=torch.float32, device=h_TD.device)
    add = dy_TD if add_TD is None else add_TD
    _backward_kernel[(programs,)](
        dy_TD, dy_TD.stride(0), h_TD, h_TD.stride(0), weight_D, rstd_T, add, add.stride(0), dx_TD, dx_TD.stride(0), partial_PD,
        T, D=D, BLOCK=block, TAIL=tail, ROWS=rows, STAGES=stages, ONE_PLUS=one_plus, HAS_ADD=add_TD is not None,
        NEED_DW=need_weight_grad, CENTERED=centered, num_warps=warps,
    )  # fmt: skip
    return dx_TD, sum_rows(partial_PD)[0] if need_weight_grad else None


class _RmsNorm(torch.autograd.Function):
    """(y, h) of x and residual, or y alone of x."""

    @staticmethod
    def forward(
        ctx: Ctx, x_TD: torch.Tensor, weight_D: torch.Tensor, residual_TD: torch.Tensor | None, eps: float,
        kind: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:  # fmt: skip
        y_TD, h_TD, rstd_T = rms_norm_forward(x_TD, weight_D, eps, residual_TD=residual_TD, **kind)
        ctx.save_for_backward(h_TD, weight_D, rstd_T)
        ctx.kind, ctx.has_residual = kind, residual_TD is not None
        ctx.set_materialize_grads(False)
        return y_TD if residual_TD is None else (y_TD, h_TD)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, dy_TD: torch.Tensor | None, dh_TD: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        h_TD, weight_D, rstd_T = ctx.saved_tensors
        if dy_TD is None:
            return dh_TD, None, dh_TD, None, None
        dx_TD, dw_D = rms_norm_backward(
            _rows(dy_TD), h_TD, weight_D, rstd_T, add_TD=None if dh_TD is None else _rows(dh_TD),
            need_weight_grad=ctx.needs_input_grad[1], **ctx.kind,
        )  # fmt: skip
        dw_D = None if dw_D is None else dw_D.to(weight_D.dtype)
        return dx_TD, dw_D, dx_TD if ctx.has_residual else None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Makes the last dimension contiguous: autograd may pass expanded tensors."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, residual_TD: torch.Tensor | None = None, **kind: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable; returns (y, h), h = x + residual. `kind`: one_plus, centered."""
    outputs = _RmsNorm.apply(x_TD, weight_D, residual_TD, eps, kind)  # type: ignore[no-untyped-call]
    y_TD, h_TD = (outputs, x_TD) if residual_TD is None else outputs
    return y_TD, h_TD
