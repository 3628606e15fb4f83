"""Adds a layer's branch to the residual stream, with or without a norm after it, forward and backward.

A slot is a norm's position in the layer: before_attention, after_attention, before_mlp, after_mlp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import NormOf, Part
from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_then_add_forward
from pronghorn.model.layers.linears import LinearGroup, Operand
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import GradBuffer, Grads, Norm
from pronghorn.model.rows import rows_like

NormGrads = dict[str, Tensor | None]


def add_branch(
    group: LinearGroup,
    x: Operand,
    h: Tensor,
    multiplier: float,
    norm: Norm | None,
    saved: Saved,
    slot: str,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h + multiplier * group(x), None, x A^T), or (h + norm(group(x)), group(x), x A^T). `out` may be h."""
    if norm is None:
        h, xa = group.apply_add(x, h, multiplier, out)
        return h, None, xa
    y, xa = group.apply(x)
    h, saved[f"rstd.{slot}"] = rms_norm_then_add_forward(y, norm.weight, norm.eps, h, one_plus=norm.one_plus, out=out)
    return h, y, xa


def grad_of_branch(
    group: LinearGroup,
    dh: Tensor,
    y: Tensor | None,
    multiplier: float,
    norm: Norm | None,
    saved: Saved,
    slot: str,
    norm_grads: NormGrads,
    grad_buffer: GradBuffer,
) -> Operand:
    """The gradient of the branch's output, as the last GEMM's backward reads it."""
    if norm is None or y is None:
        return group.grad_of_residual(dh, multiplier, grad_buffer)
    dy = group.grad_rows(dh)
    _, norm_grads[slot] = rms_norm_backward(
        dh,
        y,
        norm.weight,
        saved[f"rstd.{slot}"],
        one_plus=norm.one_plus,
        need_weight_grad=norm.trains(),
        out=group.values_of(dy),
    )
    return dy


def back_through_norm(
    norm: Norm | None,
    dx: Tensor,
    h: Tensor,
    dh: Tensor,
    saved: Saved,
    slot: str,
    norm_grads: NormGrads,
    extra: int,
    grad_buffer: GradBuffer,
) -> Tensor:
    """dh + the norm's gradient, in rows with `extra` LoRA columns for the next group: over dh, if its buffer has them."""
    if norm is None:
        return dh + dx
    if grad_buffer.with_columns(dh, extra) is None:
        grad_buffer.buffer = rows_like(h, h.shape[1] + extra)
    assert grad_buffer.buffer is not None
    return _back_through_norm(norm, dx, h, dh, saved, slot, norm_grads, grad_buffer.buffer[:, : h.shape[1]])


def back_through_norm_into(
    out: Tensor, norm: Norm | None, dx: Tensor, h: Tensor, dh: Tensor, saved: Saved, slot: str, norm_grads: NormGrads
) -> None:
    """The same into `out`, which may be dh."""
    if norm is None:
        torch.add(dh, dx, out=out)
    else:
        _back_through_norm(norm, dx, h, dh, saved, slot, norm_grads, out)


def _back_through_norm(
    norm: Norm, dx: Tensor, h: Tensor, dh: Tensor, saved: Saved, slot: str, norm_grads: NormGrads, out: Tensor
) -> Tensor:
    found, norm_grads[slot] = rms_norm_backward(
        dx, h, norm.weight, saved[f"rstd.{slot}"], one_plus=norm.one_plus, add_TD=dh, need_weight_grad=norm.trains(), out=out
    )
    return found


def gradients_after_norm(
    group: LinearGroup,
    dy: Any,
    norm: Norm | None,
    h: Tensor,
    xa: Tensor | None,
    saved: Saved,
    slot: str,
    without: Part | None = None,
) -> Grads:
    """Adapters' gradients use h, which is saved; trained weights need norm(h), which is recomputed."""
    if norm is None:
        return group.gradients(dy, h, xa, without=without)
    if group.trains_weights:
        x = rms_norm_forward(h, norm.weight, norm.eps, one_plus=norm.one_plus)[0]
        return group.gradients(dy, x, xa)
    return group.gradients(dy, h, xa, NormOf(saved[f"rstd.{slot}"], norm.weight, norm.one_plus), without)
