"""Linears that share an input, of which some multiply in FP8 and the others in 16 bits, as one group: their outputs lie side by
side in one tensor, and so do the gradients of these.

T = packed tokens, D = input width. The norm that casts its rows to FP8 returns them in 16 bits, too, which the others read: a
copy of them with LoRA columns where they have adapters. For linears of few columns, whose output is an exponent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import NormOf, Part
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.operand import Operand, OutGrad
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import Grads
from pronghorn.model.rows import rows_like


class SplitLinears:
    """The part of a `LinearGroup`'s interface that mixers use. x A^T and dy sB are those of both, side by side."""

    def __init__(self, in_fp8: LinearGroup, wide: LinearGroup) -> None:
        self.in_fp8, self.wide = in_fp8, wide
        self.parts = in_fp8, wide

    def modules(self) -> list[Any]:
        return [*self.in_fp8.modules(), *self.wide.modules()]

    @property
    def extra(self) -> int:
        """LoRA columns behind the gradient of all outputs: those of the last ones."""
        return self.wide.extra

    @property
    def trains_weights(self) -> bool:
        return any(part.trains_weights for part in self.parts)

    def gather_jobs(self, norm: NormOf | None) -> list[GatherJob]:
        return [job for part in self.parts for job in part.gather_jobs(norm)]

    def of_norm(self, norm: Norm | None, x: Tensor, saved: Saved) -> Operand:
        return self.in_fp8.of_norm(norm, x, saved)

    def apply(self, x: Operand) -> tuple[Tensor, Tensor | None]:
        wide, outputs = x.rows, [sum(part.widths) for part in self.parts]
        if self.extra:
            wide = rows_like(x.rows, x.rows.shape[1] + self.extra)
            copy_rows(x.rows, wide[:, : x.rows.shape[1]], 1.0)
        y = rows_like(x.rows, sum(outputs))
        found = [
            part.gemms.apply(operand, out)[1]
            for part, operand, out in zip(self.parts, (x, Operand(wide)), y.split(outputs, dim=1), strict=True)
        ]
        return y, _joined(found)

    def owned(self, xa: Tensor | None) -> Tensor | None:
        return xa

    def _apart(self, dy: Operand) -> tuple[Operand, Operand]:
        """The LoRA columns are behind the wide ones'."""
        outputs = sum(self.in_fp8.widths)
        return Operand(dy.rows[:, :outputs]), Operand(dy.rows[:, outputs:])

    def _together(self, dy: Operand, grads: list[OutGrad]) -> OutGrad:
        return OutGrad(dy.rows[:, : dy.rows.shape[1] - self.extra], _joined([grad.dyb_TR for grad in grads]))

    def back(self, dy: Operand) -> tuple[Tensor, OutGrad]:
        (dx, one), (more, other) = (part.back(each) for part, each in zip(self.parts, self._apart(dy), strict=True))
        return dx.add_(more), self._together(dy, [one, other])

    def back_adapters(self, dy: Operand) -> OutGrad:
        return self._together(dy, [part.back_adapters(each) for part, each in zip(self.parts, self._apart(dy), strict=True)])

    def gradients(
        self, grad: OutGrad, x: Tensor, xa: Tensor | None, norm: NormOf | None = None, without: Part | None = None
    ) -> Grads:
        dys = grad.dy_TO.split([sum(part.widths) for part in self.parts], dim=1)
        found: Grads = []
        for part, dy, dyb, part_xa in zip(self.parts, dys, self._columns(grad.dyb_TR), self._columns(xa), strict=True):
            found += part.gradients(OutGrad(dy, dyb), x, part_xa, norm, without)
        return found

    def _columns(self, both: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Those of each part, which `_joined` put side by side."""
        ends = 0 if both is None else both.shape[1] - self.extra
        return (None, None) if both is None else (both[:, :ends], both[:, ends:])


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None and part.shape[1]]
    return torch.cat(there, dim=1) if there else None
