"""Which ranks get which packs, and a rank's part of a pack that several share (`world.context`).

C ranks share a pack in 2 C pieces of equal size; rank r has the pieces r and 2 C - 1 - r. Work on rows is then even, and causal
attention too (kernels/attention/attention_pieces.py). Labels are shifted before a pack is cut, so every row has its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pronghorn.packs import IGNORED, WHOLE, PackedBatch


class Deal(NamedTuple):
    """Packs go in turn to groups of `context` consecutive ranks, which share them."""

    rank: int = 0
    ranks: int = 1
    context: int = 1

    @property
    def groups(self) -> int:
        return self.ranks // self.context

    @property
    def group(self) -> int:
        return self.rank // self.context

    @property
    def part(self) -> tuple[int, int]:
        """This rank's number in its group, and how many share a pack there."""
        return self.rank % self.context, self.context


ALONE = Deal()


def part_of(pack: PackedBatch, part: tuple[int, int]) -> PackedBatch:
    """The rows of the pack that are this rank's. Counts are of these rows, documents those of the pack. Loss rows are padded to
    a few sizes; padding is a row without a label, and comes last."""
    if part == WHOLE:
        return pack
    sizes, known = pack.sizes, {"loss_rows", "cu_seqlens"}
    assert all(name in known or "T" in pack.columns[name].dims for name in pack.tensors), "not a pack of supervised rows"
    rows = rows_of(sizes["T"], part)
    tensors: dict[str, Any] = {
        name: tensor.index_select(dims["T"], rows)
        for name, tensor in pack.tensors.items()
        if "T" in (dims := pack.columns[name].dims)
    }
    ours = torch.searchsorted(rows, pack.loss_rows)
    found = (rows[ours.clamp(max=len(rows) - 1)] == pack.loss_rows) & (pack.labels_T[pack.loss_rows] != IGNORED)
    count, unlabelled = int(found.sum()), (tensors["labels_T"] == IGNORED).nonzero()
    unit = max(1, -(-sizes["N"] // (2 * part[1])))
    size = max(1, -(-count // unit)) * unit
    if pack.every_row or size >= len(rows):
        tensors["loss_rows"] = torch.arange(len(rows))
    else:
        tensors["loss_rows"] = torch.cat([ours[found], unlabelled[0].expand(size - count)])
    return replace(pack, **tensors, part=part, tokens=int((rows < pack.tokens).sum()), loss_tokens=count)


def loss_places(pack: PackedBatch) -> torch.Tensor:
    """Which rows of the whole pack its loss rows are, ascending; padding stands behind them all."""
    if pack.part == WHOLE:
        return pack.loss_rows
    whole = len(pack.ids_T) * pack.part[1]
    places = rows_of(whole, pack.part)[pack.loss_rows]
    if not pack.every_row:
        places[pack.loss_tokens :] = whole
    return places


def rows_of(tokens: int, part: tuple[int, int]) -> torch.Tensor:
    """Ascending."""
    (rank, ranks), size = part, tokens // (2 * part[1])
    return torch.cat([torch.arange(number * size, (number + 1) * size) for number in (rank, 2 * ranks - 1 - rank)])
