"""One decoder layer for every family, with a hand-written backward: one autograd node, and exactly what it keeps.

T = packed tokens, D = model width, N = query heads, K = key/value heads, H = head width, X = (N + 2K) H, F = MLP width.

The layer is a plain object beside the model's own layer module: it reads that module's parameters and changes nothing of
it, so names, hooks, checkpoints and generation stay the family's. Forward, with what is kept for backward marked *:

    *h_TD                                     the residual stream
    x = norm(h)                               computed again in backward only where weights are trained
    qkv_TX = x Wqkv                           one product; LoRA rides along as extra columns (kernels/lora/lora_linear.py)
   *q, k, v = rope(qk_norm(qkv))              in place where there is no qk-norm (else *qkv too), and so may be its gradient
   *o, lse = attention(q, k, v)
   *h2, x2 = h + o Wo, norm(h2)               one pass, or h2 by the product; x2 again only where weights are trained
   *gu_T2F = x2 Wgu                           in rows with room behind them: its gradient takes its place
    a = act(gate) * up                        computed again, inside the kernel that needs its gradient
    h3 = h2 + a Wdown                         the product adds the residual itself

On Hopper RoPE and the activation are done inside the products before them (kernels/gemm/hopper_product.py).

With norms after attention or MLP (Gemma, OLMo 2) the branch output is kept as well, since its norm needs it.

Two things are left out where nobody looks at them: in the last layer everything behind attention for rows without a loss
(`rows`), and below the first layer the gradient of frozen embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from pronghorn.kernels.gemm.cublaslt import adds_freely
from pronghorn.kernels.lora.gated_lora import gated_lora_backward, gated_lora_forward, why_not, why_not_thin
from pronghorn.kernels.lora.lora_collect import CollectJob
from pronghorn.kernels.lora.lora_linear import NormOf, Part
from pronghorn.kernels.mlp.gated_mlp import gated_activation_backward, gated_activation_forward
from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_then_add_forward
from pronghorn.kernels.runtime.copy_rows import copy_rows
from pronghorn.kernels.runtime.dispatch import keeps_graph
from pronghorn.model.attending import Attending, scaled_queries
from pronghorn.model.expert_load import ExpertLoad
from pronghorn.model.families import ACTIVATIONS, Family, activation_name, rope_kind, window
from pronghorn.model.kept import Attended, Elsewhere, GradientRoom, Input, Kept, Left, Level, come_back, copied, leave
from pronghorn.model.mlp_pieces import PlainSteps, again_up_to_the_mlp, backward_in_pieces, forward_in_pieces
from pronghorn.model.projections import Group, Projections
from pronghorn.model.rows import rows_like, spread
from pronghorn.model.same_weights import Weights, as_at_forward, stamp


@dataclass(frozen=True)
class Documents:
    """What every layer of a step shares about the pack: built once per batch, never by a layer."""

    cu_seqlens: Tensor
    longest: int
    rotary: dict[str, tuple[Tensor, Tensor]]  # kind of RoPE -> cos, sin, float32, [T, P / 2]
    spans_2T: Tensor  # where each token's document begins and ends
    typical: int  # mean length of the documents, each token counted: what is fast depends on it, the results do not
    query_scale_T: Tensor | None = None  # factor of each token's queries, where the model has one
    load: ExpertLoad | None = None  # what the experts of this step are given
    room: GradientRoom = field(default_factory=GradientRoom)
    guarded: bool = False  # whether a program may do anything between forward and backward
    weights: Weights | None = None  # if so: those of this forward
    leaves: dict[int, Tensor] | None = None  # by a parameter's id: what autograd sees in its place (model/captured_layers.py)


class Norm:
    """A norm module's weight and eps, read at each use: optimizers, adapters and scripts may replace them."""

    def __init__(self, module: Any, one_plus: bool) -> None:
        self.module, self.one_plus = module, one_plus

    @property
    def eps(self) -> float:
        found = getattr(self.module, "variance_epsilon", None)
        return float(self.module.eps if found is None else found)

    @property
    def weight(self) -> Tensor:
        return self.module.weight  # type: ignore[no-any-return]

    def trains(self) -> bool:
        return self.weight.requires_grad


