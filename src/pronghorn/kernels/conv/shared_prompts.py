"""Documents that go on where another one ends: answers behind the prompt that they share, for mixers with a memory.

T = packed tokens, S = documents, E = S + 1. Answers stand right behind their prompt (attention/attention_shared.py). The state
of an answer begins as its prompt's last one, and its convolution sees its prompt's last rows. Gradients go back the same way;
those of several answers are added in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl


class SharedPrompts(NamedTuple):
    """All int32."""

    bounds_E: Tensor  # cu_seqlens
    behind_S: Tensor  # the document behind a prompt's last answer; a document alone: the next one; an answer: itself
    document_T: Tensor  # of each token
    ends_T: Tensor  # row behind the last of each token's document
    prefix_2T: Tensor  # first row of each token's prompt, row behind its last; both its document's first row if there is none

    def prompts(self) -> dict[int, int]:
        """The prompt of each answer, on the host."""
        behind = enumerate(self.behind_S.tolist())
        return {answer: prompt for prompt, end in behind for answer in range(prompt + 1, end)}


def shared_prompts(cu_seqlens: Tensor, prompt_of_S: Tensor, prefix_2T: Tensor) -> SharedPrompts:
    """On the device, without a synchronization. `prompt_of_S`: -1 where there is none."""
    itself_S = torch.arange(len(prompt_of_S), dtype=torch.int32, device=cu_seqlens.device)
    alone_S = prompt_of_S < 0
    behind_S = (itself_S + 1).scatter_reduce(0, torch.where(alone_S, itself_S, prompt_of_S).long(), itself_S + 1, "amax")
    row_T = torch.arange(prefix_2T.shape[1], dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document_T = torch.searchsorted(cu_seqlens, row_T, right=True, out_int32=True) - 1
    ends_T = cu_seqlens[1:].index_select(0, document_T)
    return SharedPrompts(cu_seqlens, torch.where(alone_S, behind_S, itself_S), document_T, ends_T, prefix_2T)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def prompt_of(prefix, row, start, T, SHARED: tl.constexpr):
    """(first row of the prompt, row behind its last) of these rows, whose documents begin at `start`."""
    first, behind = start, start
    if SHARED:
        first = tl.load(prefix + row, mask=row < T, other=0)
        behind = tl.load(prefix + T + row, mask=row < T, other=0)
    return first, behind


@jit
def earlier(row, back, start, first, behind, SHARED: tl.constexpr):
    """(the row of the token so many before, whether there is one)"""
    other = row - back
    if SHARED:
        other = tl.where(other < start, other - start + behind, other)
    return other, other >= first


@jit
def answers_of(row, end, T, W: tl.constexpr, documents, behinds):
    """(document of each row, the one behind its last answer, the most answers that see one of these rows through W taps)"""
    document = tl.load(documents + row, mask=row < T, other=0)
    behind = tl.load(behinds + document)
    return document, behind, tl.max(tl.where((row < T) & (row + W > end), behind - document - 1, 0), 0)


@jit
def later(row, ahead, end, answer, behind, bounds):
    """(the row of this answer that stands so many behind a row of its prompt, which ends at `end`; whether there is one; the
    answer's first row)"""
    known = answer < behind
    start = tl.load(bounds + answer, mask=known, other=0)
    other = start + row + ahead - end
    return other, known & (row + ahead >= end) & (other < tl.load(bounds + answer + 1, mask=known, other=0)), start
