"""RMSNorm of packed tokens, together with the residual addition before or after it.

    h = x + residual                         stored in x's dtype; the norm is of the stored, rounded h
    y = h * rstd * w                         rstd = 1 / sqrt(mean(h^2) + eps); w is 1 + w where `one_plus` (Gemma)

and, for families that norm the output of a branch (Gemma 2 and 3, OLMo 2):

    h = residual + x * rstd * w

T = packed tokens, D = model width. Rows may be strided (last dimension contiguous). Everything is computed in fp32 and
rounded once. Bound by memory: each tensor is read or written once, a row stays in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pronghorn.kernels.dispatch import jit, processor_count, tl, triton, use_triton


def rms_norm_reference(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, one_plus: bool = False, residual_TD: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (y, h)."""
    h_TD = x_TD if residual_TD is None else x_TD + residual_TD
    wide_TD = _wide(h_TD)
    scale_D = _scale(weight_D, one_plus, wide_TD.dtype)
    y_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps) * scale_D
    return y_TD.to(x_TD.dtype), h_TD


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scale(weight_D: torch.Tensor, one_plus: bool, dtype: torch.dtype) -> torch.Tensor:
    return weight_D.to(dtype) + 1 if one_plus else weight_D.to(dtype)


class Tile(NamedTuple):
    """Rows a program takes at a time, and its warps."""

    rows: int
    warps: int


# For `python -m benchmarks.ops --sweep rms_norm`.
CONFIGS = [Tile(rows, warps) for rows in (1, 2, 4) for warps in (2, 4, 8, 16)]
PROGRAMS_A_PROCESSOR = 4  # of the weight gradient: enough to hide the loads of one behind the arithmetic of another


