"""Attention in plain torch, document by document (see attention.py for what is computed and for the letters).

For the CPU, and for GPUs where nothing faster applies. On the CPU, documents without a soft-cap and without an effective window
use torch's own blocked kernels (2048 tokens, 9 heads, one core: 0.34 s instead of 1.7 s dense; 2 times as fast forward and 1.3
times backward as the blocks below). Everything else runs in blocks of query rows, so memory is bounded by a block's scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

Backend = Literal["short", "flash4", "flash2", "flex", "torch"]  # in order of preference
Parts = tuple[Tensor, Tensor, Tensor]  # q, k, v or their gradients
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None]  # of q, k, v and the sinks
# Query rows at a time: 1.3 to 1.5 times as fast as 256 on one core (documents of 207 to 2048 tokens), as fewer scores above
# the diagonal are computed; 32 heads against 8,192 keys are 134 MB of scores in fp32.
BLOCK_ROWS = 128


@dataclass(frozen=True, slots=True)
class Packed:
    """What an attention call is, apart from its q, k and v."""

    cu_seqlens: Tensor
    longest: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_N: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    spans_2T: Tensor | None = None
    prefix_2T: Tensor | None = None  # the rows before its own that each token sees too (attention_shared.py)
    unseen_LL: Tensor | None = None  # of one document, what its rows do not see, in the place of causality and window
    # Of queries that are a piece of the pack (attention_pieces.py): rows of keys before the first one, and their own bounds.
    # Documents without queries have no keys, and nobody writes their gradients.
    before: int = 0
    bounds_q: Tensor | None = None

    def spans_of(self, tokens: int) -> Tensor:
        """[2, T]: where each token's document begins and ends; the caller's, who made it once per batch, or a new one."""
        return spans(self.cu_seqlens, tokens) if self.spans_2T is None else self.spans_2T

    def queries(self, rows: slice) -> slice:
        """Where the queries of these rows of the pack lie."""
        return slice(rows.start - self.before, rows.stop - self.before)

    def first_query(self, start: int) -> int | None:
        """The first row with a query of the document that begins there; None: its own first row."""
        return self.before if start < self.before else None

    def documents(self) -> Iterator[tuple[int, int]]:
        """(first row, row after the last) of each document that has tokens, on the host."""
        bounds = self.cu_seqlens.tolist() if self.lengths is None else accumulate(self.lengths, initial=0)
        for start, end in pairwise(bounds):
            if end > start:
                yield start, end


class Computed(NamedTuple):
    """What a forward read and wrote: all that its backward needs."""

    q_TNH: Tensor
    k_TKH: Tensor
    v_TKH: Tensor
    out_TNH: Tensor
    lse_NT: Tensor

    def empty_grads(self) -> Parts:
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in self[:3])
        return dq, dk, dv


def written(grads: Parts | None, found: Sequence[Tensor], dsinks: Tensor | None) -> Grads:
    """Gradients of a backend that allocates its own, copied to where the caller wants them."""
    if grads is None:
        return found[0], found[1], found[2], dsinks
    for mine, theirs in zip(grads, found, strict=False):
        mine.copy_(theirs)
    return (*grads, dsinks)


def spans(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[2, T] int32: where each token's document begins and ends. Computed on the device, without a synchronization."""
    place = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, place, right=True)
    return torch.stack([cu_seqlens[document - 1], cu_seqlens[document]])


def apply_sinks(out_TNH: Tensor, lse_NT: Tensor, sinks_N: Tensor) -> Tensor:
    """Add the sinks to an attention computed without: scales `out` in place, returns the new lse.

    The sink's share of a row is exp(sink - lse'), what is left of the others exp(lse - lse'). Given out and lse', the
    backward of an attention without sinks computes the right dq, dk and dv: they need p = exp(s - lse') and out alone.
    """
    with_sinks = torch.logaddexp(lse_NT, sinks_N.to(lse_NT.dtype)[:, None])
    out_TNH.mul_(torch.exp(lse_NT - with_sinks).T[..., None])
    return with_sinks


def sink_gradients(dout_TNH: Tensor, out_TNH: Tensor, lse_NT: Tensor, sinks_N: Tensor | None) -> Tensor | None:
    """dsink_n = - sum_t exp(sink_n - lse_nt) * (dout_tn . out_tn)"""
    if sinks_N is None:
        return None
    delta_NT = (dout_TNH.to(lse_NT.dtype) * out_TNH).sum(-1).T
    share_NT = torch.exp(sinks_N.to(lse_NT.dtype)[:, None] - lse_NT)
    return -(share_NT * delta_NT).sum(1).to(sinks_N.dtype)


