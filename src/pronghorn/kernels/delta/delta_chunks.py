"""Chunks of a pack's documents, for the delta rule (delta_rule.py).

T = packed tokens, S = slots of the table, E = entries of cu_seqlens. A chunk is up to 64 rows of one document; the first begins
where the document does. The chunk that begins at row r of document d has slot r // 64 + d:

    these numbers increase from chunk to chunk, and are less than T // 64 + E - 1, a constant of the shape
    a program that knows r and d knows the slot, and needs no table; one for each slot reads r from the table
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # rows


def chunk_slots(tokens: int, entries: int) -> int:
    """A chunk starts 64 rows after another, or with one of the E - 1 documents."""
    return tokens // CHUNK + entries - 1


def chunk_table(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """[S, 2] int32: first row and number of rows (0: the slot is empty) of each chunk. Made once per batch, on the device,
    without a synchronization. `cu_seqlens` ends with the number of tokens: padding is a document, documents may be empty."""
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    slot = torch.arange(chunk_slots(tokens, len(cu_seqlens)), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    first_slot = starts // CHUNK + torch.arange(len(starts), dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(first_slot, slot, right=True) - 1  # the last that begins at this slot or before
    first = starts[document] + CHUNK * (slot - first_slot[document])
    return torch.stack([first, (ends[document] - first).clamp(0, CHUNK)], dim=1).to(torch.int32)
