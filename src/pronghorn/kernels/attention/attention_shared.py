"""Attention over packs in which documents share a prefix: several answers to one prompt, which is there once.

    rows        | prompt          | answer 1   | answer 2      | prompt ...          segments, `cu_seqlens` between them
    sees        itself            prompt, itself              the next group: nothing of this one

Each segment is causal in itself, and an answer also sees all of its prompt, so that every row has the attention that it would
have behind its prompt alone (attention.py, with the same letters). Answers stand behind their prompt, whose first row is their
group's; windows count positions: an answer's first row is one behind the prompt's last, wherever it lies in the pack.

    prompt_of_S int32: of each segment the one whose rows it sees too; -1 where there is none
    prefix_2T   int32: the first row of each token's prompt, and the row behind its last; both the token's segment's first row
                where there is none
    spans_2T    int32: where each token's segment begins, and the row behind the last one that sees the token

The kernel for short documents needs nothing else: its tiles are slices of the pack with a mask (attention_short.py) and leave
out the answers between a row and its prompt. One softmax, so there is nothing to merge, and sinks, soft-caps and RoPE's
backward stay what they are. Plain torch runs an answer as the end of a document that begins with the prompt, its keys and
values side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_torch import (
    BLOCK_ROWS,
    Computed,
    Grads,
    Packed,
    Parts,
    backward_document,
    compute_dtype,
    forward_document,
    sink_gradients,
    written,
)

MANY = 4  # answers to a prompt; pairs stay what they were, to the bit


class SharedSpans(NamedTuple):
    spans_2T: Tensor
    prefix_2T: Tensor


def shared_spans(cu_seqlens: Tensor, prompt_of_S: Tensor, tokens: int) -> SharedSpans:
    """On the device, without a synchronization."""
    ends_S = cu_seqlens[1:]
    itself_S = torch.arange(len(ends_S), device=cu_seqlens.device)
    prompts_S = torch.where(prompt_of_S < 0, itself_S, prompt_of_S.long())
    seen_until_S = ends_S.scatter_reduce(0, prompts_S, ends_S, "amax")  # by the last of the answers
    place = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    segment_T = torch.searchsorted(cu_seqlens, place, right=True) - 1
    prompt_T = prompts_S[segment_T]
    starts_T = cu_seqlens[segment_T]
    prefix_end_T = torch.where(prompt_T == segment_T, starts_T, cu_seqlens[prompt_T + 1])
    return SharedSpans(torch.stack([starts_T, seen_until_S[segment_T]]), torch.stack([cu_seqlens[prompt_T], prefix_end_T]))


def attention_shared_reference(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: SharedSpans, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition, with a mask, differentiable. For tests."""
    group = q_TNH.shape[1] // k_TKH.shape[1]
    k_NTH, v_NTH = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_TKH, v_TKH))
    scores = (q_TNH.transpose(0, 1) @ k_NTH.transpose(1, 2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    (starts, _), (first, behind) = spans.spans_2T, spans.prefix_2T
    i = torch.arange(len(q_TNH), device=q_TNH.device)
    own = (i[None] >= starts[:, None]) & (i[None] <= i[:, None])
    before = (i[None] >= first[:, None]) & (i[None] < behind[:, None])
    if window is not None:
        own &= i[:, None] - i[None] < window
        before &= (i - starts + behind)[:, None] - i[None] < window
    scores = scores.masked_fill(~(own | before), float("-inf"))
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N.to(scores.dtype)[:, None, None].expand(-1, len(i), 1)], dim=-1)
    return (scores.softmax(-1)[..., : len(i)] @ v_NTH).transpose(0, 1)