class PlainTorch:
    title: ClassVar[str] = "plain torch"

    @staticmethod
    def forward(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, out: Tensor | None) -> tuple[Tensor, Tensor]:
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device) if out is None else out
        lse_NT = torch.empty(q_TNH.shape[1::-1], dtype=compute_dtype(q_TNH), device=q_TNH.device)
        for start, end in packed.documents():
            forward_document(q_TNH, k_TKH, v_TKH, packed, start, end, out_TNH, lse_NT, packed.first_query(start))
        return out_TNH, lse_NT

    @staticmethod
    def backward(dout_TNH: Tensor, done: Computed, packed: Packed, grads: Parts | None) -> Grads:
        found = grads or done.empty_grads()
        for start, end in packed.documents():
            backward_document(dout_TNH, done, packed, start, end, found, packed.first_query(start))
        return (*found, sink_gradients(dout_TNH, done.out_TNH, done.lse_NT, packed.sinks_N))


def forward_document(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, start: int, end: int, out_TNH: Tensor, lse_NT: Tensor,
    first: int | None = None,
) -> None:  # fmt: skip
    """Attention of the rows `start : end`, which see nothing else. `first`: only of the rows from there on."""
    rows = slice(start, end)
    if first is None and _has_torch_kernel(q_TNH, packed, end - start):
        own = packed.queries(rows)
        out_KGLH, lse_KGL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_grouped(q_TNH[own], k_TKH[rows], v_TKH[rows]), 0.0, True, scale=packed.scale
        )
        out_TNH[own] = out_KGLH.permute(2, 0, 1, 3).flatten(1, 2)
        lse_NT[:, own] = lse_KGL.flatten(0, 1)
    else:
        for block, keys in _blocks(start, end, packed.window, first):
            _forward_block(q_TNH, k_TKH, v_TKH, packed, block, keys, out_TNH, lse_NT)


def backward_document(
    dout_TNH: Tensor, done: Computed, packed: Packed, start: int, end: int, grads: Parts, first: int | None = None
) -> None:
    """Writes the gradients of the rows `start : end`. `first`: dq of the rows from it on only, and what they do to dk, dv."""
    q_TNH, k_TKH, v_TKH, out_TNH, lse_NT = done
    dq_TNH, dk_TKH, dv_TKH = grads
    rows = slice(start, end)
    if first is None and _has_torch_kernel(q_TNH, packed, end - start):
        own = packed.queries(rows)
        q, k, v = _grouped(q_TNH[own], k_TKH[rows], v_TKH[rows])
        dout, out = (_heads_first(x[own], k_TKH.shape[1]) for x in (dout_TNH, out_TNH))
        lse = lse_NT[:, own].reshape(q.shape[:3])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, True, scale=packed.scale
        )
        dq_TNH[own] = dq.permute(2, 0, 1, 3).flatten(1, 2)
        dk_TKH[rows] = dk.sum(1).transpose(0, 1)
        dv_TKH[rows] = dv.sum(1).transpose(0, 1)
    else:
        _backward_blocks((dout_TNH, q_TNH, k_TKH, v_TKH, lse_NT), packed, start, end, grads, first)


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _has_torch_kernel(q: Tensor, packed: Packed, length: int) -> bool:
    """Whether torch's CPU kernel computes this document. Half types run in blocks, in fp32, rounded once at the end. So do
    sinks: that kernel does not support them, and adding them afterwards costs dq a digit in fp32."""
    whole = packed.window is None or packed.window >= length
    plain = packed.softcap is None and packed.sinks_N is None and packed.unseen_LL is None
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.float64) and plain and whole


def _heads_first(x_LNH: Tensor, kv_heads: int) -> Tensor:
    """[L, N, H] -> [K, G, L, H], a view: query heads that share a key head side by side."""
    length, _, width = x_LNH.shape
    return x_LNH.view(length, kv_heads, -1, width).permute(1, 2, 0, 3)


