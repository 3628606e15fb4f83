"""The MLP of a decoder layer (decoder_layer.py) some rows at a time, where gate and up are computed again in backward anyway.

Gate and up, the activation and their gradients are the largest tensors of a layer: at 16,384 tokens of an 8B model 1.4 GB, of
which four pieces hold a quarter at a time. Rows are independent in everything but the sums that are the parameters' gradients,
and those add up over the pieces. Products of 4,096 rows are as fast as those of 16,384; the weights are read once more a piece.

    forward     for each piece: x2 = norm(h2), gu = x2 Wgu, a, h3 = h2 + a Wdown        kept: as the level says, never gu
    backward    for each piece: x2, gu again, then back to dh2, which takes dh3's place where that is our own buffer

Layers that multiply in FP8 (fp8_layer.py) do the same with steps of their own (`MlpSteps`): each row has its own scale, so the
rows of a piece are the same bytes as among all.

At levels "layer" and "around_attention" nobody needs h2 after forward, so h3 takes its place; and what backward starts from is
the attention branch's output, which the first pass over a piece turns into h2. Every row goes through the same operations as in
one piece; products of fewer rows may sum in another order, and sums over pieces do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_then_add_forward
from pronghorn.model.kept import GradientRoom, Input, Kept, Level

if TYPE_CHECKING:
    from pronghorn.model.decoder_layer import Documents, FastDecoderLayer, Norm

Grads = list[Tensor | None]
NormGrads = dict[str, Tensor | None]
Rstd = dict[str, Tensor]
Activated = TypeVar("Activated")


@dataclass
class Piece:
    """Some rows of the MLP, on the way back."""

    dh3: Tensor
    dh2: Tensor  # to be filled; may be dh3
    h2: Tensor
    gu: Tensor
    xa2: Tensor | None
    xa3: Tensor | None
    y2: Tensor | None
    rstd: Rstd
    room: GradientRoom


class MlpSteps(Protocol[Activated]):
    """What a layer does with the rows of a piece. `Activated`: the activation, in the form in which `down` reads it."""

    @property
    def layer(self) -> FastDecoderLayer: ...

    def up_to_the_mlp(self, given: Input, documents: Documents, rows: Tensor | None) -> Kept:
        """`h2` is the attention branch's output while `h_rows` is there, which the norm before the MLP adds to it."""

    def gate_up(self, y: Tensor, h: Tensor | None, rstd: Rstd) -> tuple[Tensor, Tensor | None]:
        """gu of norm(h + y), with h + y in y's place; of norm(y) without h. And x A^T."""

    def activated(self, gu: Tensor) -> Activated: ...

    def down(self, a: Activated) -> tuple[Tensor, Tensor | None]:
        """(the MLP's output, a A^T), for a norm that follows."""

    def down_add(self, a: Activated, h2: Tensor, h3: Tensor) -> Tensor | None:
        """a A^T. Fills h3, which may be h2, with h2 and the MLP's output."""

    def own_buffer(self, dh3: Tensor, room: GradientRoom) -> Tensor | None:
        """The buffer of which dh3 is a part, if dh2 may take its place."""

    def backward(self, piece: Piece, norm_grads: NormGrads) -> Grads:
        """Fills piece.dh2. Gradients of the parameters of gate and up and of down."""


