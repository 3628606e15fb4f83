"""A dense MLP without a gate: h3 = h2 + act(x2 Wup) Wdown, act = relu^2 or xIELU (kernels/mlp/ungated_mlp.py).

What `DenseMlp` calls gate and up is one linear here, as wide as the activation. The activation is a kernel of its own, never in
a GEMM's epilogue, and in FP8 a second kernel casts its output. xIELU's two numbers are parameters of its module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from pronghorn.kernels.mlp.ungated_mlp import (
    Scalars,
    ungated_activation,
    ungated_activation_backward,
    ungated_activation_forward,
)
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.mlps.dense import DenseMlp
from pronghorn.model.layers.operand import Operand
from pronghorn.model.layers.part import Around
from pronghorn.model.layers.saved import Saved
from pronghorn.model.rows import rows_like

ALPHAS = ("alpha_p", "alpha_n")


class UngatedMlp(DenseMlp):
    def __init__(self, around: Around, up: LinearGroup, down: LinearGroup, activation: str, module: nn.Module | None) -> None:
        """`module`: that of the activation, if it has parameters."""
        super().__init__(around, up, down, activation)
        self.module: Any = module

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        return [] if self.module is None else [(self.module, name) for name in ALPHAS]

    @property
    def scalars(self) -> Scalars | None:
        """None: relu^2."""
        own = self.module
        return None if own is None else Scalars(own.alpha_p, own.alpha_n, own._beta_scalar, own._eps_scalar)

    def composed_activation(self, u: Tensor) -> Tensor:
        return ungated_activation(u, self.scalars)

    def gated_at_once(self, x2: Operand) -> None:
        return None

    def activated(self, u_ext: Tensor) -> Operand:
        width = u_ext.shape[1] - self.gate_up.extra
        a_ext = rows_like(u_ext, width + self.down.extra)
        ungated_activation_forward(u_ext[:, :width], self.scalars, out=a_ext[:, :width])
        return Operand(a_ext)

    def adapters_of(self, u_ext: Tensor) -> Tensor | None:
        """By running its GEMM again."""
        return self.down.owned(self.down.apply(self.activated(u_ext))[1])

    def back_through_activation(self, da: Tensor, dy: Operand, saved: Saved, *, thin: bool) -> tuple[Operand, bool]:
        u = saved["gu"][:, : da.shape[1]]
        _, _, of_alphas = ungated_activation_backward(
            da,
            u,
            self.scalars,
            need_activation=self.down.needs_input,
            need_alpha=any(parameter.requires_grad for parameter in self.bare),
            out=u,
            activation_out=da,
        )
        if of_alphas is not None:  # summed over chunks like the norms'
            saved.norm_grads |= dict(zip(ALPHAS, of_alphas.split(1), strict=True))
        return Operand(saved["gu"]), False
