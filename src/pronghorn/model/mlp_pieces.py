"""The MLP of a decoder layer (decoder_layer.py) some rows at a time, where gate and up are computed again in backward anyway.

Gate and up, the activation and their gradients are the largest tensors of a layer: at 16,384 tokens of an 8B model 1.4 GB, of
which four pieces hold a quarter at a time. Rows are independent in everything but the sums that are the parameters' gradients,
and those add up over the pieces. Products of 4,096 rows are as fast as those of 16,384; the weights are read once more a piece.

    forward     for each piece: x2 = norm(h2), gu = x2 Wgu, a, h3 = h2 + a Wdown        kept: as the level says, never gu
    backward    for each piece: x2, gu again, then back to dh2, which takes dh3's place where that is our own buffer

At level "layer" nobody needs h2 after forward, so h3 takes its place; and what backward starts from is the attention branch's
output, which the first pass over a piece turns into h2. Every row goes through the same operations as in one piece; products
of fewer rows may sum in another order, and sums over pieces do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pronghorn.kernels.rms_norm import rms_norm_backward, rms_norm_then_add_forward
from pronghorn.model.kept import GradientRoom, Input, Kept, Level

if TYPE_CHECKING:
    from pronghorn.model.decoder_layer import Documents, FastDecoderLayer

Grads = list[Tensor | None]


def pieces_of(rows: int, pieces: int) -> Iterator[slice]:
    """Of equal size, but for the last one."""
    size = max(1, -(-rows // pieces))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


# ---- forward -----------------------------------------------------------------------------------------------------------------


def forward_in_pieces(layer: FastDecoderLayer, level: Level, h: Tensor, documents: Documents, rows: Tensor | None
                      ) -> tuple[Tensor, Kept | Input]:
    """(h3, what the level holds on to)"""
    all_again = level == "layer"
    kept = _up_to_the_mlp(layer, h, documents, rows)
    y, h_rows = kept.h2, kept.h_rows
    if all_again:
        kept.release("q", "k", "v", "o", "o_ext", "lse", "qkv")
    h3 = y if all_again else y.new_empty(y.shape)
    parts: dict[str, list[Tensor]] = {"xa2": [], "xa3": [], "y2": [], "before_mlp": [], "after_mlp": []}

    def note(name: str, value: Tensor | None) -> None:
        if value is not None:
            parts[name].append(value)

    for piece in pieces_of(len(y), layer.pieces):
        rstd: dict[str, Tensor] = {}
        x2_ext = _into_mlp(layer, y[piece], None if h_rows is None else h_rows[piece], rstd)
        gu_ext, xa2 = layer.gate_up_of(x2_ext)
        del x2_ext
        a_ext = layer.activated(gu_ext)
        del gu_ext
        note("xa3", layer.behind_down(a_ext))
        y2 = _down(layer, a_ext, y[piece], h3[piece], rstd)
        del a_ext  # before the next piece has its own
        if not all_again:
            note("xa2", xa2)
            note("y2", y2)
            for name, value in rstd.items():
                note(name, value)
    joined = {name: _joined(values) for name, values in parts.items()}
    if all_again:
        return h3, Input(h, joined["xa3"])
    kept.h_rows, kept.xa2, kept.xa3, kept.y2 = None, joined["xa2"], joined["xa3"], joined["y2"]
    kept.rstd |= {name: whole for name in ("before_mlp", "after_mlp") if (whole := joined[name]) is not None}
    return h3, kept


def _up_to_the_mlp(layer: FastDecoderLayer, h: Tensor, documents: Documents, rows: Tensor | None) -> Kept:
    """`h2` is the attention branch's output while `h_rows` is there, which the norm before the MLP adds to it."""
    seen = layer.attended(h, documents, rows)
    if layer.adds_before_mlp:
        return seen.kept(h, layer.out.forward(seen.o_ext)[0], h_rows=seen.h_rows)
    h2, y1 = layer.branch(layer.out, seen.o_ext, seen.h_rows, layer.after_attention, seen.rstd, "after_attention")
    return seen.kept(h, h2, y1=y1)


def _into_mlp(layer: FastDecoderLayer, y: Tensor, h: Tensor | None, rstd: dict[str, Tensor]) -> Tensor:
    """norm(h + y), and h + y in y's place; norm(y) without h. In rows with room for gate and up's columns."""
    if h is None or layer.before_mlp is None:
        return layer.normed(layer.before_mlp, y, layer.gate_up.extra, rstd, "before_mlp")
    return layer.add_and_norm(layer.before_mlp, y, h, rstd)[0]


