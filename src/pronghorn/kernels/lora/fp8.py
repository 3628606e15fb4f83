"""Frozen linears that share an input, FP8 forward and backward, with their adapters in the same GEMM: lora_linear.py in FP8.

T = packed tokens, D = width of the input, O = rows of all the linears together, R = ranks of all their adapters together, a
multiple of 16, E = 3R. The frozen weight is W = q * scale, q in e4m3 [O, D], scale fp32 [O]. One buffer holds all operands:

    M [O + E, D + E] = [ q    sB ]           sB and A as fp8_lora.py splits them
                       [ A    -  ]

    forward     y  = [x8 | x A^T]   M[:O]^T           * x_scale_T * scale_O      x8, x_scale = cast of x
    backward    dx = [dy8 | dy sB]  M[:, :D]          * dy_scale_T               dy8, dy_scale = cast of dy * scale_O

Backward folds the weight's scales into dy before casting dy, so the same bytes serve both passes. torch._scaled_mm needs the
summed dimension contiguous in both operands, so backward takes M[:, :D] transposed, [D, O + E] (`transposed`: into a buffer
that all layers share, or saved). All else that adapters need is bf16: x, x A^T, dy, dy sB. Weight gradients of trained linears
are bf16 GEMMs of bf16 dy and x (`fp8_linear`).

torch._scaled_mm, as of torch 2.11 on a GPU: a row-major, b column-major, inner and b's outer dimension multiples of 16, scales
fp32, contiguous, [T, 1] and [1, O], output bf16, whose rows may be strided, bias bf16. On the CPU: fp32, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.lora.fp8_lora import SplitJob, SplitTable, fp8_extend
from pronghorn.kernels.lora.lora_linear import Adapter, AdapterGroup, linear_backward_weight
from pronghorn.kernels.lora.multi_copy import CopyJob, CopyTable
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_cast_rows, fp8_dequantize, fp8_pitch, fp8_rows, fp8_transpose
from pronghorn.kernels.runtime.first_order import Ctx
from pronghorn.kernels.runtime.work import count_mm

RANK_MULTIPLE = 16  # inner dimensions of FP8 GEMMs are multiples of 16


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    """Column scales of dx, which has none: ones."""
    return torch.ones(1, count, dtype=torch.float32, device=device)


def fp8_mm(
    a8_TK: Tensor, scale_T: Tensor, b8_OK: Tensor, scale_O: Tensor | None, *, dtype: torch.dtype = torch.bfloat16,
    bias_O: Tensor | None = None, out: Tensor | None = None, fast_accumulation: bool = True,
) -> Tensor:  # fmt: skip
    """(a8 * scale_T) (b8 * scale_O)^T + bias, rounded once. Fast accumulation keeps the sum in the tensor cores, with about 14
    bits: a smaller error than the operands' rounding."""
    if a8_TK.is_meta:
        out = a8_TK.new_empty(len(a8_TK), len(b8_OK), dtype=dtype) if out is None else out
        count_mm(a8_TK, b8_OK.T, out)
        return out
    if not a8_TK.is_cuda:
        scale = scale_T[:, None] if scale_O is None else scale_T[:, None] * scale_O
        y = (a8_TK.float() @ b8_OK.float().T) * scale
        y = (y if bias_O is None else y + bias_O).to(dtype)
        return y if out is None else out.copy_(y)
    options: dict[str, Any] = {"out_dtype": dtype, "use_fast_accum": fast_accumulation, "bias": bias_O}
    if out is not None:
        options |= {"out": out, "out_dtype": out.dtype}
    columns = _ones(len(b8_OK), a8_TK.device) if scale_O is None else scale_O[None, :]
    y_TO: Tensor = torch._scaled_mm(a8_TK, b8_OK.T, scale_T[:, None], columns, **options)
    return y_TO