class SharedTorch:
    """Plain torch, segment by segment."""

    title: ClassVar[str] = "plain torch, with shared prefixes"

    @staticmethod
    def forward(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, out: Tensor | None) -> tuple[Tensor, Tensor]:
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device) if out is None else out
        lse_NT = torch.empty(q_TNH.shape[1::-1], dtype=compute_dtype(q_TNH), device=q_TNH.device)
        for start, end, prompt in _segments(packed):
            if isinstance(prompt, Tensor):
                group, together = slice(start, end), replace(packed, window=None, unseen_LL=prompt)
                q, k, v = (x[group] for x in (q_TNH, k_TKH, v_TKH))
                forward_document(q, k, v, together, 0, end - start, out_TNH[group], lse_NT[:, group])
                continue
            if prompt is None:
                forward_document(q_TNH, k_TKH, v_TKH, packed, start, end, out_TNH, lse_NT)
                continue
            q, k, v = (_behind(x, prompt, start, end) for x in (q_TNH, k_TKH, v_TKH))
            result, norms, length = torch.empty_like(q), lse_NT.new_empty(len(lse_NT), len(q)), len(q) - (end - start)
            forward_document(q, k, v, packed, 0, len(q), result, norms, length)
            out_TNH[start:end], lse_NT[:, start:end] = result[length:], norms[:, length:]
        return out_TNH, lse_NT

    @staticmethod
    def backward(dout_TNH: Tensor, done: Computed, packed: Packed, grads: Parts | None) -> Grads:
        """A prompt's gradients come from several segments, whose inputs the caller's buffers may be: written at the end."""
        parts = done[:3]
        dq, dk, dv = (torch.zeros(x.shape, dtype=done.lse_NT.dtype, device=x.device) for x in parts)
        for start, end, prompt in _segments(packed):
            if isinstance(prompt, Tensor):
                group, together = slice(start, end), replace(packed, window=None, unseen_LL=prompt)
                q, k, v, o = (x[group] for x in (*parts, done.out_TNH))
                own = Computed(q, k, v, o, done.lse_NT[:, group])
                backward_document(dout_TNH[group], own, together, 0, end - start, (dq[group], dk[group], dv[group]))
                continue
            if prompt is None:  # before all that is added to it: answers stand behind their prompt
                backward_document(dout_TNH, done, packed, start, end, (dq, dk, dv))
                continue
            length = prompt.stop - prompt.start
            q, k, v, o, dout = (_behind(x, prompt, start, end) for x in (*parts, done.out_TNH, dout_TNH))
            lse_NL = _behind(done.lse_NT.T, prompt, start, end).T
            new_q, new_k, new_v = (torch.empty(x.shape, dtype=dq.dtype, device=x.device) for x in (q, k, v))
            backward_document(dout, Computed(q, k, v, o, lse_NL), packed, 0, len(q), (new_q, new_k, new_v), length)
            dq[start:end] = new_q[length:]
            for mine, theirs in zip((dk, dv), (new_k, new_v), strict=True):
                mine[start:end] = theirs[length:]
                mine[prompt] += theirs[:length]
        rounded = [x.to(part.dtype) for x, part in zip((dq, dk, dv), parts, strict=True)]
        return written(grads, rounded, sink_gradients(dout_TNH, done.out_TNH, done.lse_NT, packed.sinks_N))


def _segments(packed: Packed) -> Iterator[tuple[int, int, slice | Tensor | None]]:
    """(first row, row behind the last, its prompt's rows) of each segment, on the host. A prompt with many short answers comes
    whole, with what its rows do not see: 16 prompts of 19 tokens with 8 answers of 4 take a fifth of the time."""
    assert packed.prefix_2T is not None
    firsts, behinds = packed.prefix_2T.tolist()
    documents = list(packed.documents())
    answers = Counter(firsts[start] for start, _ in documents if behinds[start] > firsts[start])
    ends = {firsts[start]: end for start, end in documents}  # of each group, whose segments stand side by side
    for start, end in documents:
        first, size = firsts[start], ends[firsts[start]] - firsts[start]
        if answers[first] < MANY or size > BLOCK_ROWS or size > (packed.window or size):
            yield start, end, slice(first, behinds[start]) if behinds[start] > first else None
        elif start == first:
            yield start, ends[start], _unseen(packed, start, ends[start])


def _unseen(packed: Packed, start: int, end: int) -> Tensor:
    assert packed.prefix_2T is not None
    row = torch.arange(start, end, device=packed.prefix_2T.device)
    first, behind = packed.prefix_2T[:, start:end, None]
    own = packed.spans_of(packed.prefix_2T.shape[1])[0, start:end, None]
    seen: Tensor = ((row >= first) & (row < behind)) | ((row >= own) & (row <= row[:, None]))
    return ~seen


def _behind(x: Tensor, prompt: slice, start: int, end: int) -> Tensor:
    return torch.cat([x[prompt], x[start:end]])
