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
        self, parent: nn.Module, name: str, one_plus: bool, slot: str = "", *, width: int = 0, centered: bool = False,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        """`parent`, `name`: where the module is; another one may take its place (compat/outer_loop.py). `width`: that of its
        weight, if it has none. `factor`: of its output; not with `one_plus`."""
        self.parent, self.name, self.module, self.factor = parent, name, getattr(parent, name), factor
        self.one_plus, self.slot, self.width, self.centered = one_plus, slot, width, centered
        self.form: dict[str, Any] = {"one_plus": one_plus, "centered": centered}  # for the kernels
        self._ones: Tensor | None = None
        self._scaled: Tensor | None = None
        self.rstd = f"rstd.{slot}"  # its name among the saved tensors

    @property
    def eps(self) -> float:
        found = getattr(self.module, "variance_epsilon", None)
        return float(self.module.eps if found is None else found)

    @property
    def own(self) -> Tensor | None:
        """The parameter."""
        found: Tensor | None = getattr(self.module, "weight", None)
        return found

    @property
    def weight(self) -> Tensor:
        """What the kernels multiply by: ones, if the module has no weight."""
        own = self.own if self.own is not None else self._made()
        if self.factor == 1.0:
            return own
        wide = own.to(torch.promote_types(own.dtype, torch.float32))
        if own.requires_grad and torch.is_grad_enabled():
            return wide * self.factor
        if self._scaled is None or (self._scaled.device, self._scaled.dtype) != (wide.device, wide.dtype):
            with torch.inference_mode(mode=False):
                self._scaled = torch.empty_like(wide)  # always there: gather jobs and graphs read it
        return torch.mul(wide.detach(), self.factor, out=self._scaled)

    def _made(self) -> Tensor:
        device = next(self.parent.parameters()).device
        if self._ones is None or self._ones.device != device:
            with torch.inference_mode(mode=False):  # backward saves it
                self._ones = torch.full((self.width,), 0.0 if self.one_plus else 1.0, device=device)
        return self._ones

    @property
    def parameters(self) -> list[Tensor]:
        return [] if self.own is None else [self.own]

    def trains(self) -> bool:
        return self.own is not None and self.own.requires_grad

    def forward(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        return rms_norm_forward(x, self.weight, self.eps, **self.form, **options)

    def then_add(self, x: Tensor, h: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(h + norm(x), rstd)"""
        return rms_norm_then_add_forward(x, self.weight, self.eps, h, **self.form, out=out)

    def backward(self, dy: Tensor, x: Tensor, saved: Saved, out: Tensor, add: Tensor | None = None) -> Tensor:
        """The gradient of x, plus `add`, in `out`; the weight's goes into `saved.norm_grads`."""
        found, grad = rms_norm_backward(
            dy, x, self.weight, saved[self.rstd], add_TD=add, need_weight_grad=self.trains(), out=out, **self.form
        )
        saved.norm_grads[self.slot] = grad if grad is None or self.factor == 1.0 else grad.mul_(self.factor)
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
