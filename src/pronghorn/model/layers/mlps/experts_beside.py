"""Experts beside a dense MLP that have norms of their own (Gemma 4's 26B-A4B).

T = packed tokens, D = model width, E = experts, K = experts a token. n4 is the norm after both; saved for backward: *

   *shares_TK = softmax of the K largest of Wrouter (h2 / rms(h2) * s * D^-1/2)
    weights_TK = shares * factor of the expert
    sum = n5(mlp(n3(h2))) + n7(experts(n6(h2)))          made again in backward from *dense_y2 and *y2
    h3 = h2 + n4(sum)

A `DenseMlp` and what experts.py does for n6(h2), each called for its own branch. s and the factors train with all weights.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.moe.routing import Routing
from pronghorn.model.layers.composed import normed, projected
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.mlps.dense import DenseMlp
from pronghorn.model.layers.mlps.experts import ExpertsMlp
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.residual import back_through_norm, back_through_norm_into
from pronghorn.model.layers.saved import Saved
from pronghorn.model.layers.types import Documents, Grads

OF_DENSE = {name: f"dense_{name}" for name in ("gu", "xa2", "xa3", "y2")}
FACTOR = "per_expert_scale"


class RouterNorm(Norm):
    """Its module has no weight; the router multiplies by s."""

    @property
    def own(self) -> Tensor:
        scale: Tensor = self.parent.scale  # type: ignore[assignment]
        return scale


class ExpertsBesideMlp(ExpertsMlp):
    after: Norm
    saves = (*ExpertsMlp.saves, "shares", *OF_DENSE.values())

    def __init__(self, *arguments: Any, dense: DenseMlp, after_experts: Norm) -> None:
        """`arguments`: of ExpertsMlp, whose module is the layer."""
        super().__init__(*arguments)
        self.dense, self.after_experts = dense, after_experts
        self.of_router = RouterNorm(self.module.router, "norm", False, "before_router", factor=self.before.width**-0.5)

    @property
    def groups(self) -> tuple[Group, ...]:
        return *self.dense.groups, *super().groups

    @property
    def extra(self) -> int:
        return self.dense.extra

    @property
    def norms(self) -> list[Norm]:
        return [*self.dense.norms, *super().norms, self.after_experts, self.of_router]

    @property
    def bare_names(self) -> list[tuple[Any, str]]:
        return [(self.module.router, FACTOR)]

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return *super().shape, *self.dense.shape

    def protect(self, saved: Saved) -> None:
        if saved["dense_gu"] is not None:
            saved["dense_gu"] = saved["dense_gu"].clone()

    def gather_jobs(self) -> list[GatherJob]:
        return [*self.dense.gather_jobs(), *super().gather_jobs()]

    # ---- forward -----------------------------------------------------------------------------------------------

    def router_input(self, x2: Tensor, saved: Saved) -> Tensor:
        x_TD, _, saved[self.of_router.rstd] = self.of_router.forward(saved["h2"])
        return x_TD

    def routed(self, logits: Tensor, saved: Saved) -> Routing:
        routing = super().routed(logits, saved)
        saved.put(shares=routing.weights_TK)
        return replace(routing, weights_TK=routing.weights_TK * self.bare[0][routing.ids_TK.long()])

    def _after_gate_up(self, saved: Saved) -> Tensor:
        saved.put(y2=self.weighted(self.rows_out(saved), saved, None))
        its = Saved(h2=saved["h2"])
        self.dense.branch(its)
        saved.update({OF_DENSE.get(name, name): tensor for name, tensor in its.items()})
        h3, saved[self.after.rstd] = self.after.then_add(self._sum(saved), saved["h2"])
        return h3

    def _sum(self, saved: Saved) -> Tensor:
        """What the last norm reads."""
        of_dense, of_experts = self.dense.after, self.after_experts
        assert of_dense is not None
        out, _, saved[of_dense.rstd] = of_dense.forward(saved["dense_y2"])
        out, saved[of_experts.rstd] = of_experts.then_add(saved["y2"], out, out)
        return out

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor, Grads]:
        h2, dense = saved["h2"], self.dense
        dsum = self.after.backward(dh, self._sum(saved), saved, torch.empty_like(dh))
        its = Saved({name: saved[here] for name, here in OF_DENSE.items() if here in saved}, h2=h2)
        its.update({norm.rstd: saved[norm.rstd] for norm in dense.norms})
        saved.release(*OF_DENSE.values())
        dx, dense_grads = dense.backward_beside(dsum, its, documents)
        dh2 = back_through_norm(dense.before, dx, h2, dh, its, extra, documents.grad_buffer)
        saved.norm_grads |= its.norm_grads
        del its, dx
        self.after_experts.backward(dsum, saved["y2"], saved, dsum)
        dx, grads = self.backward_branch(dsum, saved, documents)
        back_through_norm_into(dh2, self.before, dx, h2, dh2, saved)
        back_through_norm_into(dh2, self.of_router, saved.pop("dx_router"), h2, dh2, saved)
        saved.release(*self.saves)
        return dh2, self.all_gradients([*dense_grads, *grads], saved, saved.norm_grads.get(FACTOR))

    def routed_backward(self, dweights: Tensor, logits: Tensor, saved: Saved, routing: Routing) -> Tensor:
        (factor_E,), ids_TK, shares_TK = self.bare, routing.ids_TK.long(), saved["shares"]
        if factor_E.requires_grad:  # by way of [T, E]: the same order of sums in every run
            each_TE = torch.zeros(logits.shape, dtype=dweights.dtype, device=logits.device)
            saved.norm_grads[FACTOR] = each_TE.scatter_(1, ids_TK, dweights * shares_TK).sum(0)
        its = replace(routing, weights_TK=shares_TK)
        return super().routed_backward(dweights * factor_E[ids_TK], logits, saved, its)

    def backward_beside(self, dlogits: Tensor, dh3: Tensor, saved: Saved, documents: Documents) -> tuple[None, Grads]:
        saved["dx_router"] = self.router.backward_input(dlogits)
        return None, []

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        dense, module = self.dense, self.module
        a = dense.composed_activation(projected(dense.gate_up, normed(dense.before, h_TD)))
        _, weights_TK, ids_TK = module.router(h_TD)
        y_TD = module.experts(normed(self.before, h_TD), ids_TK, weights_TK).to(h_TD.dtype)
        y_TD = self.counted(y_TD, normed(self.of_router, h_TD), documents)
        both = normed(dense.after, projected(dense.down, a)) + normed(self.after_experts, y_TD)
        return h_TD + normed(self.after, both)
