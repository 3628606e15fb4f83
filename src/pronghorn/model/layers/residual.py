"""Adds a layer's branch to the residual stream, with or without a norm after it, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import NormOf, Part
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.operand import Operand, OutGrad
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.split_linears import SplitLinears
from pronghorn.model.layers.types import GradBuffer, Grads
from pronghorn.model.rows import rows_like


def add_branch(
    group: LinearGroup, x: Operand, h: Tensor, multiplier: float, norm: Norm | None, saved: Saved, out: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h + multiplier * group(x), None, x A^T), or (h + norm(group(x)), group(x), x A^T). `out` may be h."""
    if norm is None:
        h, xa = group.apply_add(x, h, multiplier, out)
        return h, None, xa
    y, xa = group.apply(x)
    h, saved[norm.rstd] = norm.then_add(y, h, out)
    return h, y, xa


def grad_of_branch(
    group: LinearGroup, dh: Tensor, y: Tensor | None, multiplier: float, norm: Norm | None, saved: Saved, buffer: GradBuffer
) -> Operand:
    """The gradient of the branch's output, as the last GEMM's backward reads it. `buffer`: that of dh."""
    if norm is None or y is None:
        return group.grad_of_residual(dh, multiplier, buffer)
    dy_ext = rows_like(dh, dh.shape[1] + group.extra)
    norm.backward(dh, y, saved, dy_ext[:, : dh.shape[1]])
    return Operand(dy_ext)


def back_through_norm(
    norm: Norm | None, dx: Tensor, h: Tensor, dh: Tensor, saved: Saved, extra: int, grad_buffer: GradBuffer
) -> Tensor:
    """dh + the norm's gradient, in rows with `extra` LoRA columns for the next group: over dh, if its buffer has them."""
    if norm is None:
        return dh + dx
    if grad_buffer.with_columns(dh, extra) is None:
        grad_buffer.buffer = rows_like(h, h.shape[1] + extra)
    assert grad_buffer.buffer is not None
    return norm.backward(dx, h, saved, grad_buffer.buffer[:, : h.shape[1]], add=dh)


def back_through_norm_into(out: Tensor, norm: Norm | None, dx: Tensor, h: Tensor, dh: Tensor, saved: Saved) -> None:
    """The same into `out`, which may be dh."""
    if norm is None:
        torch.add(dh, dx, out=out)
    else:
        norm.backward(dx, h, saved, out, add=dh)


def gradients_after_norm(
    group: LinearGroup | SplitLinears, dy: OutGrad, norm: Norm | None, h: Tensor, xa: Tensor | None, saved: Saved,
    without: Part | None = None,
) -> Grads:  # fmt: skip
    """Adapters' gradients use h, which is saved; trained weights need norm(h), which is recomputed."""
    if norm is None:
        return group.gradients(dy, h, xa, without=without)
    if group.trains_weights or norm.centered:
        return group.gradients(dy, norm.forward(h)[0], xa, without=without)
    return group.gradients(dy, h, xa, NormOf(saved[norm.rstd], norm.weight, norm.one_plus), without)
