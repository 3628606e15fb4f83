"""The decoder layer (decoder_layer.py) with its products in FP8, both ways: frozen weights in e4m3, adapters beside them.

T = packed tokens, D = model width, N = query heads, H = head width, F = MLP width. What a product reads is cast by the kernel
that makes it, where there is one; * is kept for backward, as it is there, and x A^T of each group (T x R) besides:

    *h
     x, x8 = norm(h)                                        one kernel
    *q, k, v = rope(qk_norm(x8 Wqkv))                       attention is in 16 bits
    *o = attention(q, k, v);  o8 = cast(o)
    *h2 = h + o8 Wo;  x2, x28 = norm(h2)                    one kernel
    *gu = x28 Wgu
     a, a8 = act(gate) * up                                 one kernel
     h3 = h2 + a8 Wdown

Backward casts each gradient with the weight's scales in it, so that the same bytes serve both ways; the residual stream, its
gradient and everything the adapters' own gradients are made of stay in 16 bits. Nothing here depends on values from earlier
steps: a row's scale is found where the row is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.lora.lora_linear import NormOf
from pronghorn.kernels.mlp.fp8_gated import gated_activation_fp8_backward, gated_activation_fp8_forward
from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_then_add_forward
from pronghorn.kernels.quant.fp8_norm import rms_norm_fp8_forward
from pronghorn.model.decoder_layer import Documents, FastDecoderLayer, Norm
from pronghorn.model.families import Family
from pronghorn.model.fp8_linear import Fp8Linear
from pronghorn.model.fp8_projections import Fp8Projections, Fp8Workspace, Rows, trains_whole
from pronghorn.model.kept import Attended, GradientRoom, Input, Kept, Left, Level, come_back
from pronghorn.model.mlp_pieces import (
    Grads,
    NormGrads,
    Piece,
    Rstd,
    again_up_to_the_mlp,
    backward_in_pieces,
    forward_in_pieces,
    out_of_norm_in_place,
)
from pronghorn.model.quantized import NF4Linear
from pronghorn.model.rows import rows_like, spread


@dataclass
class Fp8Kept(Kept):
    """`o` and `o_ext` have no extra columns."""

    xa_o: Tensor | None = None


class Fp8Attention(FastDecoderLayer):
    """The half of a layer before its MLP, in FP8: of dense layers below, and of those with experts (fp8_moe_layer.py)."""

    qkv: Fp8Projections
    out: Fp8Projections

    def _attention_in_fp8(self, workspace: Fp8Workspace) -> None:
        self.qkv = Fp8Projections(self.layer.self_attn, self.family.qkv, workspace)
        self.out = Fp8Projections(self.layer.self_attn, ("o_proj",), workspace)

    def attended(self, given: Input, documents: Documents, rows: Tensor | None) -> Attended:
        rstd: dict[str, Tensor] = {}
        h, o, lse = given.h, given.o, given.lse
        qkv, xa1 = self.qkv.product(self._normed_rows(self.before_attention, h, self.qkv, rstd, "before_attention"))
        q, k, v, qk_rstd = self.turned(qkv, documents)
        if o is None or lse is None:
            o = rows_like(h, self.heads * self.head_width)
            lse = self.attend(q, k, v, o, documents)
        h_rows, o_rows = (h, o) if rows is None else (h.index_select(0, rows), o.index_select(0, rows))
        return Attended(q, k, v, lse, o, o_rows, h_rows, qkv if self.q_norm else None, qk_rstd, xa1, rstd)

    def _normed_rows(self, norm: Norm | None, h: Tensor, group: Fp8Projections, rstd: dict[str, Tensor], name: str
                     ) -> Rows | Tensor:
        """norm(h), cast; or h, for the product to cast."""
        if norm is None:
            return h
        room = group.room(h)
        normed = rms_norm_fp8_forward(h, norm.weight, norm.eps, one_plus=norm.one_plus, bound=group.group.bound,
                                      out8=room[:, : h.shape[1]])
        rstd[name] = normed.rstd_T
        return Rows(normed.y_TD, room, normed.scale_T)

    def _backward_attention(
        self, dh2: Tensor, kept: Kept, xa_o: Tensor | None, documents: Documents, rows: Tensor | None, need_dh: bool,
        norm_grads: dict[str, Tensor | None],
    ) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:  # fmt: skip
        """(the gradient of the layer's input, if it is needed, those of `qkv` and `out`, and that of the sinks)"""
        dy = self._grad_of_branch(dh2, kept.y1, self.after_attention, kept.rstd, "after_attention", norm_grads)
        do, dyb = self.out.product_back(dy)
        out_grads = self.out.parameter_grads(dy, dyb, kept.o_ext, xa_o)
        dh: Tensor | None = dh2
        if rows is not None:
            do, dh = spread(do, rows, len(kept.h)), spread(dh2, rows, len(kept.h))
        dqkv = rows_like(do, self._qkv_width)
        dsinks = self.attend_back(do, kept, documents, self.backend(do, documents), dqkv, norm_grads)
        del do, dy
        kept.release("q", "k", "v", "o", "o_ext", "lse", "qkv", "y1")
        if need_dh or (self.before_attention and self.before_attention.trains()):
            dx, dyb = self.qkv.product_back(dqkv)
            assert dh is not None
            dh = self._out_of_norm(self.before_attention, dx, kept.h, dh, kept.rstd, "before_attention", norm_grads, self.down,
                                   documents.room)
        else:
            dyb = self.qkv.backward_adapters(dqkv)
        qkv_grads = self._grads_behind_norm(self.qkv, dqkv, dyb, kept.h, kept.xa1, kept.rstd, "before_attention")
        return dh, [*qkv_grads, *out_grads], dsinks

    def _grad_of_branch(self, dh: Tensor, y: Tensor | None, norm: Norm | None, rstd: dict[str, Tensor], name: str,
                        norm_grads: dict[str, Tensor | None]) -> Tensor:
        """The gradient of what the branch's last product gave."""
        if norm is None or y is None:
            return dh if self.multiplier == 1.0 else dh * self.multiplier
        dy, norm_grads[name] = rms_norm_backward(dh, y, norm.weight, rstd[name], one_plus=norm.one_plus,
                                                 need_weight_grad=norm.trains())
        return dy

    def _grads_behind_norm(self, group: Fp8Projections, dy: Tensor, dyb: Tensor | None, h: Tensor, xa: Tensor | None,
                           rstd: dict[str, Tensor], name: str) -> list[Tensor | None]:
        """Adapters take their gradients from h, which is there; weights that are trained need norm(h), computed again."""
        norm = self.norms.get(name)
        if norm and group.trains_weights:
            x = rms_norm_forward(h, norm.weight, norm.eps, one_plus=norm.one_plus)[0]
            return group.parameter_grads(dy, dyb, x, xa)
        return group.parameter_grads(dy, dyb, h, xa, NormOf(rstd[name], norm.weight, norm.one_plus) if norm else None)


class Fp8DecoderLayer(Fp8Attention):
    gate_up: Fp8Projections
    down: Fp8Projections

    def __init__(self, layer: Any, family: Family, config: Any, index: int, workspace: Fp8Workspace) -> None:
        super().__init__(layer, family, config, index)
        self._attention_in_fp8(workspace)
        self.gate_up = Fp8Projections(layer.mlp, family.gate_up, workspace)
        self.down = Fp8Projections(layer.mlp, ("down_proj",), workspace)
        self.groups = (self.qkv, self.out, self.gate_up, self.down)

    def keep_turned(self, keep: bool) -> None:
        """Whether the weights turned round for backward stay: twice the bytes, and no turning. Before the first backward."""
        for group in (self.qkv, self.out, self.gate_up, self.down):
            group.keep_turned = keep

    # ---- forward -----------------------------------------------------------------------------------------------

    def forward_at(self, level: Level, h: Tensor, documents: Documents, rows: Tensor | None = None
                   ) -> tuple[Tensor, Kept | Input]:
        if not self.in_pieces(level):
            return self.forward(h, documents, rows)
        return forward_in_pieces(Fp8Steps(self), level, h, documents, rows)

    def forward(self, h: Tensor, documents: Documents, rows: Tensor | None = None) -> tuple[Tensor, Kept]:
        kept = self._to_gate_up(Input(h), documents, rows)
        assert kept.gu is not None
        y, kept.xa3 = self.down.product(self.activated_rows(kept.gu))
        h3, kept.y2 = self._added(y, kept.h2, self.after_mlp, kept.rstd, "after_mlp")
        return h3, kept

    def _to_gate_up(self, given: Input, documents: Documents, rows: Tensor | None) -> Fp8Kept:
        kept = self.up_to_the_mlp(given, documents, rows)
        kept.gu, kept.xa2 = self.gate_up_rows(kept.h2, kept.h_rows, kept.rstd)
        kept.h_rows = None
        return kept

    def up_to_the_mlp(self, given: Input, documents: Documents, rows: Tensor | None) -> Fp8Kept:
        """`h2` is the attention branch's output where the norm before the MLP adds `h_rows` to it."""
        h, seen = given.h, self.attended(given, documents, rows)
        y, xa_o = self.out.product(seen.o_ext)
        if self.before_mlp is not None and self.after_attention is None:
            return Fp8Kept(**vars(seen.kept(h, y, h_rows=seen.h_rows)), xa_o=xa_o)
        h2, y1 = self._added(y, seen.h_rows, self.after_attention, seen.rstd, "after_attention")
        return Fp8Kept(**vars(seen.kept(h, h2, y1=y1)), xa_o=xa_o)

    def gate_up_rows(self, y: Tensor, h: Tensor | None, rstd: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """(gu, x A^T) of norm(h + y), with h + y in y's place: residual, norm and cast in one pass; of norm(y) without h."""
        if h is None or self.before_mlp is None:
            return self.gate_up.product(self._normed_rows(self.before_mlp, y, self.gate_up, rstd, "before_mlp"))
        return self.gate_up.product(self._normed_sum(self.before_mlp, y, h, rstd))

    def again(self, left: Left, documents: Documents, rows: Tensor | None) -> Kept:
        found = come_back(left, self.index, self.offload)
        if isinstance(found, Input):
            if self.pieces > 1:
                return again_up_to_the_mlp(Fp8Steps(self), found, documents, rows)
            kept = self._to_gate_up(found, documents, rows)
            kept.xa3 = found.xa3
            if self.after_mlp is not None and kept.gu is not None:
                y = self.down.product(self.activated_rows(kept.gu))[0]
                _, kept.y2 = self._added(y, kept.h2, self.after_mlp, kept.rstd, "after_mlp")
            return kept
        if found.gu is None and self.pieces == 1:
            found.gu = self.gate_up_rows(found.h2, None, found.rstd)[0]
        return found

    def _normed_sum(self, norm: Norm, y: Tensor, h: Tensor, rstd: dict[str, Tensor]) -> Rows:
        room = self.gate_up.room(h)
        normed = rms_norm_fp8_forward(
            y, norm.weight, norm.eps, one_plus=norm.one_plus, residual_TD=h, multiplier=self.multiplier, h_out=y,
            bound=self.gate_up.group.bound, out8=room[:, : h.shape[1]],
        )
        rstd["before_mlp"] = normed.rstd_T
        return Rows(normed.y_TD, room, normed.scale_T)

    def _added(self, y: Tensor, h: Tensor, norm: Norm | None, rstd: dict[str, Tensor], name: str
               ) -> tuple[Tensor, Tensor | None]:
        """h + y, in y's place, or h + norm(y) and y, which backward needs then."""
        if norm is None:
            return torch.add(h, y, alpha=self.multiplier, out=y), None
        out, rstd[name] = rms_norm_then_add_forward(y, norm.weight, norm.eps, h, one_plus=norm.one_plus)
        return out, y

    def activated_rows(self, gu: Tensor) -> Rows:
        room = self.down.room(gu)
        a, _, scale = gated_activation_fp8_forward(gu, self.activation, bound=self.down.group.bound,
                                                   out8=room[:, : gu.shape[1] // 2])
        return Rows(a, room, scale)

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(self, dh3: Tensor, kept: Kept, documents: Documents, rows: Tensor | None = None, need_dh: bool = True
                 ) -> tuple[Tensor | None, list[Tensor | None]]:
        assert isinstance(kept, Fp8Kept)
        dh3 = dh3 if dh3.stride(-1) == 1 else dh3.contiguous()
        norm_grads: NormGrads = {}
        if kept.gu is None:
            dh2, mlp_grads = backward_in_pieces(Fp8Steps(self), dh3, kept, documents, norm_grads)
        else:
            dx2, mlp_grads = self.backward_mlp_rows(dh3, kept.h2, kept.gu, kept, norm_grads)
            kept.release("gu")
            dh2 = self._out_of_norm(self.before_mlp, dx2, kept.h2, dh3, kept.rstd, "before_mlp", norm_grads, self.out,
                                    documents.room)
            del dx2
        kept.release("h2", "xa2", "xa3", "y2")
        dh, attention_grads, dsinks = self._backward_attention(dh2, kept, kept.xa_o, documents, rows, need_dh, norm_grads)
        ordered = [norm_grads.get(name) for name in self.norms] + ([] if self.sinks is None else [dsinks])
        return dh, [*attention_grads, *mlp_grads, *ordered]

    def backward_mlp_rows(self, dh3: Tensor, h2: Tensor, gu: Tensor, rest: Kept | Piece, norm_grads: NormGrads
                          ) -> tuple[Tensor, Grads]:
        """(the gradient of what gate and up read, the gradients of their parameters and of down's). gu is lost."""
        dy = self._grad_of_branch(dh3, rest.y2, self.after_mlp, rest.rstd, "after_mlp", norm_grads)
        da, dyb = self.down.product_back(dy)
        dgu = self._grad_of_activation(da, gu)  # da is a now
        down_grads = self.down.parameter_grads(dy, dyb, da, rest.xa3)
        del da, dy
        dx2, dyb = self.gate_up.product_back(dgu)
        gate_up_grads = self._grads_behind_norm(self.gate_up, dgu.values, dyb, h2, rest.xa2, rest.rstd, "before_mlp")
        return dx2, [*gate_up_grads, *down_grads]

    def _grad_of_activation(self, da: Tensor, gu: Tensor) -> Rows:
        """dgu takes gu's place, and a, where down's adapter needs it again, takes da's."""
        room = self.gate_up.room_grad(da)
        group = self.gate_up.group
        dgu, _, scale, _ = gated_activation_fp8_backward(
            da, gu, self.activation, group.scale_O, bound=group.bound_grad, need_activation=self.down.needs_input,
            out=gu, out8=room[:, : group.O], activation_out=da,
        )
        return Rows(dgu, room, scale)


class Fp8Steps:
    """The MLP of such a layer some rows at a time (mlp_pieces.py)."""

    def __init__(self, layer: Fp8DecoderLayer) -> None:
        self.layer = layer

    def up_to_the_mlp(self, given: Input, documents: Documents, rows: Tensor | None) -> Kept:
        return self.layer.up_to_the_mlp(given, documents, rows)

    def gate_up(self, y: Tensor, h: Tensor | None, rstd: Rstd) -> tuple[Tensor, Tensor | None]:
        return self.layer.gate_up_rows(y, h, rstd)

    def activated(self, gu: Tensor) -> Rows:
        return self.layer.activated_rows(gu)

    def down(self, a: Rows) -> tuple[Tensor, Tensor | None]:
        return self.layer.down.product(a)

    def down_add(self, a: Rows, h2: Tensor, h3: Tensor) -> Tensor | None:
        y, xa3 = self.layer.down.product(a)
        torch.add(h2, y, alpha=self.layer.multiplier, out=h3)
        return xa3

    def own_buffer(self, dh3: Tensor, room: GradientRoom) -> Tensor | None:
        """No columns are put behind the rows, so they are all of it."""
        own = room.buffer
        if own is None or own.shape != dh3.shape or own.data_ptr() != dh3.data_ptr() or own.stride() != dh3.stride():
            return None
        return own

    def backward(self, piece: Piece, norm_grads: NormGrads) -> Grads:
        dx2, grads = self.layer.backward_mlp_rows(piece.dh3, piece.h2, piece.gu, piece, norm_grads)
        out_of_norm_in_place(self.layer.before_mlp, dx2, piece, norm_grads)
        return grads


def fast_layer(layer: Any, family: Family, config: Any, index: int, workspace: Fp8Workspace, *, fp8: bool) -> FastDecoderLayer:
    """The fast layer beside one of the model's: in FP8 where its linears are stored so or, with `fp8`, are in 4 bits or
    trained themselves."""
    stored = (Fp8Linear, NF4Linear) if fp8 else (Fp8Linear,)
    if any(isinstance(module, stored) or (fp8 and trains_whole(module)) for module in layer.modules()):
        return Fp8DecoderLayer(layer, family, config, index, workspace)
    return FastDecoderLayer(layer, family, config, index)
