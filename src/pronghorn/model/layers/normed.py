"""A norm's output in rows with LoRA columns."""

from __future__ import annotations

from torch import Tensor

from pronghorn.kernels.norm.rms_norm import rms_norm_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import Norm
from pronghorn.model.rows import rows_like


def normed_rows(norm: Norm | None, h: Tensor, extra: int, saved: Saved, slot: str) -> Tensor:
    """norm(h), or h, in rows with `extra` LoRA columns."""
    x_ext = rows_like(h, h.shape[1] + extra)
    x = x_ext[:, : h.shape[1]]
    if norm is None:
        copy_rows(h, x)
    else:
        saved[f"rstd.{slot}"] = rms_norm_forward(h, norm.weight, norm.eps, one_plus=norm.one_plus, out=x)[2]
    return x_ext


def normed_sum(norm: Norm, y: Tensor, h: Tensor, multiplier: float, extra: int, saved: Saved, slot: str) -> Tensor:
    """norm(h + multiplier * y) in such rows, with the sum written over y."""
    if multiplier != 1.0:
        y.mul_(multiplier)
    x_ext = rows_like(h, h.shape[1] + extra)
    _, _, saved[f"rstd.{slot}"] = rms_norm_forward(
        y, norm.weight, norm.eps, one_plus=norm.one_plus, residual_TD=h, out=x_ext[:, : h.shape[1]], in_place=True
    )
    return x_ext