class Fp8Group(AdapterGroup):
    """Linears that share an input, frozen in FP8, any subset of them with an adapter. The caller owns the adapters' parameters.

    A layer calls this; x8 is a buffer of `input_width` columns, dy8 one of `grad_width`.
        forward     a cast of x into x8[:, :D], with `bound`, gives scale;  xa = extend(x, x8, scale);  y = forward(x8, scale)
        backward    a cast of dy into dy8[:, :O], with `scale_O` and `bound_grad`, gives scale
                    dyb = extend_grad(dy, dy8, scale);  dx = backward_input(dy8, scale, transposed(buffer))
                    adapter_grads(dy, dyb, x, xa), or add_adapter_grads: from bf16 tensors, as LoraGroup makes them
    """

    def __init__(
        self, weights: Sequence[tuple[Tensor, Tensor]], adapters: Sequence[Adapter] = (), *,
        dtype: torch.dtype = torch.bfloat16, shared: bool = False,
    ) -> None:  # fmt: skip
        """`weights`: (q, scale) of each linear. `shared`: the weights are stored in fewer bits, and M is rebuilt for each use
        in a buffer of the caller (`borrow`); q then only gives the shape, and may be on torch's meta device."""
        like = weights[0][1]
        self._lay_out([len(q) for q, _ in weights], weights[0][0].shape[1], adapters, RANK_MULTIPLE)
        self.dtype = dtype
        self.E = 3 * self.R
        self.scale_O = torch.cat([scale for _, scale in weights])
        self.A_RD = torch.zeros(self.R, self.D, dtype=dtype, device=like.device)
        self.sB_OR = torch.zeros(self.O, self.R, dtype=dtype, device=like.device)
        self.factors_2R = torch.zeros(2, self.R, dtype=torch.float32, device=like.device)
        self.bounds_2 = torch.zeros(2, dtype=torch.float32, device=like.device)
        self.M: Tensor | None = None
        self._columns_OE, self._rows_ED = self._place(None if shared else weights, like.device)
        self._copies, self._splits = CopyTable(self._copy_jobs()), SplitTable(self.split_jobs)
        self.refresh()

    def _place(self, weights: Sequence[tuple[Tensor, Tensor]] | None, device: torch.device) -> tuple[Tensor, Tensor]:
        """Puts the adapters' FP8 columns and rows into M, or beside it."""
        if weights is None:
            columns_OE = torch.zeros(self.O, self.E, dtype=E4M3, device=device)
            return columns_OE, torch.zeros(self.E, self.D, dtype=E4M3, device=device)
        if len(weights) == 1 and not self.R:
            self.M = weights[0][0]
        else:
            self.M = fp8_rows(self.O + self.E, self.D + self.E, device)
            self.M.view(torch.uint8).zero_()
            for rows, (q, _) in zip(self.rows, weights, strict=True):
                self.M[rows, : self.D] = q
        return self.M[: self.O, self.D :], self.M[self.O :, : self.D]

    def _copy_jobs(self) -> list[CopyJob]:
        jobs = []
        for adapter, columns in zip(self.adapters, self.columns, strict=True):
            jobs.append(CopyJob(adapter.A_RD, self.A_RD[columns], 1.0))
            jobs.append(CopyJob(adapter.B_OR, self.sB_OR[self.rows[adapter.linear], columns], adapter.scale))
        return jobs

    @property
    def jobs(self) -> list[CopyJob]:
        """For one `CopyTable` over all the groups of a model, followed by one `SplitTable` over all `split_jobs`."""
        return self._copies.jobs

    @property
    def split_jobs(self) -> list[SplitJob]:
        if not self.R:
            return []
        return [SplitJob(self.A_RD, self.sB_OR, self.scale_O, self._columns_OE, self._rows_ED, self.factors_2R, self.bounds_2)]

    def refresh(self) -> None:
        """Copies the adapters' current values, in bf16 and FP8. Two launches; a CUDA graph can capture them after a first
        run."""
        if self.R:
            self._copies.run()
            self._splits.run()

    def requantize(self, weights: Sequence[Tensor]) -> None:
        """Recomputes q and scale in place from trained weights: one launch each."""
        assert self.M is not None
        for rows, weight in zip(self.rows, weights, strict=True):
            self.scale_O[rows] = fp8_cast_rows(weight.detach(), out=self.M[rows, : self.D])[1]

    # ---- room --------------------------------------------------------------------------------------------------------

    @property
    def input_width(self) -> int:
        """Columns of x8."""
        return self.D + self.E

    @property
    def grad_width(self) -> int:
        """Columns of dy8, and of the transposed weight."""
        return self.O + self.E

    @property
    def bound(self) -> Tensor | None:
        """For the cast of x."""
        return self.bounds_2[:1] if self.R else None

    @property
    def bound_grad(self) -> Tensor | None:
        """For the cast of dy."""
        return self.bounds_2[1:] if self.R else None

    @property
    def matrix_bytes(self) -> int:
        """Bytes of M."""
        return (self.O + self.E) * fp8_pitch(self.input_width)

    @property
    def transposed_bytes(self) -> int:
        """Bytes of what `transposed` makes."""
        return self.D * fp8_pitch(self.grad_width)

    def weight_view(self, linear: int) -> Tensor:
        """q of one linear as a view of M."""
        assert self.M is not None
        return self.M[self.rows[linear], : self.D]

    def borrow(self, buffer: Tensor) -> None:
        """M is this flat e4m3 buffer from now on, with the adapters' part in place; the caller fills `weight_view`s."""
        self.M = buffer[: self.matrix_bytes].view(self.O + self.E, -1)[:, : self.input_width]
        if self.R:
            self.M[: self.O, self.D :] = self._columns_OE
            self.M[self.O :, : self.D] = self._rows_ED

    def transposed(self, buffer: Tensor | None = None) -> Tensor:
        """M[:, :D] as [D, O + E], in a flat e4m3 buffer or a new one: what `backward_input` takes."""
        assert self.M is not None
        out = None if buffer is None else buffer[: self.transposed_bytes].view(self.D, -1)[:, : self.grad_width]
        return fp8_transpose(self.M[:, : self.D], out)

    # ---- GEMMs -------------------------------------------------------------------------------------------------------

    def extend(self, x_TD: Tensor, x8_ext: Tensor, scale_T: Tensor) -> Tensor | None:
        """x A^T [T, R], which backward needs too; fills the last E columns of x8_ext with it."""
        if not self.R:
            return None
        xa_TR = mm(x_TD, self.A_RD.T)
        fp8_extend(xa_TR, scale_T, self.factors_2R[0], x8_ext[:, self.D :])
        return xa_TR

    def extend_grad(self, dy_TO: Tensor, dy8_ext: Tensor | None, scale_T: Tensor | None) -> Tensor | None:
        """dy sB [T, R]; fills the last E columns of dy8_ext with it, where there is one."""
        if not self.R:
            return None
        dyb_TR = mm(dy_TO, self.sB_OR)
        if dy8_ext is not None and scale_T is not None:
            fp8_extend(dyb_TR, scale_T, self.factors_2R[1], dy8_ext[:, self.O :])
        return dyb_TR

    def forward(self, x8_ext: Tensor, scale_T: Tensor, *, bias_O: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """y_TO. After `extend`."""
        assert self.M is not None
        return fp8_mm(x8_ext, scale_T, self.M[: self.O], self.scale_O, dtype=self.dtype, bias_O=bias_O, out=out)

    def backward_input(self, dy8_ext: Tensor, scale_T: Tensor, transposed_DK: Tensor, *, out: Tensor | None = None) -> Tensor:
        """dx_TD. After `extend_grad`."""
        return fp8_mm(dy8_ext, scale_T, transposed_DK, None, dtype=self.dtype, out=out)


# ---- one linear, differentiable ----------------------------------------------------------------------------------------------


def fp8_linear_reference(x_TD: Tensor, q_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Without the rounding of x and dy."""
    return torch.nn.functional.linear(x_TD, fp8_dequantize(q_OD, scale_O, x_TD.dtype), bias_O)


def fp8_linear_forward(x_TD: Tensor, q_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None = None) -> Tensor:
    x8_TD, x_scale_T = fp8_cast_rows(x_TD)
    return fp8_mm(x8_TD, x_scale_T, q_OD, scale_O, dtype=x_TD.dtype, bias_O=bias_O)


def fp8_linear_backward(dy_TO: Tensor, q_OD: Tensor, scale_O: Tensor, q_DO: Tensor | None = None) -> Tensor:
    """dx_TD. `q_DO`: the transposed weight, if available."""
    dy8_TO, dy_scale_T = fp8_cast_rows(dy_TO, scale_O)
    return fp8_mm(dy8_TO, dy_scale_T, fp8_transpose(q_OD) if q_DO is None else q_DO, None, dtype=dy_TO.dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, x_TD: Tensor, q_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None, weight_OD: Tensor | None
    ) -> Tensor:
        ctx.trains = weight_OD is not None and ctx.needs_input_grad[4]
        ctx.weight_dtype = None if weight_OD is None else weight_OD.dtype
        ctx.save_for_backward(q_OD, scale_O, *([x_TD] if ctx.trains else []))
        return fp8_linear_forward(x_TD, q_OD, scale_O, bias_O)

    @staticmethod
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        q_OD, scale_O, *kept = ctx.saved_tensors
        dy_TO = grad_outputs[0] if grad_outputs[0].stride(-1) == 1 else grad_outputs[0].contiguous()
        dx_TD = fp8_linear_backward(dy_TO, q_OD, scale_O) if ctx.needs_input_grad[0] else None
        dbias_O = dy_TO.sum(0) if ctx.needs_input_grad[3] else None
        return dx_TD, None, None, dbias_O, linear_backward_weight(dy_TO, kept[0], ctx.weight_dtype) if kept else None


def fp8_linear(
    x: Tensor, q_OD: Tensor, scale_O: Tensor, bias_O: Tensor | None = None, *, weight_OD: Tensor | None = None
) -> Tensor:
    """x W^T + bias in FP8, W = q * scale. Gradients for x, the bias and, if the linear is trained, `weight_OD`, from which
    q and scale were made: dW = dy^T x is a bf16 GEMM."""
    flat: Tensor = _Fp8Linear.apply(x.flatten(0, -2), q_OD, scale_O, bias_O, weight_OD)  # type: ignore[no-untyped-call]
    return flat.view(*x.shape[:-1], len(q_OD))
