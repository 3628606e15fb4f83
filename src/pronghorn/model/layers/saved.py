"""What a layer's forward saves for its backward, by name, how much of it a recompute level saves, and where it waits.

    level "nothing"           everything. Norm outputs and the activation are never saved: backward recomputes them anyway
          "gate_up"           everything but the gate and up product (2F values a token, more than all the rest)
          "around_attention"  the layer's input, attention's output, and a A^T of `down`: all but attention is recomputed
          "layer"             the layer's input and a A^T of `down` (T x R), which spares the down product a second run

Recomputed values are the same bits: the same kernels on the same inputs. With `offload`, saved tensors wait in another place
(memory/offload.py: pinned host memory) and come back bit for bit. The names:

    h            the layer's input                 gu, xa2      gate and up, with columns for their gradient; x A^T
    q k v        with their positions              y1, y2       a branch's output, where a norm follows it
    qkv          what they are parts of            xa3          a A^T of `down`
    xa1, xa_o    x A^T of q, k, v; of `out`        rstd.SLOT    of the norm in this slot
    o, lse       attention's output                h_rows       the residual, as long as the norm before the MLP has to add it
    o_rows, h2   of the rows that go on: attention's output, and the residual stream after attention
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

Level = Literal["nothing", "gate_up", "around_attention", "layer"]  # what backward recomputes
FROM_INPUT: dict[str, tuple[str, ...]] = {  # levels that recompute from the layer's input, and what they save
    "layer": ("h", "xa3"),
    "around_attention": ("h", "xa3", "o", "lse"),
}


class Saved(dict[str, Tensor]):
    """Tensors by name. A name that is not there is None."""

    def __missing__(self, name: str) -> Any:
        return None

    def put(self, **tensors: Tensor | None) -> None:
        """Those that there are."""
        self.update({name: tensor for name, tensor in tensors.items() if tensor is not None})

    def release(self, *names: str) -> None:
        """Backward is done with these: their memory is free."""
        for name in names:
            self.pop(name, None)

    def at(self, level: Level) -> Saved:
        """What this level holds on to."""
        if level in FROM_INPUT:
            return Saved({name: self[name] for name in FROM_INPUT[level] if name in self})
        if level == "gate_up":
            self.release("gu")
        return self

    def only_input(self) -> bool:
        """Whether the layer has to be recomputed from its input."""
        return "q" not in self


class Elsewhere(Protocol):
    """memory.offload.OffloadPool, as the layers use it."""

    def leave(self, layer: int, tensors: Sequence[Tensor | None]) -> Any: ...
    def back(self, layer: int) -> tuple[Tensor | None, ...]: ...


@dataclass(frozen=True)
class Offloaded:
    """The names of what waits elsewhere."""

    names: tuple[str, ...]


Left = Saved | Offloaded


def leave(saved: Saved, layer: int, elsewhere: Elsewhere | None) -> Left:
    """What forward holds on to until backward."""
    if elsewhere is None:
        return saved
    elsewhere.leave(layer, list(saved.values()))
    return Offloaded(tuple(saved))


def restore(left: Left, layer: int, elsewhere: Elsewhere | None) -> Saved:
    if not isinstance(left, Offloaded):
        return left
    assert elsewhere is not None, "offloaded tensors need the pool that holds them"
    return Saved({name: tensor for name, tensor in zip(left.names, elsewhere.back(layer), strict=True) if tensor is not None})


def copied(left: Left) -> Left:
    """The same in memory of its own; parts of one buffer (q, k, v) stay parts of one."""
    if isinstance(left, Offloaded):
        raise RuntimeError("offloaded activations are restored only once: recompute the loss for a second backward")
    memo: dict[int, Any] = {}
    return Saved({name: copy.deepcopy(tensor.detach(), memo) for name, tensor in left.items()})
