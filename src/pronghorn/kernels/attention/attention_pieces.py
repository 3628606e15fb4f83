"""Attention of a rank that has two pieces of a pack, and the keys and values of all of it (letters: attention.py).

C ranks share a pack of C T rows in 2 C pieces; rank r has the pieces r and 2 C - 1 - r, one behind the other, so that each rank
sees as many keys as any other.

    piece       0 | 1 | 2 | 3           C = 2: rank 0 has the rows of pieces 0 and 3, rank 1 those of 1 and 2
    keys        up to the piece's last row; of a document's, its queries see those up to themselves, as always

A piece is one call of attention with fewer queries than keys: every backend takes `before`, the number of keys before the first
query, and `bounds_q`, where each document's queries begin. Gradients of keys and values are sums over pieces and ranks, so they
are added in float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention import attention_backward, attention_forward
from pronghorn.kernels.attention.attention_torch import compute_dtype


class Piece(NamedTuple):
    rows: slice  # of the queries here
    before: int  # rows of the pack before them
    end: int  # row of the pack behind them
    bounds: Tensor  # where the documents' keys begin, from that of the first query up to `end`
    bounds_q: Tensor  # where their queries begin
    spans_2T: Tensor  # of the keys

    @property
    def options(self) -> dict[str, Any]:
        return {"before": self.before, "bounds_q": self.bounds_q, "spans_2T": self.spans_2T}


def pieces_of(cu_seqlens: Tensor, spans_2T: Tensor, rank: int, ranks: int) -> tuple[Piece, ...]:
    """The pieces of a rank. `cu_seqlens`, `spans_2T`: of the whole pack. On their device, without a synchronization."""
    size, found = spans_2T.shape[1] // (2 * ranks), []
    for i, number in enumerate((rank, 2 * ranks - 1 - rank)):
        before, end = number * size, (number + 1) * size
        bounds = torch.maximum(cu_seqlens.clamp(max=end), spans_2T[0, before])
        bounds_q = (cu_seqlens - before).clamp(0, size)
        found.append(Piece(slice(i * size, (i + 1) * size), before, end, bounds, bounds_q, spans_2T[:, :end].clamp(max=end)))
    return tuple(found)


def pieces_forward(
    q_TNH: Tensor, kv_C2KH: Tensor, pieces: Sequence[Piece], longest: int, *, out: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """(out_TNH, lse [pieces, N, rows of a piece]). `kv_C2KH`: of the pack's rows, in its order."""
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device) if out is None else out
    found = []
    for piece in pieces:
        k, v = kv_C2KH[: piece.end].unbind(1)
        here = piece.options | options
        found.append(attention_forward(q_TNH[piece.rows], k, v, piece.bounds, longest, out=out_TNH[piece.rows], **here)[1])
    return out_TNH, torch.stack(found)


def pieces_backward(
    dout_TNH: Tensor, q_TNH: Tensor, kv_C2KH: Tensor, out_TNH: Tensor, lse_2NP: Tensor, pieces: Sequence[Piece], longest: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq_TNH, what these queries do to keys and values [rows of the pack, 2, K, H], dsinks_N or None)"""
    dq_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    sums_C2KH = torch.zeros(kv_C2KH.shape, dtype=compute_dtype(kv_C2KH), device=kv_C2KH.device)
    dsinks_N: Tensor | None = None
    for piece, lse_NP in zip(pieces, lse_2NP, strict=True):
        here = piece.options | options
        k, v = kv_C2KH[: piece.end].unbind(1)
        dkv = torch.zeros(
            (piece.end, *kv_C2KH.shape[1:]), dtype=kv_C2KH.dtype, device=kv_C2KH.device
        )  # some are seen by nobody
        dk, dv = dkv.unbind(1)
        dout, q, out, dq = (x[piece.rows] for x in (dout_TNH, q_TNH, out_TNH, dq_TNH))
        *_, dsinks = attention_backward(dout, q, k, v, out, lse_NP, piece.bounds, longest, grads=(dq, dk, dv), **here)
        sums_C2KH[: piece.end] += dkv
        if dsinks is not None:
            dsinks_N = dsinks if dsinks_N is None else dsinks_N + dsinks
    return dq_TNH, sums_C2KH, dsinks_N
