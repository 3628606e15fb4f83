"""The norms of a layer, and their outputs in rows with LoRA columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_then_add_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.model.layers.saved import Saved
from pronghorn.model.rows import rows_like


class Norm:
    """A norm module's weight and eps, read at each use: optimizers, adapters and scripts may replace them.

    `slot`: its position in the layer (before_attention, after_attention, before_mlp, after_mlp, q_norm, k_norm).
    """

    def __init__(
        self, parent: nn.Module, name: str, one_plus: bool, slot: str = "", *, width: int = 0, centered: bool = False
    ) -> None:
        """`parent`, `name`: where the module is; another one may take its place (compat/outer_loop.py). `width`: that of its
        weight, if it has none."""
        self.parent, self.name, self.module = parent, name, getattr(parent, name)
        self.one_plus, self.slot, self.width, self.centered = one_plus, slot, width, centered
        self.form: dict[str, Any] = {"one_plus": one_plus, "centered": centered}  # for the kernels
        self._ones: Tensor | None = None
        self.rstd = f"rstd.{slot}"  # its name among the saved tensors

    @property
    def eps(self) -> float:
        found = getattr(self.module, "variance_epsilon", None)
        return float(self.module.eps if found is None else found)

    @property
    def weight(self) -> Tensor:
        """Ones, if the module has none."""
        own: Tensor | None = getattr(self.module, "weight", None)
        return own if own is not None else self._made()

    def _made(self) -> Tensor:
        device = next(self.parent.parameters()).device
        if self._ones is None or self._ones.device != device:
            with torch.inference_mode(mode=False):  # backward saves it
                self._ones = torch.full((self.width,), 0.0 if self.one_plus else 1.0, device=device)
        return self._ones

    @property
    def parameters(self) -> list[Tensor]:
        return [] if getattr(self.module, "weight", None) is None else [self.weight]

    def trains(self) -> bool:
        return self.weight.requires_grad

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return rms_norm_forward(x, self.weight, self.eps, **self.form, **options)

    def then_add(self, x: Tensor, h: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(h + norm(x), rstd)"""
        return rms_norm_then_add_forward(x, self.weight, self.eps, h, **self.form, out=out)

    def backward(self, dy: Tensor, x: Tensor, saved: Saved, out: Tensor, add: Tensor | None = None) -> Tensor:
        """The gradient of x, plus `add`, in `out`; the weight's goes into `saved.norm_grads`."""
        found, saved.norm_grads[self.slot] = rms_norm_backward(
            dy, x, self.weight, saved[self.rstd], add_TD=add, need_weight_grad=self.trains(), out=out, **self.form
        )
        return found


def normed_rows(
    norm: Norm | None, x: Tensor, extra: int, saved: Saved, residual: Tensor | None = None, multiplier: float = 1.0
) -> Tensor:
    """norm(x), or x, in rows with `extra` LoRA columns. With a residual, norm(residual + multiplier * x), with the sum written
    over x."""
    if residual is not None and multiplier != 1.0:
        x.mul_(multiplier)
    x_ext = rows_like(x, x.shape[1] + extra)
    out = x_ext[:, : x.shape[1]]
    if norm is None:
        copy_rows(x, out)
    else:
        saved[norm.rstd] = norm.forward(x, residual_TD=residual, out=out, in_place=True)[2]
    return x_ext
