"""The MLP as a mixture of experts.

T = packed tokens, D = model width, E = experts, K = experts a token, S = T * K rows sorted by expert, F = an expert's width.
Saved for backward (saved.py): *; adapters (kernels/moe/grouped_lora.py) in [ ]:

    x2 = norm(h2)                                        recomputed only if weights or adapters need it
   *logits_TE = x2 Wrouter                               their softmax, K largest and sort: *routing (kernels/moe/routing.py)
    x_S [| xa] = x2 of each row's token                  one gather; *xa
   *gu_S2F = x_S Wgu                                     one grouped GEMM over all experts; without a gate, up alone
    a_SF [| aa] = act(gate, up), with the expert's bias
    y_SD = a Wdown
    h3 = h2 + sum of each token's K rows of y, weighted  plus the down bias and a shared expert's output; or h2 + norm(*y2)

    dy = dh3 of each row's token, unweighted             one gather
    da = dy Wdown;  dgu, dweights, w a                   one kernel applies the routing weights
    dx2 = sum of each token's K rows of dgu Wgu, + dlogits Wrouter;  dh2 = dh3 + the norm's gradient

No token is dropped, whatever the balance. Shapes depend on T, E and K alone and the host never reads the routing, so a CUDA
graph can capture all of it. A shared expert is a `DenseMlp` of all tokens, with a gate (Qwen2-MoE) or without (GLM-4.5);
backward treats it as an expert with that gate, or 1, as its routing weight.

With FP8 stacks (model/experts.py) x2 is cast once per token and gathered as bytes; dy and dgu are cast with the scales of the
row's expert; router, shared expert's gate and adapters stay in 16 bits.

With `spread` (world.shard: experts) x_S and dy go to the ranks that have the experts, which treat the rows of all ranks as
tokens with one expert each; y, dx and dweights come back. Router, shared expert and the weighted sums are at home.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import Tensor

from pronghorn.hf_types import HFConfig
from pronghorn.kernels.lora.lora_linear import NormOf
from pronghorn.kernels.lora.multi_gather import GatherJob
from pronghorn.kernels.lora.shared_buffers import SharedBuffers
from pronghorn.kernels.moe.moe_combine import combine
from pronghorn.kernels.moe.moe_gated import ExpertActivation, expert_gated_backward, expert_gated_forward
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import Routing, Sigmoid, route_backward, routing_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.model.experts import ExpertStack, Router
from pronghorn.model.families import expert_groups, expert_kind, experts_per_token
from pronghorn.model.family import Family
from pronghorn.model.formats.experts import STACKS
from pronghorn.model.layers.composed import normed
from pronghorn.model.layers.group import Group
from pronghorn.model.layers.linears import LinearGroup
from pronghorn.model.layers.mlps.dense import DenseMlp
from pronghorn.model.layers.norms import Norm, normed_rows
from pronghorn.model.layers.operand import Operand
from pronghorn.model.layers.part import Around, Part
from pronghorn.model.layers.residual import back_through_norm, gradients_after_norm
from pronghorn.model.layers.saved import Level, Saved
from pronghorn.model.layers.types import Documents, ExpertRows, GradBuffer, Grads
from pronghorn.model.router_stats import BalancedLogits
from pronghorn.model.rows import rows_like


class ExpertsMlp(Part):
    before: Norm  # always there
    input = "h2"
    saves: ClassVar[tuple[str, ...]] = (
        "h2",
        "gu",
        "xa2",
        "logits",
        "ids",
        "weights",
        "order",
        "inverse",
        "offsets",
        "shared_gu",
        "shared_xa2",
        "shared_xa3",
        "shared_weight",
        "gate_xa",
        "y2",
        "counts",
        "weights_there",
    )

    def __init__(
        self,
        module: Any,
        family: Family,
        config: HFConfig,
        slot: int,
        buffers: SharedBuffers,
        around: Around,
        shared: DenseMlp | None = None,
        beside: Any = None,
    ) -> None:
        """`slot`: its number among the layers with experts. `shared`: the expert of all tokens, if there is one. `beside`: its
        module, if that is not in `module`."""
        super().__init__(around)
        assert family.experts
        experts = family.experts
        self.module, self.slot, self.beside = module, slot, beside
        self.K = experts_per_token(config)
        self.router = Router(module, experts.router, experts.choice_bias, wide=experts.float32)
        self.normalise = bool(getattr(config, "norm_topk_prob", True))
        scale = float(getattr(config, experts.scale)) if experts.scale else 1.0
        self.scale = scale * self.multiplier  # the branch is the weighted sum alone, where the multiplier is not 1
        self.tiny, self.biased = experts.tiny, experts.biased
        self.groups_of_experts = expert_groups(config) if experts.sigmoid else None
        self.expert_gate_up, self.expert_down = (
            ExpertStack(module, name, transposed=experts.transposed, buffers=buffers)
            for name in STACKS[0 if family.gated else 1]
        )
        self.spread: ExpertRows | None = None  # where ranks have some of the experts each
        self.shared, gate = shared, experts.shared_gate
        self.shared_gate = LinearGroup(module, (gate,), buffers) if gate and hasattr(module, gate) else None
        own = self.expert_down.module()
        self.expert_activation = ExpertActivation(expert_kind(config))
        if self.expert_activation.kind == "clamped":
            self.expert_activation = ExpertActivation("clamped", float(own.limit), float(own.alpha))

    @property
    def groups(self) -> tuple[Group, ...]:
        shared = () if self.shared is None else self.shared.groups
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return *shared, *gate, self.router, self.expert_gate_up, self.expert_down

    @property
    def extra(self) -> int:
        return 0 if self.shared is None else self.shared.extra

    @property
    def shape(self) -> tuple[Hashable, ...]:
        return self.K, self.groups_of_experts, self.expert_activation

    def protect(self, saved: Saved) -> None:
        if saved["shared_gu"] is not None:
            saved["shared_gu"] = saved["shared_gu"].clone()

    def gather_jobs(self) -> list[GatherJob]:
        of_norm = NormOf(self.before.weight, self.before.weight, self.before.one_plus)
        return [
            *([] if self.shared is None else self.shared.gather_jobs()),
            *([] if self.shared_gate is None else self.shared_gate.gather_jobs(of_norm)),
            *self.expert_gate_up.gather_jobs(),
            *self.expert_down.gather_jobs(),
        ]

    def _rule(self) -> dict[str, Any]:
        """Routing options, for kernels/moe/routing.py."""
        groups = self.groups_of_experts
        sigmoid = None if groups is None else Sigmoid(self.router.choice_bias_E, *groups, self.tiny)
        bias_E = self.router.choice_bias_E if self.biased else None
        return {"normalise": self.normalise, "scale": self.scale, "sigmoid": sigmoid, "bias_E": bias_E}

    # ---- forward -----------------------------------------------------------------------------------------------

    def forward(self, saved: Saved, level: Level, documents: Documents, rows: Tensor | None, norm_adds: bool) -> Tensor:
        self._to_gate_up(saved)
        if documents.load is not None:
            documents.load.add(self.slot, saved["logits"], saved["ids"], rows is not None)
        return self._after_gate_up(saved)

    def _to_gate_up(self, saved: Saved) -> None:
        """From the residual stream to gate and up."""
        h2, h_rows = saved["h2"], saved.pop("h_rows", None)
        extra = 0 if self.shared is None else self.shared.gate_up.extra
        x2_ext = normed_rows(self.before, h2, extra, saved, h_rows, self.multiplier)
        x2 = x2_ext[:, : h2.shape[1]]
        logits = self.router.forward(self.router_input(x2, saved))
        routing = self.routed(logits, saved)
        if self.spread is not None:
            counts, weights_S = self.spread.counts(routing.offsets_E1), routing.weights_TK.view(-1, 1)[routing.order_S.long()]
            saved.put(counts=counts, weights_there=self.spread.out(weights_S, counts))
        gu, xa2 = self.expert_gate_up.group.forward_tokens(self._sent(x2, saved, routing), self._there(saved, routing))
        saved.put(
            gu=gu,
            xa2=xa2,
            logits=logits,
            ids=routing.ids_TK,
            weights=routing.weights_TK,
            order=routing.order_S,
            inverse=routing.inverse_TK,
            offsets=routing.offsets_E1,
        )
        if self.shared is not None:
            shared_gu, shared_xa2 = self.shared.gate_up.apply_spare(Operand(x2_ext))
            saved.put(shared_gu=shared_gu, shared_xa2=shared_xa2)
        if self.shared_gate is not None:
            gate, xa = self.shared_gate.apply(self.shared_gate.of_norm(None, x2, saved))
            saved.put(gate_xa=self.shared_gate.owned(xa), shared_weight=torch.sigmoid(gate.to(routing.weights_TK.dtype)))

    def router_input(self, x2: Tensor, saved: Saved) -> Tensor:
        """What the router reads."""
        return x2

    def routed(self, logits: Tensor, saved: Saved) -> Routing:
        return routing_forward(logits, self.K, **self._rule())

    def _routing(self, saved: Saved) -> Routing:
        return Routing(*(saved[name] for name in ("ids", "weights", "order", "inverse", "offsets")))

    # ---- rows of other ranks --------------------------------------------------------------------------------------

    def _there(self, saved: Saved, routing: Routing) -> Routing:
        """The routing of the rows that this rank's experts get."""
        return routing if self.spread is None else self.spread.routing(saved["counts"], saved["weights_there"])

    def _sent(self, x_TD: Tensor, saved: Saved, routing: Routing) -> Tensor:
        """What takes the tokens' place there."""
        return x_TD if self.spread is None else self.spread.out(gather_rows(x_TD, routing.order_S, self.K), saved["counts"])

    def _returned(self, rows: Tensor, saved: Saved, there: Routing) -> Tensor:
        """Rows sorted by expert, as their tokens' rank has them."""
        return rows if self.spread is None else self.spread.back(combine(rows, there.inverse_TK), saved["counts"])

    def _after_gate_up(self, saved: Saved) -> Tensor:
        y, h2 = self.rows_out(saved), saved["h2"]
        base: Tensor | None = h2 if self.after is None else None
        if self.shared is not None:
            out, xa3 = self.shared.down.apply(self.shared.activated(saved["shared_gu"]))
            saved.put(shared_xa3=self.shared.down.owned(xa3))
            del xa3  # may be a part of the activation
            gate = saved["shared_weight"]
            if base is None:
                base = out if gate is None else out * gate.to(out.dtype)
            elif gate is not None:
                base = torch.addcmul(h2, out, gate.to(out.dtype))
            else:
                base = h2 + out if self.multiplier == 1.0 else torch.add(h2, out, alpha=self.multiplier)
        y2 = self.weighted(y, saved, base)
        if self.after is None:
            return y2
        h3, saved[self.after.rstd] = self.after.then_add(y2, h2)
        saved.put(y2=y2)
        return h3

    def rows_out(self, saved: Saved) -> Tensor:
        """What the experts make of their rows."""
        routing, down = self._routing(saved), self.expert_down.group
        there = self._there(saved, routing)
        a_ext = rows_like(saved["gu"], down.input_width)
        expert_gated_forward(
            saved["gu"],
            self.expert_activation,
            bias_EG=self.expert_gate_up.own_bias_EO,
            ids_TK=there.ids_TK,
            order_S=there.order_S,
            out=a_ext[:, : down.D],
        )
        down.extend(a_ext, there.offsets_E1)
        return self._returned(down.forward_rows(a_ext, there), saved, there)

    def weighted(self, y_SD: Tensor, saved: Saved, base: Tensor | None) -> Tensor:
        """Each token's sum of its rows, and `base`."""
        routing, bias_ED = self._routing(saved), self.expert_down.bias_EO
        return combine(y_SD, routing.inverse_TK, routing.weights_TK, bias_ED=bias_ED, ids_TK=routing.ids_TK, add_TD=base)

    def recompute(self, saved: Saved, documents: Documents, rows: Tensor | None, norm_adds: bool) -> None:
        if "logits" not in saved:  # from the layer's input
            self._to_gate_up(saved)
            if self.after is not None:
                self._after_gate_up(saved)
            elif self.shared is not None and self.shared.down.adapters:
                saved.put(shared_xa3=self.shared.adapters_of(saved["shared_gu"]))
        elif saved["gu"] is None:
            routing = self._routing(saved)
            x2 = self._sent(self._recomputed_input(saved), saved, routing)
            saved["gu"], _ = self.expert_gate_up.group.forward_tokens(x2, self._there(saved, routing))

    def _recomputed_input(self, saved: Saved) -> Tensor:
        return self.before.forward(saved["h2"])[0]

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(
        self, dh: Tensor, saved: Saved, documents: Documents, rows: Tensor | None, extra: int, need_dh: bool
    ) -> tuple[Tensor, Grads]:
        dh3 = dh if self.after is None else self.after.backward(dh, saved["y2"], saved, torch.empty_like(dh))
        dx2, grads = self.backward_branch(dh3, saved, documents)
        dh2 = back_through_norm(self.before, dx2, saved["h2"], dh, saved, extra, documents.grad_buffer)
        saved.release(*self.saves)
        return dh2, self.all_gradients(grads, saved)

    def backward_branch(self, dh3: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor, Grads]:
        """(the gradient of x2, those of the groups), from that of the experts' sum."""
        routing, logits = self._routing(saved), saved["logits"]
        there = self._there(saved, routing)
        dgu_ext, dweights, down_grads = self._backward_down(dh3, saved, routing, there)
        dlogits = self.routed_backward(dweights, logits, saved, routing)
        if documents.load is not None:
            dlogits = documents.load.add_grad(dlogits, logits)
        dx2, shared_grads = self.backward_beside(dlogits, dh3, saved, documents)
        up = self.expert_gate_up.group
        up.extend_grad(dgu_ext, there.offsets_E1)
        dx_S = self._returned(self.expert_gate_up.backward_rows(dgu_ext, there), saved, there)
        dx2 = combine(dx_S, routing.inverse_TK, add_TD=dx2, out=dx2)
        x2 = self._recomputed_input(saved) if self.router.needs_input or self.expert_gate_up.needs_input else None
        x_router = self.router_input(x2, saved) if self.router.needs_input and x2 is not None else None
        router_grads = self.router.backward_parameters(dlogits, x_router)
        x_ext = None
        if self.expert_gate_up.needs_input and x2 is not None:
            x_ext = self._recomputed_sorted(self._sent(x2, saved, routing), saved["xa2"], there)
        up_grads = self.expert_gate_up.backward_parameters(dgu_ext, x_ext, there, weighted=False)
        return dx2, [*shared_grads, *router_grads, *up_grads, *down_grads]

    def routed_backward(self, dweights: Tensor, logits: Tensor, saved: Saved, routing: Routing) -> Tensor:
        return route_backward(dweights, logits, routing.weights_TK, routing.ids_TK, **self._rule())

    def backward_beside(self, dlogits: Tensor, dh3: Tensor, saved: Saved, documents: Documents) -> tuple[Tensor | None, Grads]:
        """(the gradient of x2 by what reads it beside the experts, those of a shared expert)"""
        dx2 = self.router.backward_input(dlogits)
        if self.shared is None:
            return dx2, []
        dshared, grads = self._backward_shared(self.shared, dh3, saved, documents.grad_buffer)
        return dx2.add_(dshared), grads

    def _backward_down(self, dh3: Tensor, saved: Saved, routing: Routing, there: Routing) -> tuple[Tensor, Tensor, Grads]:
        """(dgu with spare columns for gate and up's adapters, the routing weights' gradient, those of down's parameters)"""
        down, up = self.expert_down.group, self.expert_gate_up.group
        gu = saved.pop("gu")
        da, dy_ext = self.expert_down.backward_tokens(self._sent(dh3, saved, routing), there)
        dgu_ext = rows_like(da, up.grad_width) if up.R else gu
        needs_a = self.expert_down.needs_input
        a_ext = rows_like(da, down.input_width) if down.R else da
        _, dweights, _ = expert_gated_backward(
            da,
            gu,
            self.expert_activation,
            there.order_S,
            weights_TK=there.weights_TK,
            bias_EG=self.expert_gate_up.own_bias_EO,
            ids_TK=there.ids_TK,
            need_activation=needs_a,
            out=dgu_ext[:, : up.outputs],
            activation_out=a_ext[:, : down.D] if needs_a else None,
        )
        assert dweights is not None
        del gu
        if self.spread is not None:
            dweights = self.spread.back(dweights, saved["counts"])[:, 0][routing.inverse_TK.long()]
        if (bias_ED := self.expert_down.bias_EO) is not None:  # `combine` adds it before it weights
            dweights += torch.mm(dh3, bias_ED.T).to(dweights.dtype).gather(1, routing.ids_TK.long())
        if down.R:
            down.extend(a_ext, there.offsets_E1)
        grads = self.expert_down.backward_parameters(dy_ext, a_ext if needs_a else None, there, weighted=True)
        return dgu_ext, dweights, grads

    def _recomputed_sorted(self, x2: Tensor, xa2: Tensor | None, routing: Routing) -> Tensor:
        """x sorted by expert, recomputed; x A^T was saved."""
        group, K = self.expert_gate_up.group, routing.ids_TK.shape[1]
        if not group.R:
            return gather_rows(x2, routing.order_S, K)
        assert xa2 is not None
        x_ext = rows_like(xa2, group.input_width)
        gather_rows(x2, routing.order_S, K, out=x_ext[:, : group.D])
        copy_rows(xa2, x_ext[:, group.D :])
        return x_ext

    def _backward_shared(self, shared: DenseMlp, dh3: Tensor, saved: Saved, grad_buffer: GradBuffer) -> tuple[Tensor, Grads]:
        """(the shared expert's part of x2's gradient; gradients of gate and up, of down, and of its gate)"""
        weight, norm = saved["shared_weight"], self.before
        names = {"h2": "h2", norm.rstd: norm.rstd, "gu": "shared_gu", "xa2": "shared_xa2", "xa3": "shared_xa3"}
        its = Saved({name: saved[here] for name, here in names.items() if here in saved})
        if self.shared_gate is None:  # an expert with the same weight for all tokens
            wide = torch.promote_types(dh3.dtype, torch.float32)
            weight = torch.full((len(dh3), 1), self.multiplier, dtype=wide, device=dh3.device)
        dx, dweight, grads = shared.backward_weighted(dh3, weight, its, grad_buffer)
        if self.shared_gate is None:
            return dx, grads
        dlogit_ext = rows_like(dh3, 1 + self.shared_gate.extra)
        dlogit_ext[:, :1] = dweight * weight * (1 - weight)
        dgate_x, dlogit = self.shared_gate.back(Operand(dlogit_ext))
        dx += dgate_x
        gate_grads = gradients_after_norm(self.shared_gate, dlogit, norm, saved["h2"], saved["gate_xa"], saved)
        return dx, [*grads, *gate_grads]

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed(self, h_TD: Tensor, documents: Documents) -> Tensor:
        """The family's own module; only the mixer is ours then."""
        return h_TD + self.multiplier * normed(self.after, self._composed_branch(normed(self.before, h_TD), documents))

    def _composed_branch(self, x_TD: Tensor, documents: Documents) -> Tensor:
        found = self.module(x_TD[None])
        y_TD: Tensor = (found[0] if isinstance(found, tuple) else found)[0].to(x_TD.dtype)
        if self.beside is not None:
            y_TD = y_TD + self.beside(x_TD)
        return self.counted(y_TD, x_TD, documents)

    def counted(self, y_TD: Tensor, x_TD: Tensor, documents: Documents) -> Tensor:
        """y, of which autograd knows the auxiliary loss; the choices are counted. x: what the router reads."""
        if documents.load is None:
            return y_TD
        logits_TE = self.router.own_logits(x_TD)
        fixed = logits_TE.detach()
        documents.load.add(self.slot, fixed, routing_forward(fixed, self.K, **self._rule()).ids_TK, few=False)
        out: Tensor = BalancedLogits.apply(y_TD, logits_TE, documents.load)  # type: ignore[no-untyped-call]
        return out
