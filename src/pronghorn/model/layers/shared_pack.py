"""Attention over a pack that ranks share (`world.context`), in the place of attention of a pack that is here alone.

Each rank has two pieces of the pack (kernels/attention/attention_pieces.py). Everything but attention works on rows, and knows
nothing of it. Attention gathers the keys and values of all ranks, forward and backward, and saves its own alone. Their
gradients are summed over the ranks, and each gets those of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_pieces import Piece, pieces_backward, pieces_forward, pieces_of
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.runtime.first_order import Ctx, first_order


class Begun(Protocol):
    def wait(self) -> None: ...


class Group(Protocol):
    """train.world.World of the ranks that share packs."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather(self, whole: Tensor, part: Tensor) -> Begun: ...
    def scatter_sum(self, part: Tensor, whole: Tensor) -> Begun: ...


@dataclass(frozen=True)
class SharedPack:
    group: Group
    pieces: Sequence[Piece]
    spans_2T: Tensor  # where the document of each of this rank's rows begins and ends, in rows of the pack

    @classmethod
    def of(cls, group: Group, cu_seqlens: Tensor, tokens: int) -> SharedPack:
        """Once per batch. `cu_seqlens`: the pack's; `tokens`: this rank's rows."""
        spans_2T = spans(cu_seqlens, tokens * group.size)
        pieces = pieces_of(cu_seqlens, spans_2T, group.rank, group.size)
        return cls(group, pieces, torch.cat([spans_2T[:, piece.before : piece.end] for piece in pieces], 1))

    # ---- what mixers call, with the arguments of kernels/attention/attention.py ----------------------------------------------

    def forward(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, out: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """(out, lse), the lse as `backward` takes it."""
        return pieces_forward(q_TNH, self._whole(k_TKH, v_TKH), self.pieces, out=out, **_of_pieces(options))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        whole = self._whole(k, v)
        dq, sums, dsinks = pieces_backward(dout, q, whole, out, lse, self.pieces, **_of_pieces(options))
        del whole
        dk, dv = self._own(sums).to(k.dtype).unbind(1)
        return dq, dk, dv, dsinks

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Differentiable."""
        sinks_N = options.pop("sinks_N", None)
        out: Tensor = _Attention.apply(q, k, v, sinks_N, self, options)  # type: ignore[no-untyped-call]
        return out

    # ---- between the ranks ---------------------------------------------------------------------------------------------------

    def _whole(self, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """[rows of the pack, 2, K, H]: keys and values of all ranks, in the pack's order."""
        own, ranks = torch.stack((k_TKH, v_TKH), 1), self.group.size
        found = own.new_empty(ranks * len(own), *own.shape[1:])
        self.group.gather(found, own).wait()
        by_rank = found.unflatten(0, (ranks, 2, -1))
        return torch.cat((by_rank[:, 0], by_rank[:, 1].flip(0))).flatten(0, 1)

    def _own(self, sums: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks."""
        ranks = self.group.size
        pieces = sums.unflatten(0, (2 * ranks, -1))
        by_rank = torch.stack((pieces[:ranks], pieces[ranks:].flip(0)), 1).flatten(0, 2)
        found = sums.new_empty(len(sums) // ranks, *sums.shape[1:])
        self.group.scatter_sum(found, by_rank).wait()
        return found


def _of_pieces(options: dict[str, Any]) -> dict[str, Any]:
    """Without what a piece has of its own."""
    return {name: value for name, value in options.items() if name not in ("cu_seqlens", "spans_2T", "prefix_2T")}


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, q: Tensor, k: Tensor, v: Tensor, sinks_N: Tensor | None, pack: SharedPack, options: dict[str, Any]
    ) -> Tensor:
        options = {**options, "sinks_N": None if sinks_N is None else sinks_N.detach()}
        out, lse = pack.forward(q, k, v, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pack, ctx.options = pack, options
        return out

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *grad_outputs: Any) -> Any:
        grads = ctx.pack.backward(grad_outputs[0], *ctx.saved_tensors, **ctx.options)
        return (*grads, None, None)
