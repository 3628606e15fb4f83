"""The decoder layer (decoder_layer.py) with a router and a stack of experts for an MLP: the same one node, and what it keeps.

T = packed tokens, D = model width, E = experts, K = experts a token, S = T * K rows sorted by expert, F = an expert's width.
Attention is the other file's. Behind it, with what is kept for backward marked * and adapters (grouped_lora.py) in [ ]:

   *h2, x2 = h + o Wo, norm(h2)                          x2 again in backward only where weights or adapters need it
   *logits_TE = x2 Wrouter                               their softmax, K largest and sort: *routing (kernels/moe/routing.py)
    x_S [| xa] = x2 of each row's token                  one gather; *xa
   *gu_S2F = x_S Wgu                                     one grouped product over all experts
    a_SF [| aa] = act(gate, up), with the expert's bias
    y_SD = a Wdown
    h3 = h2 + sum of each token's K rows of y, weighted  the down bias in it; a shared expert's output, too

    dy = dh3 of each row's token, unweighted             one gather
    da = dy Wdown;  dgu, dweights, w a                   one kernel: the routing weights come in here
    dx2 = sum of each token's K rows of dgu Wgu, + dlogits Wrouter;  dh2 = dh3 + norm's share

Every token keeps its K experts: none is dropped, whatever the balance. Shapes are T, E and K's alone and the host never learns
where rows went, so all of it captures in a CUDA graph. A shared expert is an ordinary gated MLP of all tokens, times a gate
(Qwen2-MoE) or not (GLM-4.5); it is backward's trick again: an expert with that gate, or 1, for a routing weight.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_collect import CollectJob
from pronghorn.kernels.lora.lora_linear import NormOf
from pronghorn.kernels.moe.moe_combine import combine
from pronghorn.kernels.moe.moe_gated import ExpertActivation, expert_gated_backward, expert_gated_forward
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.moe.routing import Routing, Sigmoid, route_backward, routing_forward
from pronghorn.kernels.norm.rms_norm import rms_norm_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.model.decoder_layer import Documents, FastDecoderLayer
from pronghorn.model.expert_load import BalancedLogits
from pronghorn.model.experts import ExpertStack, Router
from pronghorn.model.families import Family, expert_groups
from pronghorn.model.fp8_projections import Fp8Workspace
from pronghorn.model.kept import Attended, Input, Kept, Left, Level, come_back
from pronghorn.model.projections import Group, Projections
from pronghorn.model.rows import rows_like

Grads = list[Tensor | None]
SILU = ExpertActivation("silu")


@dataclass
class MoeKept(Kept):
    """`gu` and `xa2` are the experts', [S, ..]."""

    logits: Tensor | None = None
    ids: Tensor | None = None
    weights: Tensor | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None
    offsets: Tensor | None = None
    shared_gu: Tensor | None = None  # with room behind it for its gradient's extra columns
    shared_xa2: Tensor | None = None
    shared_xa3: Tensor | None = None
    shared_weight: Tensor | None = None  # [T, 1]: the sigmoid of the shared expert's gate
    gate_xa: Tensor | None = None
    xa_o: Tensor | None = None  # behind attention, where o_ext has no columns for it (fp8_moe_layer.py)

    @property
    def routing(self) -> Routing:
        parts = (self.ids, self.weights, self.order, self.inverse, self.offsets)
        assert all(part is not None for part in parts)
        return Routing(*parts)  # type: ignore[arg-type]

    def release(self, *names: str) -> None:
        """With gate and up go all the others of the MLP."""
        own = {f.name for f in fields(self)} - _OF_ATTENTION if "gu" in names else ()
        super().release(*names, *own)


_OF_ATTENTION = {f.name for f in fields(Kept)} | {"xa_o"}


