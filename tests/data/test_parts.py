"""The parts of a pack that ranks share: together they are the pack, and each knows what it has."""

from __future__ import annotations

import pytest
import torch

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.data.pack.parts import Deal, loss_places, part_of, rows_of
from pronghorn.packs import IGNORED, WHOLE, PackedBatch
from samples import random_table

TABLE = random_table(8, longest=50, seed=1)
SHAPES = Shapes.planned(TABLE, pack_in_order(TABLE.lengths, 384), 384)
ALL = torch.arange(8).numpy()


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "pack",
    [
        build_batch(TABLE, ALL, 384),
        build_batch(TABLE, ALL, 384, shapes=SHAPES),
        build_batch(TABLE, ALL[:0], 384, shapes=SHAPES),
    ],
    ids=["own shape", "shape of a run", "empty"],
)
def test_the_parts_are_the_pack(pack: PackedBatch, ranks: int) -> None:
    parts = [part_of(pack, (rank, ranks)) for rank in range(ranks)]
    rows = torch.cat([rows_of(384, part.part) for part in parts])
    assert rows.sort().values.tolist() == list(range(384))
    for name in ("ids_T", "labels_T", "positions_T"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(pack, name)[rows])
    assert sum(part.tokens for part in parts) == pack.tokens
    assert sum(part.loss_tokens for part in parts) == pack.loss_tokens == int((pack.labels_T != IGNORED).sum())
    found = []
    for part in parts:
        real = part.row_labels != IGNORED
        assert int(real.sum()) == part.loss_tokens
        assert torch.equal(real.nonzero()[:, 0], torch.arange(part.loss_tokens))  # padding comes last, and has no label
        places = loss_places(part)
        assert (places[part.loss_tokens :] == 384).all()
        found += places[: part.loss_tokens].tolist()
        assert torch.equal(pack.labels_T[places[: part.loss_tokens]], part.row_labels[: part.loss_tokens])
        assert len(part.loss_rows) <= 384 // ranks
        assert torch.equal(part.cu_seqlens, pack.cu_seqlens)
    assert sorted(found) == (pack.labels_T != IGNORED).nonzero()[:, 0].tolist()


def test_where_every_row_has_a_loss_nothing_is_gathered() -> None:
    pack = build_batch(TABLE, ALL, 384)
    every = PackedBatch(**{**vars(pack), "loss_rows": torch.arange(384)})
    for part in (part_of(every, (rank, 2)) for rank in range(2)):
        assert part.every_row
        assert torch.equal(loss_places(part), rows_of(384, part.part))
    assert part_of(pack, WHOLE) is pack


def test_consecutive_ranks_are_a_group() -> None:
    deals = [Deal(rank, 6, 2) for rank in range(6)]
    assert [(one.group, one.groups, one.part) for one in deals] == [(rank // 2, 3, (rank % 2, 2)) for rank in range(6)]
    assert (Deal(1, 4).group, Deal(1, 4).groups, Deal(1, 4).part) == (1, 4, WHOLE)