def _tile(block: int) -> Tile:
    """16 values a thread: two 16-byte loads of each tensor in bf16, and three fp32 copies of a row fit the registers."""
    rows = max(1, 1024 // block)
    return Tile(rows, min(16, max(1, rows * block // 512)))


@jit
def _forward_kernel(
    x: tl.tensor, x_row: tl.tensor, residual: tl.tensor, residual_row: tl.tensor, weight: tl.tensor, y: tl.tensor,
    y_row: tl.tensor, h: tl.tensor, h_row: tl.tensor, rstd: tl.tensor, eps: tl.tensor, T: tl.tensor, D: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ONE_PLUS: tl.constexpr, ADD_BEFORE: tl.constexpr, ADD_AFTER: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < T)[:, None] & (column < D)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD_BEFORE or ADD_AFTER:
        other = tl.load(residual + row[:, None] * residual_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if ADD_BEFORE:
        stored = (value + other).to(h.dtype.element_ty)
        tl.store(h + row[:, None] * h_row + column[None, :], stored, mask=inside)
        value = stored.to(tl.float32)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 1) / D + eps)
    tl.store(rstd + row, inverse, mask=row < T)
    result = value * inverse[:, None] * scale[None, :]
    if ADD_AFTER:
        result += other
    tl.store(y + row[:, None] * y_row + column[None, :], result.to(y.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    dy: tl.tensor, dy_row: tl.tensor, h: tl.tensor, h_row: tl.tensor, weight: tl.tensor, rstd: tl.tensor, add: tl.tensor,
    add_row: tl.tensor, dx: tl.tensor, dx_row: tl.tensor, partial_dw: tl.tensor, T: tl.tensor, D: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, ONE_PLUS: tl.constexpr, HAS_ADD: tl.constexpr, NEED_DW: tl.constexpr,
) -> None:  # fmt: skip
    """Each program takes every num_programs-th group of rows; without a weight gradient that is exactly one."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    scale = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    dw = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(program * ROWS, T, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS).to(tl.int64)
        inside = (row < T)[:, None] & (column < D)[None, :]
        grad = tl.load(dy + row[:, None] * dy_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.load(h + row[:, None] * h_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row, mask=row < T, other=0.0)[:, None]
        normed = value * inverse
        if NEED_DW:
            dw += grad * normed
        grad = grad * scale[None, :]
        shared = tl.sum(grad * normed, 1) / D
        result = inverse * (grad - normed * shared[:, None])
        if HAS_ADD:
            result += tl.load(add + row[:, None] * add_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row[:, None] * dx_row + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
    if NEED_DW:
        tl.store(partial_dw + program * D + column, tl.sum(dw, 0), mask=column < D)


def _launch_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, one_plus: bool, residual_TD: torch.Tensor | None,
    out_TD: torch.Tensor, h_TD: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The sum goes to h_TD before the norm, or, where there is no h_TD, into the output after it. Returns rstd."""
    T, D = x_TD.shape
    rstd_T = torch.empty(T, dtype=torch.float32, device=x_TD.device)
    residual = x_TD if residual_TD is None else residual_TD
    h = x_TD if h_TD is None else h_TD
    block = triton.next_power_of_2(D)
    tile = _tile(block)
    _forward_kernel[(triton.cdiv(T, tile.rows),)](
        x_TD, x_TD.stride(0), residual, residual.stride(0), weight_D, out_TD, out_TD.stride(0), h, h.stride(0), rstd_T, eps, T,
        D=D, BLOCK=block, ROWS=tile.rows, ONE_PLUS=one_plus, ADD_BEFORE=h_TD is not None,
        ADD_AFTER=residual_TD is not None and h_TD is None, num_warps=tile.warps,
    )  # fmt: skip
    return rstd_T


def _normed(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, one_plus: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch: the norm in fp32 and rstd."""
    wide_TD = _wide(x_TD)
    rstd_T = torch.rsqrt(wide_TD.square().mean(-1) + eps)
    return wide_TD * rstd_T[:, None] * _scale(weight_D, one_plus, wide_TD.dtype), rstd_T


def rms_norm_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, one_plus: bool = False,
    residual_TD: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (y, h, rstd); without a residual h is x itself."""
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    if use_triton(x_TD):
        h_TD = None if residual_TD is None else torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        rstd_T = _launch_forward(x_TD, weight_D, eps, one_plus, residual_TD, y_TD, h_TD)
        return y_TD, x_TD if h_TD is None else h_TD, rstd_T
    h_TD = x_TD if residual_TD is None else x_TD + residual_TD
    normed_TD, rstd_T = _normed(h_TD, weight_D, eps, one_plus)
    return y_TD.copy_(normed_TD), h_TD, rstd_T


def rms_norm_then_add_forward(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_TD: torch.Tensor, *, one_plus: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns (residual + norm(x), rstd). Backward: dx is rms_norm_backward(dh, x, weight, rstd), the residual's is dh."""
    h_TD = torch.empty(x_TD.shape, dtype=residual_TD.dtype, device=x_TD.device) if out is None else out
    if use_triton(x_TD):
        return h_TD, _launch_forward(x_TD, weight_D, eps, one_plus, residual_TD, h_TD, None)
    normed_TD, rstd_T = _normed(x_TD, weight_D, eps, one_plus)
    return h_TD.copy_(normed_TD + residual_TD), rstd_T


def rms_norm_backward(
    dy_TD: torch.Tensor, h_TD: torch.Tensor, weight_D: torch.Tensor, rstd_T: torch.Tensor, *, one_plus: bool = False,
    add_TD: torch.Tensor | None = None, need_weight_grad: bool = False, out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns (dx + add, dw in fp32 or None). `add` is what arrives over the residual stream; `out` may be dy or add.

    The weight gradient is the same in every run: each program sums its own rows, a second sum adds the programs.
    """
    T, D = h_TD.shape
    dx_TD = torch.empty(h_TD.shape, dtype=h_TD.dtype, device=h_TD.device) if out is None else out
    if not use_triton(h_TD):
        grad_TD, normed_TD = _wide(dy_TD), _wide(h_TD) * rstd_T[:, None]
        dw_D = (grad_TD * normed_TD).sum(0) if need_weight_grad else None
        grad_TD = grad_TD * _scale(weight_D, one_plus, grad_TD.dtype)
        result_TD = rstd_T[:, None] * (grad_TD - normed_TD * (grad_TD * normed_TD).mean(-1, keepdim=True))
        return dx_TD.copy_(result_TD if add_TD is None else result_TD + add_TD), dw_D
    block = triton.next_power_of_2(D)
    tile = _tile(block)
    programs = triton.cdiv(T, tile.rows)
    if need_weight_grad:
        programs = min(programs, PROGRAMS_A_PROCESSOR * processor_count(h_TD.device))
    partial_PD = torch.empty(programs if need_weight_grad else 1, D, dtype=torch.float32, device=h_TD.device)
    add = dy_TD if add_TD is None else add_TD
    _backward_kernel[(programs,)](
        dy_TD, dy_TD.stride(0), h_TD, h_TD.stride(0), weight_D, rstd_T, add, add.stride(0), dx_TD, dx_TD.stride(0), partial_PD,
        T, D=D, BLOCK=block, ROWS=tile.rows, ONE_PLUS=one_plus, HAS_ADD=add_TD is not None, NEED_DW=need_weight_grad,
        num_warps=tile.warps,
    )  # fmt: skip
    return dx_TD, partial_PD.sum(0) if need_weight_grad else None


class _RmsNorm(torch.autograd.Function):
    """(y, h) of x and residual, or y alone of x."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, weight_D: torch.Tensor, residual_TD: torch.Tensor | None, eps: float, one_plus: bool
    ) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        y_TD, h_TD, rstd_T = rms_norm_forward(x_TD, weight_D, eps, one_plus=one_plus, residual_TD=residual_TD)
        ctx.save_for_backward(h_TD, weight_D, rstd_T)
        ctx.one_plus, ctx.has_residual = one_plus, residual_TD is not None
        ctx.set_materialize_grads(False)
        return y_TD if residual_TD is None else (y_TD, h_TD)

    @staticmethod
    def backward(ctx: Any, dy_TD: torch.Tensor | None, dh_TD: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        h_TD, weight_D, rstd_T = ctx.saved_tensors
        if dy_TD is None:
            return dh_TD, None, dh_TD, None, None
        dx_TD, dw_D = rms_norm_backward(
            _rows(dy_TD), h_TD, weight_D, rstd_T, one_plus=ctx.one_plus, add_TD=None if dh_TD is None else _rows(dh_TD),
            need_weight_grad=ctx.needs_input_grad[1],
        )  # fmt: skip
        dw_D = None if dw_D is None else dw_D.to(weight_D.dtype)
        return dx_TD, dw_D, dx_TD if ctx.has_residual else None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Contiguous along the last dimension, as the kernels need it; autograd may hand over expanded tensors."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, one_plus: bool = False, residual_TD: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Differentiable; returns (y, h), h = x + residual."""
    outputs = _RmsNorm.apply(x_TD, weight_D, residual_TD, eps, one_plus)  # type: ignore[no-untyped-call]
    y_TD, h_TD = (outputs, x_TD) if residual_TD is None else outputs
    return y_TD, h_TD