class MoeDecoderLayer(FastDecoderLayer):
    def __init__(self, layer: Any, family: Family, config: Any, index: int, slot: int, workspace: Fp8Workspace) -> None:
        """`slot`: its number among the layers with experts. `workspace`: shared by all layers, for stacks in FP8."""
        super().__init__(layer, family, config, index)
        assert family.experts
        mlp, experts = layer.mlp, family.experts
        self.slot, self.K = slot, int(config.num_experts_per_tok)
        self.router = Router(mlp, experts.router, wide=experts.float32)
        self.normalise = bool(getattr(config, "norm_topk_prob", True))
        self.scale = float(getattr(config, experts.scale)) if experts.scale else 1.0
        self.groups_of_experts = expert_groups(config) if experts.sigmoid else None
        self.expert_gate_up, self.expert_down = (
            ExpertStack(mlp, name, transposed=experts.transposed, turned=workspace.turned)
            for name in ("gate_up_proj", "down_proj"))
        self.has_shared = hasattr(mlp, experts.shared)
        self.shared_gate = Projections(mlp, ("shared_expert_gate",) if hasattr(mlp, "shared_expert_gate") else ())
        self.groups = self._in_order()
        own = self.expert_down.module()
        self.expert_activation = SILU
        if experts.activation == "clamped":
            self.expert_activation = ExpertActivation("clamped", float(own.limit), float(own.alpha))

    def _in_order(self) -> tuple[Group, ...]:
        """As backward returns their gradients."""
        return (self.qkv, self.out, self.gate_up, self.down, self.shared_gate, self.router, self.expert_gate_up,
                self.expert_down)

    def _mlp_projections(self, mlp: Any) -> tuple[Projections, Projections]:
        """The shared expert's, of no linears where there is none."""
        assert self.family.experts
        shared = getattr(mlp, self.family.experts.shared, None)
        if shared is None:
            return Projections(mlp, ()), Projections(mlp, ())
        return Projections(shared, self.family.gate_up), Projections(shared, ("down_proj",))

    def _rule(self) -> dict[str, Any]:
        """How logits become weights, as kernels/moe/routing.py takes it."""
        groups = self.groups_of_experts
        sigmoid = None if groups is None else Sigmoid(self.router.choice_bias_E, *groups)
        return {"normalise": self.normalise, "scale": self.scale, "sigmoid": sigmoid}

    def in_pieces(self, level: Level) -> bool:
        """Never: rows of a piece would be too few for most experts."""
        return False

    def collect_jobs(self) -> list[CollectJob]:
        norm = self.before_mlp
        gate = self.shared_gate.collect_jobs(NormOf(norm.weight, norm.weight, norm.one_plus) if norm else None)
        return [*super().collect_jobs(), *gate, *self.expert_gate_up.collect_jobs(), *self.expert_down.collect_jobs()]

    # ---- forward -----------------------------------------------------------------------------------------------

    def forward(self, h: Tensor, documents: Documents, rows: Tensor | None = None) -> tuple[Tensor, Kept]:
        kept = self._to_gate_up(Input(h), documents, rows)
        if documents.load is not None and kept.logits is not None and kept.ids is not None:
            documents.load.add(self.slot, kept.logits, kept.ids, rows is not None)
        return self._behind_gate_up(kept), kept

    def _to_gate_up(self, given: Input, documents: Documents, rows: Tensor | None) -> MoeKept:
        seen = self.attended(given, documents, rows)
        x2_ext, h2, _ = self._to_mlp(seen.o_ext, seen.h_rows, seen.rstd)
        return self._routed(given.h, seen, x2_ext, h2)

    def _routed(self, h: Tensor, seen: Attended, x2_ext: Tensor, h2: Tensor) -> MoeKept:
        """From the MLP's input to gate and up."""
        x2 = x2_ext[:, : h2.shape[1]]
        logits = self.router.forward(x2)
        routing = routing_forward(logits, self.K, **self._rule())
        gu, xa2 = self.expert_gate_up.forward_tokens(x2, routing)
        kept = MoeKept(**vars(seen.kept(h, h2, gu=gu, xa2=xa2)), logits=logits, ids=routing.ids_TK,
                       weights=routing.weights_TK, order=routing.order_S, inverse=routing.inverse_TK,
                       offsets=routing.offsets_E1)
        if self.has_shared:
            kept.shared_gu, kept.shared_xa2 = self.gate_up_of(x2_ext)
        if self.shared_gate.names:
            x2_gate = x2 if not self.shared_gate.extra else rows_like(x2, x2.shape[1] + self.shared_gate.extra)
            if self.shared_gate.extra:
                copy_rows(x2, x2_gate[:, : x2.shape[1]])
            gate, behind = self.shared_gate.forward(x2_gate)
            kept.gate_xa = None if behind is None else behind.clone()
            kept.shared_weight = torch.sigmoid(gate.to(routing.weights_TK.dtype))
        return kept

    def _behind_gate_up(self, kept: MoeKept) -> Tensor:
        routing, down = kept.routing, self.expert_down.group
        assert kept.gu is not None
        a_ext = rows_like(kept.gu, down.input_width)
        expert_gated_forward(kept.gu, self.expert_activation, bias_EG=self.expert_gate_up.bias_EO, ids_TK=routing.ids_TK,
                             order_S=routing.order_S, out=a_ext[:, : down.D])
        down.extend(a_ext, routing.offsets_E1)
        y = self.expert_down.forward_rows(a_ext, routing)
        base = kept.h2
        if self.has_shared:
            assert kept.shared_gu is not None
            out, kept.shared_xa3 = self._shared_down(kept.shared_gu)
            gate = kept.shared_weight
            base = kept.h2 + out if gate is None else torch.addcmul(kept.h2, out, gate.to(out.dtype))
        return combine(y, routing.inverse_TK, routing.weights_TK, bias_ED=self.expert_down.bias_EO, ids_TK=routing.ids_TK,
                       add_TD=base)

    def _shared_down(self, gu_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        """(the shared expert's output, a A^T of its down's adapter)"""
        a_ext = self.activated(gu_ext)
        return self.down.forward(a_ext, extended=True)[0], self.behind_down(a_ext)

    def _shared_xa3(self, gu_ext: Tensor) -> Tensor | None:
        return self.behind_down(self.activated(gu_ext))

    def again(self, left: Left, documents: Documents, rows: Tensor | None) -> Kept:
        found = come_back(left, self.index, self.offload)
        if isinstance(found, Input):
            kept = self._to_gate_up(found, documents, rows)
            if self.has_shared and self.down.adapters:
                assert kept.shared_gu is not None
                kept.shared_xa3 = self._shared_xa3(kept.shared_gu)
            return kept
        assert isinstance(found, MoeKept)
        if found.gu is None:
            found.gu, _ = self.expert_gate_up.forward_tokens(self._mlp_input(found), found.routing)
        return found

    def _mlp_input(self, kept: Kept) -> Tensor:
        norm = self.before_mlp
        assert norm is not None
        return rms_norm_forward(kept.h2, norm.weight, norm.eps, one_plus=norm.one_plus)[0]

    # ---- backward ----------------------------------------------------------------------------------------------

    def _backward_mlp(self, dh3: Tensor, kept: Kept, documents: Documents, norm_grads: dict[str, Tensor | None]
                      ) -> tuple[Tensor, Grads]:
        """(the gradient of h2, the gradients of the groups' parameters behind attention, in their order)"""
        assert isinstance(kept, MoeKept)
        assert kept.logits is not None
        routing = kept.routing
        dgu_ext, dweights, down_grads = self._backward_down(dh3, kept, routing)
        dlogits = route_backward(dweights, kept.logits, routing.weights_TK, routing.ids_TK, **self._rule())
        if documents.load is not None:
            dlogits = documents.load.add_grad(dlogits, kept.logits)
        dx2 = self.router.backward_input(dlogits)
        shared_grads: Grads = []
        if self.has_shared:
            dshared, shared_grads = self._backward_shared(dh3, kept, documents, norm_grads)
            dx2 += dshared
        up = self.expert_gate_up.group
        up.extend_grad(dgu_ext, routing.offsets_E1)
        dx2 = combine(self.expert_gate_up.backward_rows(dgu_ext, routing), routing.inverse_TK, add_TD=dx2, out=dx2)
        x2 = self._mlp_input(kept) if self.router.needs_input or self.expert_gate_up.needs_input else None
        router_grads = self.router.backward_parameters(dlogits, x2 if self.router.needs_input else None)
        x_ext = None
        if self.expert_gate_up.needs_input and x2 is not None:
            x_ext = self._sorted_again(x2, kept, routing)
        up_grads = self.expert_gate_up.backward_parameters(dgu_ext, x_ext, routing, weighted=False)
        del dgu_ext, x_ext, x2
        dh2 = self._out_of_norm(self.before_mlp, dx2, kept.h2, dh3, kept.rstd, "before_mlp", norm_grads, self.out,
                                documents.room)
        return dh2, [*shared_grads, *router_grads, *up_grads, *down_grads]

    def _backward_down(self, dh3: Tensor, kept: MoeKept, routing: Routing) -> tuple[Tensor, Tensor, Grads]:
        """(dgu with room for gate and up's extra columns, the routing weights' gradient, those of down's parameters)"""
        down, up, offsets = self.expert_down.group, self.expert_gate_up.group, routing.offsets_E1
        assert kept.gu is not None
        da, dy_ext = self.expert_down.backward_tokens(dh3, routing)
        dgu_ext = rows_like(da, up.grad_width) if up.R else kept.gu
        needs_a = self.expert_down.needs_input
        a_ext = rows_like(da, down.input_width) if down.R else da
        _, dweights, _ = expert_gated_backward(
            da, kept.gu, self.expert_activation, routing.order_S, weights_TK=routing.weights_TK,
            bias_EG=self.expert_gate_up.bias_EO, ids_TK=routing.ids_TK, need_activation=needs_a,
            out=dgu_ext[:, : up.outputs], activation_out=a_ext[:, : down.D] if needs_a else None,
        )
        assert dweights is not None
        kept.gu = None
        if (bias_ED := self.expert_down.bias_EO) is not None:  # `combine` adds it before it weights
            dweights += torch.mm(dh3, bias_ED.T).to(dweights.dtype).gather(1, routing.ids_TK.long())
        if down.R:
            down.extend(a_ext, offsets)
        grads = self.expert_down.backward_parameters(dy_ext, a_ext if needs_a else None, routing, weighted=True)
        return dgu_ext, dweights, grads

    def _sorted_again(self, x2: Tensor, kept: MoeKept, routing: Routing) -> Tensor:
        """As forward had it; x A^T was kept."""
        group = self.expert_gate_up.group
        x_ext = rows_like(kept.xa2 if kept.xa2 is not None else x2, group.input_width) if group.R else None
        if x_ext is None:
            return gather_rows(x2, routing.order_S, self.K)
        assert kept.xa2 is not None
        gather_rows(x2, routing.order_S, self.K, out=x_ext[:, : group.D])
        copy_rows(kept.xa2, x_ext[:, group.D :])
        return x_ext

    def _backward_shared(self, dh3: Tensor, kept: MoeKept, documents: Documents, norm_grads: dict[str, Tensor | None]
                         ) -> tuple[Tensor, Grads]:
        """(its share of x2's gradient, the gradients of gate and up, down, and the gate)"""
        gate, gu_ext = kept.shared_weight, kept.shared_gu
        assert gu_ext is not None
        if gate is None:  # an expert that all tokens give the weight 1
            wide = torch.promote_types(dh3.dtype, torch.float32)
            always = torch.ones(len(dh3), 1, dtype=wide, device=dh3.device)
            dx, _, grads = self._backward_shared_mlp(dh3, always, gu_ext, kept, documents, norm_grads)
            return dx, grads
        dx, dgate, grads = self._backward_shared_mlp(dh3, gate, gu_ext, kept, documents, norm_grads)
        dlogit_ext = rows_like(dh3, 1 + self.shared_gate.extra)
        dlogit_ext[:, :1] = dgate * gate * (1 - gate)
        dx += self.shared_gate.backward_input(dlogit_ext)
        gate_grads = self.parameters_behind_norm(self.shared_gate, dlogit_ext, kept.h2, kept.gate_xa, kept.rstd, "before_mlp")
        return dx, [*grads, *gate_grads]

    def _backward_shared_mlp(self, dh3: Tensor, gate: Tensor, gu_ext: Tensor, kept: MoeKept, documents: Documents,
                             norm_grads: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Grads]:
        """(its input's gradient, the gate's, those of gate and up, and down)"""
        dy_ext = dh3
        if self.down.extra:
            dy_ext, _ = self.into_branch(dh3, None, None, kept.rstd, "after_mlp", norm_grads, self.down, documents.room)
        da = self.down.backward_input(dy_ext)
        gu = gu_ext[:, : 2 * da.shape[1]]
        dgate = self._through_shared_activation(da, gu, gate)
        xa3 = None if kept.shared_xa3 is None else kept.shared_xa3 * gate.to(kept.shared_xa3.dtype)
        down_grads = self.down.backward_parameters(dy_ext, da, xa3)
        dx = self.gate_up.backward_input(gu_ext)
        up_grads = self.parameters_behind_norm(self.gate_up, gu_ext, kept.h2, kept.shared_xa2, kept.rstd, "before_mlp")
        return dx, dgate, [*up_grads, *down_grads]

    def _through_shared_activation(self, da: Tensor, gu: Tensor, gate: Tensor) -> Tensor:
        """The gate's gradient. dgu takes gu's place, and the activation times the gate takes da's."""
        each = torch.arange(len(da), dtype=torch.int32, device=da.device)
        _, dgate, _ = expert_gated_backward(da, gu, SILU, each, weights_TK=gate, need_activation=self.down.needs_input, out=gu,
                                            activation_out=da)
        assert dgate is not None
        return dgate

    # ---- as separate ops ---------------------------------------------------------------------------------------

    def composed_mlp(self, x_TD: Tensor, documents: Documents) -> Tensor:
        """The family's own module: for what one node does not cover, only attention is ours."""
        found = self.layer.mlp(x_TD[None])
        y_TD: Tensor = (found[0] if isinstance(found, tuple) else found)[0].to(x_TD.dtype)
        if documents.load is None:
            return y_TD
        logits_TE: Tensor = getattr(self.layer.mlp, self.router.name)(x_TD)[0]
        fixed = logits_TE.detach()
        documents.load.add(self.slot, fixed, routing_forward(fixed, self.K, **self._rule()).ids_TK, few=False)
        out: Tensor = BalancedLogits.apply(y_TD, logits_TE, documents.load)  # type: ignore[no-untyped-call]
        return out