def pieces_of(rows: int, pieces: int) -> Iterator[slice]:
    """Of equal size, but for the last one."""
    size = max(1, -(-rows // pieces))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


# ---- forward -----------------------------------------------------------------------------------------------------------------


def forward_in_pieces(steps: MlpSteps[Any], level: Level, h: Tensor, documents: Documents, rows: Tensor | None
                      ) -> tuple[Tensor, Kept | Input]:
    """(h3, what the level holds on to)"""
    all_again = level in ("layer", "around_attention")
    kept = steps.up_to_the_mlp(Input(h), documents, rows)
    y, h_rows, done = kept.h2, kept.h_rows, (kept.o, kept.lse) if level == "around_attention" else ()
    if all_again:
        kept.release("q", "k", "v", "o", "o_ext", "lse", "qkv", "y1")
    h3 = y if all_again else y.new_empty(y.shape)
    parts: dict[str, list[Tensor]] = {"xa2": [], "xa3": [], "y2": [], "before_mlp": [], "after_mlp": []}

    def note(name: str, value: Tensor | None) -> None:
        if value is not None:
            parts[name].append(value)

    for piece in pieces_of(len(y), steps.layer.pieces):
        rstd: Rstd = {}
        gu, xa2 = steps.gate_up(y[piece], None if h_rows is None else h_rows[piece], rstd)
        a = steps.activated(gu)
        del gu
        y2, xa3 = _down(steps, a, y[piece], h3[piece], rstd)
        del a  # before the next piece has its own
        note("xa3", xa3)
        if not all_again:
            note("xa2", xa2)
            note("y2", y2)
            for name, value in rstd.items():
                note(name, value)
        del y2
    joined = {name: _joined(values) for name, values in parts.items()}
    if all_again:
        return h3, Input(h, joined["xa3"], *done)
    kept.h_rows, kept.xa2, kept.xa3, kept.y2 = None, joined["xa2"], joined["xa3"], joined["y2"]
    kept.rstd |= {name: whole for name in ("before_mlp", "after_mlp") if (whole := joined[name]) is not None}
    return h3, kept


def _down(steps: MlpSteps[Any], a: Any, h2: Tensor, h3: Tensor, rstd: Rstd) -> tuple[Tensor | None, Tensor | None]:
    """Fills h3, which may be h2. (the branch's output where a norm follows it, a A^T)"""
    norm = steps.layer.after_mlp
    if norm is None:
        return None, steps.down_add(a, h2, h3)
    y, xa3 = steps.down(a)
    rstd["after_mlp"] = rms_norm_then_add_forward(y, norm.weight, norm.eps, h2, one_plus=norm.one_plus, out=h3)[1]
    return y, xa3


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if parts else None


# ---- backward ----------------------------------------------------------------------------------------------------------------


def again_up_to_the_mlp(steps: MlpSteps[Any], found: Input, documents: Documents, rows: Tensor | None) -> Kept:
    """What backward starts from at levels "layer" and "around_attention"."""
    kept = steps.up_to_the_mlp(found, documents, rows)
    kept.xa3 = found.xa3
    return kept


def backward_in_pieces(steps: MlpSteps[Any], dh3: Tensor, kept: Kept, documents: Documents, norm_grads: NormGrads
                       ) -> tuple[Tensor, Grads]:
    """(the gradient of h2, the gradients of the parameters of gate and up and of down)"""
    layer, width, own = steps.layer, dh3.shape[1], steps.own_buffer(dh3, documents.room)
    dh2_ext = own
    if dh2_ext is None or dh2_ext.shape[1] != width + layer.out.extra:
        dh2_ext = dh3.new_empty(len(dh3), width + layer.out.extra)
    grads: Grads = []
    for piece in pieces_of(len(dh3), layer.pieces):
        more_of_norms: NormGrads = {}
        rows = _rows_again(steps, piece, dh3[piece], dh2_ext[piece, :width], kept)
        rows.room.buffer = None if own is None else own[piece]
        grads = _sum(grads, steps.backward(rows, more_of_norms))
        del rows  # before the next piece has its own
        for name, grad in more_of_norms.items():
            (norm_grads[name],) = _sum([norm_grads.get(name)], [grad])
    documents.room.buffer = dh2_ext
    kept.h_rows = None
    return dh2_ext[:, :width], grads


def _rows_again(steps: MlpSteps[Any], piece: slice, dh3: Tensor, dh2: Tensor, kept: Kept) -> Piece:
    rstd: Rstd = {}
    h2, norm, y2 = kept.h2[piece], steps.layer.after_mlp, None
    gu, xa2 = steps.gate_up(h2, None if kept.h_rows is None else kept.h_rows[piece], rstd)
    if norm is not None and kept.y2 is not None:
        y2, rstd["after_mlp"] = kept.y2[piece], kept.rstd["after_mlp"][piece]
    elif norm is not None:
        y2 = steps.down(steps.activated(gu))[0]
        rstd["after_mlp"] = rms_norm_then_add_forward(y2, norm.weight, norm.eps, h2, one_plus=norm.one_plus)[1]
    return Piece(dh3, dh2, h2, gu, xa2, None if kept.xa3 is None else kept.xa3[piece], y2, rstd, GradientRoom())


def out_of_norm_in_place(norm: Norm | None, dx2: Tensor, piece: Piece, norm_grads: NormGrads) -> None:
    """Fills dh2."""
    if norm is None:
        torch.add(piece.dh3, dx2, out=piece.dh2)
        return
    _, norm_grads["before_mlp"] = rms_norm_backward(dx2, piece.h2, norm.weight, piece.rstd["before_mlp"], add_TD=piece.dh3,
                                                    one_plus=norm.one_plus, need_weight_grad=norm.trains(), out=piece.dh2)


def _sum(grads: Grads, more: Grads) -> Grads:
    """Both lists have the same places; the first piece's begins empty."""
    if not grads:
        return list(more)
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(grads, more, strict=True)]


# ---- in 16 or 32 bits --------------------------------------------------------------------------------------------------------


class PlainSteps:
    """Of FastDecoderLayer: rows have room behind them for the adapters' columns."""

    def __init__(self, layer: FastDecoderLayer) -> None:
        self.layer = layer

    def up_to_the_mlp(self, given: Input, documents: Documents, rows: Tensor | None) -> Kept:
        layer, h, seen = self.layer, given.h, self.layer.attended(given, documents, rows)
        if layer.adds_before_mlp:
            return seen.kept(h, layer.out.forward(seen.o_ext)[0], h_rows=seen.h_rows)
        h2, y1 = layer.branch(layer.out, seen.o_ext, seen.h_rows, layer.after_attention, seen.rstd, "after_attention")
        return seen.kept(h, h2, y1=y1)

    def gate_up(self, y: Tensor, h: Tensor | None, rstd: Rstd) -> tuple[Tensor, Tensor | None]:
        layer, norm = self.layer, self.layer.before_mlp
        if h is None or norm is None:
            return layer.gate_up_of(layer.normed(norm, y, layer.gate_up.extra, rstd, "before_mlp"))
        return layer.gate_up_of(layer.add_and_norm(norm, y, h, rstd)[0])

    def activated(self, gu: Tensor) -> Tensor:
        return self.layer.activated(gu)

    def down(self, a: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.layer.down.forward(a, extended=True)[0], self.layer.behind_down(a)

    def down_add(self, a: Tensor, h2: Tensor, h3: Tensor) -> Tensor | None:
        layer, out = self.layer, h2 if h3.data_ptr() == h2.data_ptr() else h3
        layer.down.forward_add(a, h2, layer.multiplier, extended=True, out=out)
        return layer.behind_down(a)

    def own_buffer(self, dh3: Tensor, room: GradientRoom) -> Tensor | None:
        return room.behind(dh3, self.layer.down.extra)

    def backward(self, piece: Piece, norm_grads: NormGrads) -> Grads:
        layer, fused = self.layer, self.layer.mlp_sums_are_fused()
        dy_ext, _ = layer.into_branch(piece.dh3, piece.y2, layer.after_mlp, piece.rstd, "after_mlp", norm_grads, layer.down,
                                      piece.room)
        da = layer.down.backward_input(dy_ext)
        dgu_ext, down_grads = layer.through_activation(da, dy_ext, piece.gu, piece.xa2, piece.xa3, fused)
        del da, dy_ext
        out_of_norm_in_place(layer.before_mlp, layer.gate_up.backward_input(dgu_ext), piece, norm_grads)
        gate_up_grads = layer.parameters_behind_norm(layer.gate_up, dgu_ext, piece.h2, piece.xa2, piece.rstd, "before_mlp",
                                                     "dB" if fused else None)
        return [*gate_up_grads, *down_grads]
