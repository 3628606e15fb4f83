"""Tensors that a layer saves for backward, by name; recompute levels as sets of names; offloading.

    level "nothing"           everything. Norm outputs and the activation are never saved: backward recomputes them anyway
          "gate_up"           everything but gate and up (2F values a token, more than all the rest), and but the heads that
                              latent attention makes of its latents
          "around_attention"  the layer's input, attention's output, and a A^T of `down`: all but attention is recomputed
          "layer"             the layer's input and a A^T of `down` (T x R), which saves running the down GEMM twice

Recomputed values have the same bits: the same kernels on the same inputs. With `offload`, saved tensors move to pinned host
memory (memory/offload.py) and back, bit for bit. The names:

    h            the layer's input                 gu, xa2      gate and up, with columns for their gradient; x A^T
    q k v        after RoPE                        y1, y2       a branch's output, where a norm follows it
    qkv          the buffer of q, k, v             xa3          a A^T of `down`
    xa1, xa_o    x A^T of q, k, v; of `out`        rstd.SLOT    of the norm in this slot
    o, lse       attention's output                h_rows       the residual, until the norm before the MLP adds it
    latents      latent attention's: of queries, of keys and values, and the key that all heads share
    xa_q, xa_kv  x A^T of the linears from these latents to the heads
    y, core, R   of Gated DeltaNet: what its linears made, the rule's output and inverses; y, core: also of Mamba-2; core: also
                 of gated attention
    o_rows, h2   of the rows after attention: attention's output, and the residual stream
    h3, g, y3    of the part that reads a layer's own input (mlps/layer_input.py): the residual stream, its gate, its output
    xa4, xa5     x A^T of that gate, and of its projection
    mamba_NAME   of Mamba-2 beside attention; dense_NAME: of a dense MLP beside experts
    shares       the experts' weights before factors of theirs

Never saved: what a layer is given beside the residual stream (`Documents.given`), which its node holds: k and v of an earlier
layer, and e, its own input. A layer whose k and v others read hands them on as `Saved.lent`; dk and dv are their gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

Level = Literal["nothing", "gate_up", "around_attention", "layer"]  # what backward recomputes
Kept = Mapping[Level, tuple[str, ...]]  # names, by level
FROM_INPUT: tuple[Level, ...] = ("layer", "around_attention")  # levels that recompute from the layer's input


class Saved(dict[str, Tensor]):
    """Tensors by name; None for a missing name. Backward adds the gradients of norms, by slot, and of what was given."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, **more: Tensor) -> None:
        super().__init__(tensors or {}, **more)
        self.norm_grads: dict[str, Tensor | None] = {}
        self.given_grads: dict[str, Tensor] = {}
        self.lent: dict[str, Tensor] = {}

    def __missing__(self, name: str) -> Any:
        return None

    def put(self, **tensors: Tensor | None) -> None:
        """Stores those that are not None."""
        self.update({name: tensor for name, tensor in tensors.items() if tensor is not None})

    def release(self, *names: str) -> None:
        """Frees tensors that backward no longer needs."""
        for name in names:
            self.pop(name, None)


class Elsewhere(Protocol):
    """memory.offload.OffloadPool, as the layers use it."""

    def leave(self, layer: int, tensors: Sequence[Tensor | None]) -> Any: ...
    def back(self, layer: int) -> tuple[Tensor | None, ...]: ...


Left = Saved | tuple[str, ...]  # names of offloaded tensors


def leave(saved: Saved, layer: int, elsewhere: Elsewhere | None) -> Left:
    """What a forward holds until backward."""
    if elsewhere is None:
        return saved
    elsewhere.leave(layer, list(saved.values()))
    return tuple(saved)


def restore(left: Left, layer: int, elsewhere: Elsewhere | None) -> Saved:
    if isinstance(left, Saved):
        return left
    assert elsewhere is not None, "offloaded tensors need the pool that holds them"
    return Saved({name: tensor for name, tensor in zip(left, elsewhere.back(layer), strict=True) if tensor is not None})


def copied(left: Left) -> Left:
    """A copy; parts of one buffer (q, k, v) stay parts of one."""
    if not isinstance(left, Saved):
        raise RuntimeError("offloaded activations are restored only once: recompute the loss for a second backward")
    memo: dict[int, Any] = {}
    return Saved({name: copy.deepcopy(tensor.detach(), memo) for name, tensor in left.items()})
