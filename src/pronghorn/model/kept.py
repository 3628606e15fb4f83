"""What a layer's forward leaves for its backward, how much of it stays at each level, and where it waits.

    level "nothing"    all of it; norms' outputs and the activation product are not part of it: they are computed again anyway
          "gate_up"    without the gate and up product (2F values a token, more than all the rest)
          "layer"      the layer's input, and the T x R behind `down`'s A, which spares the down product a second run

Recomputed values are the same bits: the same kernels on the same inputs. With `offload`, what stays waits somewhere else
(memory/offload.py: pinned host memory), and comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

Level = Literal["nothing", "gate_up", "layer"]  # what is computed again


@dataclass
class Kept:
    h: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    o: Tensor  # attention's output, of every token
    o_ext: Tensor  # with the extra columns; only `rows` of it in the last layer, else what `o` is part of
    h2: Tensor
    gu: Tensor | None
    qkv: Tensor | None = None  # before qk-norm
    qk_rstd: Tensor | None = None
    xa1: Tensor | None = None  # x A^T of each group of projections: T x R
    xa2: Tensor | None = None
    xa3: Tensor | None = None
    y1: Tensor | None = None  # attention branch, where a norm follows it
    y2: Tensor | None = None  # MLP branch, where a norm follows it
    rstd: dict[str, Tensor] = field(default_factory=dict)


class Input(NamedTuple):
    """All that level "layer" leaves."""

    h: Tensor
    xa3: Tensor | None


class Elsewhere(Protocol):
    """memory.offload.OffloadPool, as the layers use it."""

    def leave(self, layer: int, tensors: Sequence[Tensor | None]) -> Any: ...
    def back(self, layer: int) -> tuple[Tensor | None, ...]: ...


@dataclass(frozen=True)
class Away:
    """Stands for what waits elsewhere: the same with nothing in it."""

    shape: Kept | Input


Left = Kept | Input | Away


def leave(kept: Kept, level: Level, layer: int, elsewhere: Elsewhere | None) -> Left:
    """What forward holds on to until backward."""
    left: Kept | Input = Input(kept.h, kept.xa3) if level == "layer" else kept
    if level == "gate_up":
        kept.gu = None
    if elsewhere is None:
        return left
    tensors = _tensors(left)
    elsewhere.leave(layer, tensors)
    return Away(_with_tensors(left, [None] * len(tensors)))


def come_back(left: Left, layer: int, elsewhere: Elsewhere | None) -> Kept | Input:
    if not isinstance(left, Away):
        return left
    assert elsewhere is not None, "what left needs the place it went to"
    return _with_tensors(left.shape, elsewhere.back(layer))


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