def _grouped(q_LNH: Tensor, k_LKH: Tensor, v_LKH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as [K, G, L, H]; keys and values repeat over the group without being copied."""
    q_KGLH = _heads_first(q_LNH, k_LKH.shape[1])
    k_KGLH, v_KGLH = (x.transpose(0, 1)[:, None].expand(q_KGLH.shape) for x in (k_LKH, v_LKH))
    return q_KGLH, k_KGLH, v_KGLH


def _blocks(start: int, end: int, window: int | None, first: int | None = None) -> Iterator[tuple[slice, slice]]:
    """Query rows in blocks, each with the rows of the keys that any of them sees."""
    for row in range(start if first is None else first, end, BLOCK_ROWS):
        last = min(row + BLOCK_ROWS, end)
        yield slice(row, last), slice(start if window is None else max(start, row - window + 1), last)


def _scores(q_TNH: Tensor, k_TKH: Tensor, packed: Packed, block: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Scores [K, G, rows, keys] of a block, soft-capped, not masked; and the mask of invisible ones [rows, keys]."""
    dtype = compute_dtype(q_TNH)
    q_KGRH = _heads_first(q_TNH[packed.queries(block)], k_TKH.shape[1]).to(dtype) * packed.scale
    k_KHJ = k_TKH[keys].permute(1, 2, 0).to(dtype)
    scores = (q_KGRH.flatten(1, 2) @ k_KHJ).view(*q_KGRH.shape[:3], -1)
    if packed.softcap is not None:
        scores.div_(packed.softcap).tanh_().mul_(packed.softcap)
    if packed.unseen_LL is not None:
        return scores, packed.unseen_LL[block, keys]
    i = torch.arange(block.start, block.stop, device=q_TNH.device)[:, None]
    j = torch.arange(keys.start, keys.stop, device=q_TNH.device)[None, :]
    unseen = j > i if packed.window is None else (j > i) | (i - j >= packed.window)
    return scores, unseen


def _forward_block(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, block: slice, keys: slice, out_TNH: Tensor, lse_NT: Tensor
) -> None:
    scores, unseen = _scores(q_TNH, k_TKH, packed, block, keys)
    scores.masked_fill_(unseen, -math.inf)
    lse_KGR = torch.logsumexp(scores, -1)
    if packed.sinks_N is not None:
        sinks_KG1 = packed.sinks_N.to(lse_KGR.dtype).view(*lse_KGR.shape[:2], 1)
        lse_KGR = torch.logaddexp(lse_KGR, sinks_KG1)
    probabilities = scores.sub_(lse_KGR[..., None]).exp_()
    out_KGRH = (probabilities.flatten(1, 2) @ v_TKH[keys].transpose(0, 1).to(scores.dtype)).view(*scores.shape[:3], -1)
    own = packed.queries(block)
    out_TNH[own] = out_KGRH.permute(2, 0, 1, 3).flatten(1, 2).to(out_TNH.dtype)
    lse_NT[:, own] = lse_KGR.flatten(0, 1)


def _backward_blocks(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    packed: Packed,
    start: int,
    end: int,
    grads: tuple[Tensor, Tensor, Tensor],
    first: int | None,
) -> None:
    dout_TNH, q_TNH, k_TKH, v_TKH, lse_NT = tensors  # X below: the rows of all query heads of a group
    dq_TNH, dk_TKH, dv_TKH = grads
    dtype, kv_heads = lse_NT.dtype, k_TKH.shape[1]
    dk_KLH = torch.zeros((kv_heads, end - start, q_TNH.shape[-1]), dtype=dtype, device=q_TNH.device)
    dv_KLH = torch.zeros_like(dk_KLH)
    for block, keys in _blocks(start, end, packed.window, first):
        scores, unseen = _scores(q_TNH, k_TKH, packed, block, keys)
        own = packed.queries(block)
        lse_KGR = lse_NT[:, own].view(scores.shape[:3])
        probabilities = (scores - lse_KGR[..., None]).exp_().masked_fill_(unseen, 0.0)
        dout_KXH, q_KXH = (_heads_first(x[own], kv_heads).to(dtype).flatten(1, 2) for x in (dout_TNH, q_TNH))
        local = slice(keys.start - start, keys.stop - start)
        dv_KLH[:, local] += probabilities.flatten(1, 2).transpose(1, 2) @ dout_KXH
        dscores = (dout_KXH @ v_TKH[keys].permute(1, 2, 0).to(dtype)).view(*scores.shape[:3], -1)
        # The sum over all keys of the block, not dout . out, which is already rounded.
        share = dscores * probabilities
        dscores = share.addcmul_(probabilities, share.sum(-1, keepdim=True), value=-1).mul_(packed.scale)
        if packed.softcap is not None:  # d tanh = 1 - tanh^2, and scores / softcap is that tanh
            dscores.mul_(1 - (scores / packed.softcap).square_())
        dscores_KXJ = dscores.flatten(1, 2)
        dk_KLH[:, local] += dscores_KXJ.transpose(1, 2) @ q_KXH
        dq_KGRH = (dscores_KXJ @ k_TKH[keys].transpose(0, 1).to(dtype)).view(*scores.shape[:3], -1)
        dq_TNH[own] = dq_KGRH.permute(2, 0, 1, 3).flatten(1, 2).to(dq_TNH.dtype)
    dk_TKH[start:end] = dk_KLH.transpose(0, 1).to(dk_TKH.dtype)
    dv_TKH[start:end] = dv_KLH.transpose(0, 1).to(dv_TKH.dtype)