def _down(layer: FastDecoderLayer, a_ext: Tensor, h2: Tensor, h3: Tensor, rstd: dict[str, Tensor]) -> Tensor | None:
    """Fills h3, which may be h2; the branch's output where a norm follows it."""
    norm = layer.after_mlp
    if norm is None:
        layer.down.forward_add(a_ext, h2, layer.multiplier, extended=True, out=h2 if h3.data_ptr() == h2.data_ptr() else h3)
        return None
    y, _ = layer.down.forward(a_ext, extended=True)
    rstd["after_mlp"] = rms_norm_then_add_forward(y, norm.weight, norm.eps, h2, one_plus=norm.one_plus, out=h3)[1]
    return y


def _joined(parts: list[Tensor]) -> Tensor | None:
    return torch.cat(parts) if parts else None


# ---- backward ----------------------------------------------------------------------------------------------------------------


def again_up_to_the_mlp(layer: FastDecoderLayer, found: Input, documents: Documents, rows: Tensor | None) -> Kept:
    """What backward starts from at level "layer"."""
    kept = _up_to_the_mlp(layer, found.h, documents, rows)
    kept.xa3 = found.xa3
    return kept


def backward_in_pieces(layer: FastDecoderLayer, dh3: Tensor, kept: Kept, documents: Documents,
                       norm_grads: dict[str, Tensor | None]) -> tuple[Tensor, Grads]:
    """(the gradient of h2, the gradients of the parameters of gate and up and of down)"""
    width, own = dh3.shape[1], documents.room.behind(dh3, layer.down.extra)
    dh2_ext = own
    if dh2_ext is None or dh2_ext.shape[1] != width + layer.out.extra:
        dh2_ext = dh3.new_empty(len(dh3), width + layer.out.extra)
    grads: Grads = []
    for piece in pieces_of(len(dh3), layer.pieces):
        room = GradientRoom(None if own is None else own[piece])
        more, more_of_norms = _backward_of_piece(layer, piece, dh3[piece], dh2_ext[piece, :width], kept, room)
        grads = _sum(grads, more)
        for name, grad in more_of_norms.items():
            (norm_grads[name],) = _sum([norm_grads.get(name)], [grad])
    documents.room.buffer = dh2_ext
    kept.h_rows = None
    return dh2_ext[:, :width], grads


def _backward_of_piece(layer: FastDecoderLayer, piece: slice, dh3: Tensor, dh2: Tensor, kept: Kept, room: GradientRoom
                       ) -> tuple[Grads, dict[str, Tensor | None]]:
    """Fills dh2, which may be dh3. (gradients of the parameters of gate and up and of down, of the norms' weights)"""
    rstd: dict[str, Tensor] = {}
    norm_grads: dict[str, Tensor | None] = {}
    h2, fused = kept.h2[piece], layer.mlp_sums_are_fused()
    gu_ext, xa2 = layer.gate_up_of(_into_mlp(layer, h2, None if kept.h_rows is None else kept.h_rows[piece], rstd))
    y2 = None
    if layer.after_mlp is not None and kept.y2 is not None:
        y2, rstd["after_mlp"] = kept.y2[piece], kept.rstd["after_mlp"][piece]
    elif layer.after_mlp is not None:
        y2 = layer.branch(layer.down, layer.activated(gu_ext), h2, layer.after_mlp, rstd, "after_mlp", extended=True)[1]
    dy_ext, _ = layer.into_branch(dh3, y2, layer.after_mlp, rstd, "after_mlp", norm_grads, layer.down, room)
    da = layer.down.backward_input(dy_ext)
    xa3 = None if kept.xa3 is None else kept.xa3[piece]
    dgu_ext, down_grads = layer.through_activation(da, dy_ext, gu_ext, xa2, xa3, fused)
    del da, dy_ext
    dx2, norm = layer.gate_up.backward_input(dgu_ext), layer.before_mlp
    if norm is None:
        torch.add(dh3, dx2, out=dh2)
    else:
        _, norm_grads["before_mlp"] = rms_norm_backward(dx2, h2, norm.weight, rstd["before_mlp"], one_plus=norm.one_plus,
                                                        add_TD=dh3, need_weight_grad=norm.trains(), out=dh2)
    gate_up_grads = layer.parameters_behind_norm(layer.gate_up, dgu_ext, h2, xa2, rstd, "before_mlp", "dB" if fused else None)
    return [*gate_up_grads, *down_grads], norm_grads


def _sum(grads: Grads, more: Grads) -> Grads:
    """Both lists have the same places; the first piece's begins empty."""
    if not grads:
        return list(more)
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(grads, more, strict=True)]
