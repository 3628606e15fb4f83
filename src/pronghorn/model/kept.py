"""What a layer's forward leaves for its backward, how much of it stays at each level, and where it waits.

    level "nothing"    all of it; norms' outputs and the activation product are not part of it: they are computed again anyway
          "gate_up"    without the gate and up product (2F values a token, more than all the rest)
          "around_attention"    what "layer" has, and attention's result: all but attention is computed again
          "layer"      the layer's input, and the T x R behind `down`'s A, which spares the down product a second run

Recomputed values are the same bits: the same kernels on the same inputs. With `offload`, what stays waits somewhere else
(memory/offload.py: pinned host memory), and comes back bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

Level = Literal["nothing", "gate_up", "around_attention", "layer"]  # what is computed again


@dataclass
class Kept:
    h: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    o: Tensor  # attention's output, of every token, with the extra columns
    o_ext: Tensor  # only `rows` of it in the last layer, else the same
    h2: Tensor
    gu: Tensor | None
    qkv: Tensor | None = None  # before qk-norm; without one, what q, k, v are parts of, with room for its gradient's columns
    qk_rstd: Tensor | None = None
    xa1: Tensor | None = None  # x A^T of each group of projections: T x R
    xa2: Tensor | None = None
    xa3: Tensor | None = None
    y1: Tensor | None = None  # attention branch, where a norm follows it
    y2: Tensor | None = None  # MLP branch, where a norm follows it
    rstd: dict[str, Tensor] = field(default_factory=dict)
    h_rows: Tensor | None = None  # what is still to be added to h2, by the norm before the MLP (model/mlp_pieces.py)

    def release(self, *names: str) -> None:
        """These are not looked at any more: their memory is free."""
        for name in names:
            setattr(self, name, None)


@dataclass
class Attended:
    """The layer up to the attention's output, and the residual stream of the rows that go on."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    o: Tensor
    o_ext: Tensor
    h_rows: Tensor
    qkv: Tensor | None
    qk_rstd: Tensor | None
    xa1: Tensor | None
    rstd: dict[str, Tensor]

    def kept(self, h: Tensor, h2: Tensor, **more: Tensor | None) -> Kept:
        own = {"gu": None} | more
        return Kept(h, self.q, self.k, self.v, self.lse, self.o, self.o_ext, h2, qkv=self.qkv, qk_rstd=self.qk_rstd,
                    xa1=self.xa1, rstd=self.rstd, **own)


@dataclass
class GradientRoom:
    """The buffer of which the gradient that a layer handed down is a part: the layer below puts its extra columns behind it
    instead of copying it to where there is room for them (64 copies of T x D, 4 ms of an 8B step)."""

    buffer: Tensor | None = None

    def behind(self, dh: Tensor, extra: int) -> Tensor | None:
        """dh with `extra` columns more, if it is still where it was left and there are as many."""
        room = self.buffer
        if room is None or not extra or dh.data_ptr() != room.data_ptr() or dh.stride() != room.stride():
            return None
        return room if room.shape == (dh.shape[0], dh.shape[1] + extra) else None


class Input(NamedTuple):
    """What a layer can begin with: its input, and what it need not do again."""

    h: Tensor
    xa3: Tensor | None = None
    o: Tensor | None = None
    lse: Tensor | None = None


class Elsewhere(Protocol):
    """memory.offload.OffloadPool, as the layers use it."""

    def leave(self, layer: int, tensors: Sequence[Tensor | None]) -> Any: ...
    def back(self, layer: int) -> tuple[Tensor | None, ...]: ...


@dataclass(frozen=True)
class Away:
    """Stands for what waits elsewhere: the same with nothing in it."""

    shape: Kept | Input


Left = Kept | Input | Away


def leave(kept: Kept | Input, level: Level, layer: int, elsewhere: Elsewhere | None) -> Left:
    """What forward holds on to until backward."""
    left = kept
    if isinstance(kept, Kept) and level in ("layer", "around_attention"):
        left = Input(kept.h, kept.xa3) if level == "layer" else Input(kept.h, kept.xa3, kept.o, kept.lse)
    elif isinstance(kept, Kept) and level == "gate_up":
        kept.gu = None
    if elsewhere is None:
        return left
    tensors = _tensors(left)
    elsewhere.leave(layer, tensors)
    return Away(_with_tensors(left, [None] * len(tensors)))


def come_back(left: Left, layer: int, elsewhere: Elsewhere | None) -> Kept | Input:
    if not isinstance(left, Away):
        return left
    assert elsewhere is not None, "offloaded tensors need their pool"
    return _with_tensors(left.shape, elsewhere.back(layer))


def copied(left: Left) -> Left:
    """The same in memory of its own; parts of one buffer (q, k, v) stay parts of one."""
    if isinstance(left, Away):
        raise RuntimeError("offloaded activations are restored only once: recompute the loss for a second backward")
    memo: dict[int, Any] = {}
    tensors = [None if tensor is None else tensor.detach() for tensor in _tensors(left)]
    return _with_tensors(left, [copy.deepcopy(tensor, memo) for tensor in tensors])


def _tensors(left: Kept | Input) -> list[Tensor | None]:
    if isinstance(left, Input):
        return list(left)
    return [getattr(left, f.name) for f in fields(left) if f.name != "rstd"] + list(left.rstd.values())


def _with_tensors(left: Kept | Input, tensors: Sequence[Any]) -> Kept | Input:
    if isinstance(left, Input):
        return Input(*tensors)
    names = [f.name for f in fields(left) if f.name != "rstd"]
    values = dict(zip(names, tensors, strict=False))
    return replace(left, **values, rstd=dict(zip(left.rstd, tensors[len(names) :], strict=True)))
