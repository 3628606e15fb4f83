"""The third part of a layer that has an input of its own (Gemma 4's E2B and E4B; model/inputs/by_layer.py).

T = packed tokens, D = model width, E = the input's width. Saved for backward (saved.py): *

   *h3                                        kept at every level: the MLP's backward would have to make it twice
   *g_TE = h3 Wgate
    a = act(g) * e                            e is given; the kernel of gate and up, on [g | e]
    h4 = h3 + norm(a Wout)                    *y3 = a Wout

g, y3 and x A^T are recomputed from h3 at the levels that recompute the layer: two products with E columns.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import ClassVar

import torch
from torch import Tensor

from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.mlp.gated_mlp import Kind, gated_activation, gated_activation_backward
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.operand import Operand
from pronghorn.model.layers.part import Around, Part
from pronghorn.model.layers.residual import add_branch, grad_of_branch
from pronghorn.model.layers.saved import FROM_INPUT, Kept, Level, Saved
from pronghorn.model.layers.types import Documents, Grads
from pronghorn.model.rows import rows_like, spread


class LayerInput(Part):
    input = "h3"
    saves = ("h3", "g", "xa4", "y3", "xa5")
    kept: ClassVar[Kept] = dict.fromkeys(FROM_INPUT, ("h3",))

    def __init__(self, around: Around, gate: LinearGroup, out: LinearGroup, width: int, activation: Kind) -> None:
        super().__init__(around)
        self.gate, self.out, self.width, self.activation = gate, out, width, activation

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.gate, self.out

    @property
    def extra(self) -> int:
        return self.out.extra

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return (self.activation,)

    @property
    def given(self) -> dict[str, tuple[int, ...]]:
        return {"e": (self.width,)}

    def gather_jobs(self) -> list[GatherJob]:
        return self.jobs_of(self.gate, self.out)

    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        h3 = saved["h3"]
        g, xa4 = self.gate.apply(self.gate.of_norm(None, h3, saved))
        saved.put(g=g, xa4=self.gate.owned(xa4))
        a = self.out.of_activation(_beside(g, saved["e"], rows), self.activation)
        h4, y3, xa5 = add_branch(self.out, a, h3, 1.0, self.after, saved)
        saved.put(y3=y3, xa5=self.out.owned(xa5))
        return h4

    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        if "g" not in saved:
            self.forward(saved, "nothing", documents, rows, False)

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor, Grads]:
        grad_buffer, needs_a = documents.grad_buffer, self.out.needs_input
        dy = grad_of_branch(self.out, dh, saved["y3"], 1.0, self.after, saved, grad_buffer)
        da, of_out = self.out.back(dy)
        ge = _beside(saved["g"], saved["e"], rows)
        gated_activation_backward(da, ge, self.activation, out=ge, need_activation=needs_a, activation_out=da)
        out_grads = self.out.gradients(of_out, da, saved["xa5"])
        del dy, da, of_out
        dg_ext = rows_like(dh, self.width + self.gate.extra)
        dg_ext[:, : self.width] = ge[:, : self.width]
        de = ge[:, self.width :]
        repeated = documents.prefix_2T is not None
        saved.given_grads["e"] = de if rows is None else spread(de, rows, len(saved["e"]), repeated=repeated)
        dx, of_gate = self.gate.back(Operand(dg_ext))
        gate_grads = self.gate.gradients(of_gate, saved["h3"], saved["xa4"])
        dh3 = dh.add_(dx) if grad_buffer.holds(dh) else dh + dx
        saved.release(*self.saves)
        return dh3, self.all_gradients([*gate_grads, *out_grads], saved)

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        a = gated_activation(_beside(projected(self.gate, h_TD), documents.given["e"], None), self.activation)
        return h_TD + normed(self.after, projected(self.out, a))


def _beside(g_TE: Tensor, e_TE: Tensor, rows: Tensor | None) -> Tensor:
    """[g | e], as gate and up; e of these rows."""
    return torch.cat([g_TE, e_TE if rows is None else e_TE.index_select(0, rows)], dim=1)