class FastDecoderLayer(Attending):
    def __init__(self, layer: Any, family: Family, config: Any, index: int) -> None:
        self.layer, self.family, self.index = layer, family, index
        attention, norms = layer.self_attn, family.norms
        self.rope = rope_kind(config, index)
        self.activation = ACTIVATIONS[activation_name(config)]
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.head_width = int(attention.head_dim)
        self._attention_options: dict[str, Any] = {
            "scale": float(attention.scaling), "window": window(config, index),
            "softcap": getattr(config, "attn_logit_softcapping", None),
        }
        self.multiplier = float(getattr(config, "residual_multiplier", 1.0))
        self.qkv = Projections(attention, family.qkv)
        self.out = Projections(attention, ("o_proj",))
        self.gate_up, self.down = self._mlp_projections(layer.mlp)

        def norm(name: str | None) -> Norm | None:
            return Norm(getattr(layer, name), family.one_plus) if name else None
        self.before_attention, self.after_attention = norm(norms.before_attention), norm(norms.after_attention)
        self.before_mlp, self.after_mlp = norm(norms.before_mlp), norm(norms.after_mlp)
        self.q_norm = Norm(attention.q_norm, family.one_plus) if family.qk_norm else None
        self.k_norm = Norm(attention.k_norm, family.one_plus) if family.qk_norm else None
        self.groups: tuple[Group, ...] = (self.qkv, self.out, self.gate_up, self.down)
        named = {"before_attention": self.before_attention, "after_attention": self.after_attention,
                 "before_mlp": self.before_mlp, "after_mlp": self.after_mlp, "q_norm": self.q_norm, "k_norm": self.k_norm}
        self.norms = {name: norm for name, norm in named.items() if norm is not None}
        self.fused = self._product_adds = False  # set by `prepare`
        self.level: Level = "nothing"  # what backward computes again (model/kept.py)
        # As people ask for it who know gradient checkpointing: everything, or nothing, whatever the level. None: nobody did.
        self.recompute: bool | None = None
        self.planned = False  # whether the level is a memory plan's, which a trainer's default does not overrule
        self.pieces = 1  # turns in which the MLP's rows are done where gate and up are not kept (model/mlp_pieces.py)
        self.offload: Elsewhere | None = None  # where what is kept waits for backward
        self.waiting: WeakSet[Waiting] = WeakSet()  # forwards whose backward will read this layer's state

    def _mlp_projections(self, mlp: Any) -> tuple[Projections, Projections]:
        return Projections(mlp, self.family.gate_up), Projections(mlp, ("down_proj",))

    def prepare(self, dtype: torch.dtype) -> bool:
        """Before every forward: finds out what the modules are now. Returns whether adapters moved."""
        self.fused = not self.why_not_fused()
        self._product_adds = adds_freely(dtype, self.layer.self_attn.o_proj.weight.device)
        moved = [group.prepare(dtype) for group in self.groups if self.fused]
        return any(moved)

    def why_not_fused(self) -> str:
        """Why this layer runs as separate differentiable ops instead of one node; empty if it is one node."""
        return next((why for group in self.groups if (why := group.why_not_fused())), "")

    @property
    def recomputes(self) -> bool:
        """Asked for here, or by a trainer on the family's layer (`gradient_checkpointing_enable` sets it there)."""
        if self.recompute is not None:
            return self.recompute
        return not self.planned and bool(getattr(self.layer, "gradient_checkpointing", False))

    def parameters(self) -> list[Tensor]:
        """Everything the node may return a gradient for, in the order in which backward returns them."""
        own = [p for group in self.groups for p in group.parameters] + [norm.weight for norm in self.norms.values()]
        return own if self.sinks is None else [*own, self.sinks]

    def __call__(self, h_TD: Tensor, documents: Documents, rows: Tensor | None = None) -> Tensor:
        """The residual stream after the layer: of all tokens, or of `rows`, which hold no token twice but the last one."""
        if not self.fused:
            from pronghorn.model.composed_layer import composed_layer

            if self.recomputes and torch.is_grad_enabled():  # torch's own: it also puts back the random state of dropout
                out: Tensor = checkpoint(composed_layer, self, h_TD, documents, use_reentrant=False)
            else:
                out = composed_layer(self, h_TD, documents)
            return out if rows is None else out.index_select(0, rows)
        if not torch.is_grad_enabled():
            return self.forward_at("layer", h_TD, documents, rows)[0]
        leaves = documents.leaves or {}
        given = [leaves.get(id(parameter), parameter) for parameter in self.parameters()]
        out = _Layer.apply(h_TD, self, documents, rows, *given)  # type: ignore[no-untyped-call]
        return out

    def composed_mlp(self, x_TD: Tensor, documents: Documents) -> Tensor:
        from pronghorn.model.composed_layer import composed_mlp

        return composed_mlp(self, x_TD)

    # ---- forward -----------------------------------------------------------------------------------------------

    @property
    def effective_level(self) -> Level:
        if self.recomputes:
            return "layer"
        return "nothing" if self.recompute is False else self.level

    def in_pieces(self, level: Level) -> bool:
        return self.pieces > 1 and level != "nothing"

    def forward_at(self, level: Level, h: Tensor, documents: Documents, rows: Tensor | None = None
                   ) -> tuple[Tensor, Kept | Input]:
        """The residual stream after the layer, and what a level holds on to, at least."""
        if not self.in_pieces(level):
            return self.forward(h, documents, rows)
        return forward_in_pieces(PlainSteps(self), level, h, documents, rows)

    def forward(self, h: Tensor, documents: Documents, rows: Tensor | None = None) -> tuple[Tensor, Kept]:
        seen = self.attended(Input(h), documents, rows)
        kept, a_ext = self._to_activated(seen, h)
        h3, kept.y2 = self.branch(self.down, a_ext, kept.h2, self.after_mlp, kept.rstd, "after_mlp", extended=True)
        kept.xa3 = self.behind_down(a_ext)
        return h3, kept

    def behind_down(self, a_ext: Tensor) -> Tensor | None:
        """A copy of a A^T of down's adapter."""
        return a_ext[:, a_ext.shape[1] - self.down.extra :].clone() if self.down.extra else None

    def attended(self, given: Input, documents: Documents, rows: Tensor | None) -> Attended:
        """Everything before the attention's output projection."""
        rstd: dict[str, Tensor] = {}
        h, o, lse = given.h, given.o, given.lse
        x = self.normed(self.before_attention, h, self.qkv.extra, rstd, "before_attention")
        q, k, v, qk_rstd, qkv, xa1 = self.turned_of(x, documents)
        del x
        if o is None or lse is None:
            o = rows_like(h, self.heads * self.head_width + self.out.extra)
            lse = self.attend(q, k, v, o, documents)
        o_ext, h_rows = (o, h) if rows is None else (o.index_select(0, rows), h.index_select(0, rows))
        return Attended(q, k, v, lse, o, o_ext, h_rows, qkv, qk_rstd, xa1, rstd)

    def turned_of(self, x_ext: Tensor, documents: Documents) -> tuple[Tensor, Tensor, Tensor, Any, Tensor, Tensor | None]:
        """q, k and v with their positions, their norms' rstd, where they lie or lay before qk-norm, and x A^T."""
        if self.q_norm:
            qkv, behind = self.qkv.forward(x_ext)
            return *self.turned(qkv, documents), qkv, None if behind is None else behind.clone()
        if not self.family.neighbours:
            turning = self.heads + self.kv_heads
            if found := self.qkv.forward_turned(x_ext, *documents.rotary[self.rope], turning, self.head_width):
                q, k, v = self._parts_of(found[0])
                return scaled_queries(q, documents), k, v, None, *found
        qkv, xa = self.qkv.forward_with_room(x_ext)
        return *self.turned(qkv[:, : self._qkv_width], documents), qkv, xa

    def _to_gate_up(self, given: Input, documents: Documents, rows: Tensor | None) -> Kept:
        """Everything before the activation."""
        seen = self.attended(given, documents, rows)
        x2, h2, y1 = self._to_mlp(seen.o_ext, seen.h_rows, seen.rstd)
        gu, xa2 = self.gate_up_of(x2)
        return seen.kept(given.h, h2, gu=gu, xa2=xa2, y1=y1)

    def gate_up_of(self, x2_ext: Tensor) -> tuple[Tensor, Tensor | None]:
        """gu, with room behind it for the columns that its gradient has there; and x A^T."""
        return self.gate_up.forward_with_room(x2_ext)

    def _to_activated(self, seen: Attended, h: Tensor) -> tuple[Kept, Tensor]:
        """Everything before down's product, and its input: gate, up and activation by one product where that can do both."""
        x2, h2, y1 = self._to_mlp(seen.o_ext, seen.h_rows, seen.rstd)
        if (found := self.gate_up.forward_gated(x2, self.activation, self.down.extra)) is not None:
            gu, xa2, a_ext = found
            self.down.extend(a_ext)
        else:
            gu, xa2 = self.gate_up_of(x2)
            del x2  # nobody needs it beside a
            a_ext = self.activated(gu)
        return seen.kept(h, h2, gu=gu, xa2=xa2, y1=y1), a_ext

    def again(self, left: Left, documents: Documents, rows: Tensor | None) -> Kept:
        """What forward had, out of what it left: brought back, and computed again where it was not kept. Gate and up stay
        away where they are computed piece by piece."""
        found = come_back(left, self.index, self.offload)
        if isinstance(found, Input):
            if self.pieces > 1:
                return again_up_to_the_mlp(PlainSteps(self), found, documents, rows)
            kept = self._to_gate_up(found, documents, rows)
            kept.xa3 = found.xa3
            if self.after_mlp is not None and kept.gu is not None:
                _, kept.y2 = self.branch(self.down, self.activated(kept.gu), kept.h2, self.after_mlp, kept.rstd, "after_mlp",
                                          extended=True)
            return kept
        if found.gu is None and self.pieces == 1:
            x2 = self.normed(self.before_mlp, found.h2, self.gate_up.extra, found.rstd, "before_mlp")
            found.gu = self.gate_up_of(x2)[0]
        return found

    def normed(self, norm: Norm | None, h: Tensor, extra: int, rstd: dict[str, Tensor], name: str) -> Tensor:
        """norm(h) in rows with room for the group's extra columns; h itself where there is neither."""
        if norm is None and not extra:
            return h
        x_ext = rows_like(h, h.shape[1] + extra)
        x = x_ext[:, : h.shape[1]]
        if norm is None:
            copy_rows(h, x)
        else:
            rstd[name] = rms_norm_forward(h, norm.weight, norm.eps, one_plus=norm.one_plus, out=x)[2]
        return x_ext

    def branch(self, group: Projections, x_ext: Tensor, h: Tensor, norm: Norm | None, rstd: dict[str, Tensor],
                name: str, *, extended: bool = False) -> tuple[Tensor, Tensor | None]:
        """h + group(x), or h + norm(group(x)) and the group's output."""
        if norm is None:
            return group.forward_add(x_ext, h, self.multiplier, extended=extended), None
        y, _ = group.forward(x_ext, extended=extended)
        out, rstd[name] = rms_norm_then_add_forward(y, norm.weight, norm.eps, h, one_plus=norm.one_plus)
        return out, y

    def _to_mlp(self, o_ext: Tensor, h: Tensor, rstd: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(the MLP's input in rows with room, h2, and the branch's output where a norm follows it). Residual and norm in one
        pass where they follow each other and a product that adds h would have to copy it first."""
        norm = self.before_mlp
        if norm is None or not self.adds_before_mlp:
            h2, y1 = self.branch(self.out, o_ext, h, self.after_attention, rstd, "after_attention")
            return self.normed(norm, h2, self.gate_up.extra, rstd, "before_mlp"), h2, y1
        return *self.add_and_norm(norm, self.out.forward(o_ext)[0], h, rstd), None

    @property
    def adds_before_mlp(self) -> bool:
        """Whether the norm before the MLP adds the residual itself."""
        follows = self.before_mlp is not None and self.after_attention is None and self.multiplier == 1.0
        return follows and not self._product_adds

    def add_and_norm(self, norm: Norm, y: Tensor, h: Tensor, rstd: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """(norm(h + y) in rows with room for gate and up's columns, h + y, which takes y's place)"""
        x2_ext = rows_like(h, h.shape[1] + self.gate_up.extra)
        _, h2, rstd["before_mlp"] = rms_norm_forward(y, norm.weight, norm.eps, one_plus=norm.one_plus, residual_TD=h,
                                                     out=x2_ext[:, : h.shape[1]], in_place=True)
        return x2_ext, h2

    def activated(self, gu_ext: Tensor) -> Tensor:
        """a, and behind it a A^T of down's adapter, in one pass where the rank allows."""
        gu = gu_ext[:, : gu_ext.shape[1] - self.gate_up.extra]
        width = gu.shape[1] // 2
        a_ext = rows_like(gu, width + self.down.extra)
        if self.down.extra and not why_not(self.down.extra):
            return gated_lora_forward(gu, self.activation, self.down.adapter_rows, out_ext=a_ext)
        gated_activation_forward(gu, self.activation, out=a_ext[:, :width])
        self.down.extend(a_ext)
        return a_ext

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(self, dh3: Tensor, kept: Kept, documents: Documents, rows: Tensor | None = None, need_dh: bool = True
                 ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The gradient of the layer's input (of all tokens, if it is needed), and of `parameters()` in their order."""
        norm_grads: dict[str, Tensor | None] = {}
        if kept.gu is None:
            dh2, mlp_grads = backward_in_pieces(PlainSteps(self), dh3, kept, documents, norm_grads)
        else:
            dh2, mlp_grads = self._backward_mlp(dh3, kept, documents, norm_grads)
        kept.release("h2", "gu", "xa2", "xa3", "y2")
        dy, dh = self.into_branch(dh2, kept.y1, self.after_attention, kept.rstd, "after_attention", norm_grads, self.out,
                                   documents.room)
        do = self.out.backward_input(dy)
        width = do.shape[1]
        out_grads = self.out.backward_parameters(dy, kept.o_ext[:, :width], kept.o_ext[:, width:] if self.out.extra else None)
        if rows is not None:
            do, dh = spread(do, rows, len(kept.h)), spread(dh, rows, len(kept.h))
        backend = self.backend(do, documents)
        dqkv_ext = self._room_for_dqkv(do, kept.qkv, backend)
        dsinks = self.attend_back(do, kept, documents, backend, dqkv_ext, norm_grads)
        del do, dy, dh2
        kept.release("q", "k", "v", "o", "o_ext", "lse", "qkv", "y1")
        if need_dh or (self.before_attention and self.before_attention.trains()):
            dx = self.qkv.backward_input(dqkv_ext)
            dh = self._out_of_norm(self.before_attention, dx, kept.h, dh, kept.rstd, "before_attention", norm_grads, self.down,
                                   documents.room)  # `down` of the layer below has as many extra columns
        else:
            self.qkv.extend_grad(dqkv_ext)
        qkv_grads = self.parameters_behind_norm(self.qkv, dqkv_ext, kept.h, kept.xa1, kept.rstd, "before_attention")
        ordered = [norm_grads.get(name) for name in self.norms] + ([] if self.sinks is None else [dsinks])
        return dh, [*qkv_grads, *out_grads, *mlp_grads, *ordered]

    def _backward_mlp(self, dh3: Tensor, kept: Kept, documents: Documents, norm_grads: dict[str, Tensor | None]
                      ) -> tuple[Tensor, list[Tensor | None]]:
        """(the gradient of h2, the gradients of the parameters of gate and up and of down)"""
        dy, dh2 = self.into_branch(dh3, kept.y2, self.after_mlp, kept.rstd, "after_mlp", norm_grads, self.down, documents.room)
        da = self.down.backward_input(dy)
        fused = self.mlp_sums_are_fused()
        assert kept.gu is not None
        extended = fused and not why_not_thin(kept.gu, self.down.extra, *self._gate_and_up())
        dgu_ext, down_grads = self.through_activation(da, dy, kept.gu, kept.xa2, kept.xa3, fused, extended)
        del da, dy
        dx2 = self.gate_up.backward_input(dgu_ext, extended=extended)
        dh2 = self._out_of_norm(self.before_mlp, dx2, kept.h2, dh2, kept.rstd, "before_mlp", norm_grads, self.out,
                                documents.room)
        gate_up_grads = self.parameters_behind_norm(self.gate_up, dgu_ext, kept.h2, kept.xa2, kept.rstd, "before_mlp",
                                                    "dB" if fused else None)
        return dh2, [*gate_up_grads, *down_grads]

    def mlp_sums_are_fused(self) -> bool:
        """Whether the kernel of the activation's backward adds to the adapters' sums itself: dA of down, dB of gate and up."""
        groups = [group for group in (self.gate_up, self.down) if group.extra]
        if not groups or any(group.sums is None for group in groups):
            return False
        return not (self.gate_up.trains_weights or self.down.trains_weights or why_not(self.down.extra, *self._ranks()))

    def _gate_and_up(self) -> tuple[slice | None, slice | None]:
        """The extra columns of the gate's and of the up's adapter; the same where both are one linear (Phi-3)."""
        gate = self.gate_up.columns_of(0)
        return gate, gate if len(self.gate_up.widths) == 1 else self.gate_up.columns_of(1)

    def _ranks(self) -> list[int]:
        return [columns.stop - columns.start for columns in self._gate_and_up() if columns]

    def through_activation(self, da: Tensor, dy_ext: Tensor, gu_ext: Tensor, xa2: Tensor | None, xa3: Tensor | None,
                           fused: bool, extended: bool = False) -> tuple[Tensor, list[Tensor | None]]:
        """dgu in gu's place, and if it is to be `extended` dgu sB behind it; and the gradients of down's parameters. The
        activation, if they need it, takes da's place."""
        gu = gu_ext[:, : 2 * da.shape[1]]
        if not fused:
            gated_activation_backward(da, gu, self.activation, out=gu, need_activation=self.down.needs_input, activation_out=da)
            return gu_ext, self.down.backward_parameters(dy_ext, da, xa3)
        gate, up = self._gate_and_up()
        down_sums, gate_up_sums = self.down.sums, self.gate_up.sums
        outputs = dy_ext.shape[1] - self.down.extra
        dyb = slice(outputs, outputs + (len(down_sums[0]) if down_sums else 0))
        gated_lora_backward(
            da, gu, self.activation, dgu_out=gu_ext, dyb_TR=dy_ext[:, dyb] if self.down.extra else None,
            xa_TR=xa2, gate_columns=gate, up_columns=up,
            sums_down_RF=down_sums[0] if down_sums and self.down.extra else None,
            sums_gate_up_RG=gate_up_sums[1] if gate_up_sums and self.gate_up.extra else None,
            sB_GR=self.gate_up.adapter_columns if extended else None,
        )
        return gu_ext, self.down.backward_parameters(dy_ext, da, xa3, without="dA")

    def into_branch(self, dh: Tensor, y: Tensor | None, norm: Norm | None, rstd: dict[str, Tensor], name: str,
                     norm_grads: dict[str, Tensor | None], group: Projections, room: GradientRoom) -> tuple[Tensor, Tensor]:
        """The gradient of the branch's last product, in rows with the group's extra columns; and that of the residual."""
        if norm is None and self.multiplier == 1.0 and (dh_ext := room.behind(dh, group.extra)) is not None:
            return dh_ext, dh
        dy_ext = rows_like(dh, dh.shape[1] + group.extra)
        dy = dy_ext[:, : dh.shape[1]]
        if norm is None or y is None:
            copy_rows(dh, dy, self.multiplier)
            return dy_ext, dh
        _, norm_grads[name] = rms_norm_backward(dh, y, norm.weight, rstd[name], one_plus=norm.one_plus,
                                                need_weight_grad=norm.trains(), out=dy)
        return dy_ext, dh

    def _out_of_norm(self, norm: Norm | None, dx: Tensor, h: Tensor, dh: Tensor, rstd: dict[str, Tensor], name: str,
                     norm_grads: dict[str, Tensor | None], below: Projections, room: GradientRoom) -> Tensor:
        """dh + the norm's share of dx, in rows with room for the extra columns of the group that it goes to next: in dh's
        place, if that has such."""
        if norm is None:
            return dh + dx
        if room.behind(dh, below.extra) is None:
            room.buffer = rows_like(h, h.shape[1] + below.extra)
        assert room.buffer is not None
        out, norm_grads[name] = rms_norm_backward(dx, h, norm.weight, rstd[name], one_plus=norm.one_plus, add_TD=dh,
                                                  need_weight_grad=norm.trains(), out=room.buffer[:, : h.shape[1]])
        return out

    def parameters_behind_norm(self, group: Projections, dy_ext: Tensor, h: Tensor, xa: Tensor | None,
                                rstd: dict[str, Tensor], name: str, without: Part | None = None) -> list[Tensor | None]:
        """Adapters take their gradients from h; weights that are trained need x = norm(h), which is computed again."""
        norm = self.norms.get(name)
        if norm is None:
            return group.backward_parameters(dy_ext, h, xa, without=without)
        if group.trains_weights:
            x = rms_norm_forward(h, norm.weight, norm.eps, one_plus=norm.one_plus)[0]
            return group.backward_parameters(dy_ext, x, xa)
        return group.backward_parameters(dy_ext, h, xa, NormOf(rstd[name], norm.weight, norm.one_plus), without)

    def collect_jobs(self) -> list[CollectJob]:
        """What takes the adapters' gradients out of their sums (model/adapter_sums.py)."""
        jobs = []
        for group, name in ((self.qkv, "before_attention"), (self.out, ""), (self.gate_up, "before_mlp"), (self.down, "")):
            norm = self.norms.get(name)
            jobs += group.collect_jobs(NormOf(norm.weight, norm.weight, norm.one_plus) if norm else None)
        return jobs


class Waiting:
    """Lives as long as a forward waits for its backward."""


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, layer: FastDecoderLayer, documents: Documents, rows: Tensor | None,
                *parameters: Tensor) -> Tensor:
        level = layer.effective_level
        out, kept = layer.forward_at(level, h, documents, rows)
        ctx.layer, ctx.documents, ctx.rows = layer, documents, rows
        ctx.stamp = stamp(parameters) if documents.weights else None
        ctx.left = leave(kept, level, layer.index, layer.offload)
        ctx.waiting = Waiting()
        layer.waiting.add(ctx.waiting)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Any, ...]:
        left = ctx.left
        if left is None:
            raise RuntimeError("backward was already called, and it released the saved activations: recompute the loss, or "
                               "call the first backward with retain_graph=True")
        if keeps_graph():
            left = copied(left)  # gradients take the place of what was kept
        else:
            ctx.left = ctx.waiting = None  # what was kept is freed as it is used
        with as_at_forward(ctx.documents.weights, ctx.stamp, ctx.layer.parameters, f"decoder layer {ctx.layer.index}"):
            kept = ctx.layer.again(left, ctx.documents, ctx.rows)
            del left
            dh, gradients = ctx.layer.backward(incoming[0], kept, ctx.documents, ctx.rows, ctx.needs_input_grad[0])
        needed = ctx.needs_input_grad[4:]
        return (dh, None, None, None, *(g if wanted else None for g, wanted in zip(gradients, needed, strict=True)))
