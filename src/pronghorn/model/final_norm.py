"""The norm before the head. Its backward returns the gradient in rows with spare columns.

The last layer writes its LoRA columns there, as every layer does with the gradient from above (`GradBuffer`). Otherwise its
backward would hold a copy, T x D, at the memory peak of a step with long documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.types import GradBuffer
from pronghorn.model.rows import rows_like


def final_norm(h_ND: Tensor, norm: Norm, grad_buffer: GradBuffer, extra: int) -> Tensor:
    """norm(h). `extra`: columns that the layer below adds to the gradient."""
    return _FinalNorm.apply(h_ND, norm.weight, norm.eps, norm.form, grad_buffer, extra)  # type: ignore[no-untyped-call, no-any-return]


class _FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, h_ND: Tensor, weight_D: Tensor, eps: float, form: dict[str, Any], grad_buffer: GradBuffer, extra: int
    ) -> Tensor:
        y_ND, _, rstd_N = rms_norm_forward(h_ND, weight_D, eps, **form)
        ctx.save_for_backward(h_ND, weight_D, rstd_N)
        ctx.form, ctx.grad_buffer, ctx.extra = form, grad_buffer, extra
        return y_ND

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        h_ND, weight_D, rstd_N = ctx.saved_tensors
        dy_ND = incoming[0] if incoming[0].stride(-1) == 1 else incoming[0].contiguous()
        width = h_ND.shape[1]
        ctx.grad_buffer.buffer = rows_like(h_ND, width + ctx.extra)
        dh_ND, dw_D = rms_norm_backward(
            dy_ND,
            h_ND,
            weight_D,
            rstd_N,
            need_weight_grad=ctx.needs_input_grad[1],
            out=ctx.grad_buffer.buffer[:, :width],
            **ctx.form,
        )
        return dh_ND, None if dw_D is None else dw_D.to(weight_D.dtype), None, None, None, None
