"""What follows from a tensor's declaration: with axes that no pack of text has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any

import numpy as np
import pytest
import torch

from pronghorn.data.pack import batches
from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import BatchLoader, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.packs import Column, PackedBatch, PackedDocuments
from samples import ListTable, random_table


@dataclass(frozen=True, kw_only=True)
class WithImages(PackedBatch):
    image_rows_V: Annotated[torch.Tensor, Column("V", torch.int64, -1, of="T")]
    grids_G2: Annotated[torch.Tensor | None, Column("G 2", torch.uint8, 9)] = None


class Rows:
    """A column of a table."""

    def __init__(self, values: list[Any], axis: int = 0) -> None:
        self.values, self.counts = values, np.array([value.shape[axis] for value in values])

    def __getitem__(self, row: int) -> Any:
        return self.values[row]


def table_with_images(count: int) -> ListTable:
    """Row i has i % 4 placeholders, from its second token on, and as many grids; positions in three rows."""
    table = random_table(count)
    lengths = table.lengths.tolist()
    table.extras = {
        "image_rows_V": Rows([np.arange(1, 1 + min(length - 1, i % 4)) for i, length in enumerate(lengths)]),
        "grids_G2": Rows([np.full((i % 4, 2), i % 7, np.uint8) for i in range(count)]),
        "positions_T": Rows([np.arange(length) * np.array([[1], [2], [3]]) for length in lengths], axis=1),
    }
    return table


def test_what_rows_have_beside_tokens_is_put_together_and_padded_to_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "PackedBatch", WithImages)
    table = table_with_images(200)
    packs = pack(table.lengths, 256, seed=5, epoch=0)
    shapes = Shapes.planned(table, packs, 256)
    assert shapes.sizes.keys() == {"E", "N", "V", "G"}
    loader = BatchLoader(table, StepPacking(256, shapes=shapes), seed=5, workers=0)
    steps = list(islice(loader, 3 * len(packs)))
    assert len({step.batches[0].shape for step in steps}) <= 8
    for batch in (step.batches[0] for step in steps):
        assert isinstance(batch, WithImages)
        assert batch.grids_G2 is not None
        places, grids, at = [], [], 0
        for row in batch.documents:
            places += (table.extras["image_rows_V"][row] + at).tolist()
            grids += table.extras["grids_G2"][row].tolist()
            at += int(table.lengths[row])
        assert batch.image_rows_V.tolist() == places + [255] * (len(batch.image_rows_V) - len(places))
        assert batch.grids_G2.tolist() == grids + [[9, 9]] * (len(batch.grids_G2) - len(grids))
        assert batch.positions_T.shape == (3, 256)
        assert batch.position_ids.shape == (3, 1, 256)
        assert batch.positions_T[:, :at].tolist() == [
            [factor * place for row in batch.documents for place in range(table.lengths[row])] for factor in (1, 2, 3)
        ]
    empty = build_batch(table, np.zeros(0, np.int64), 256, shapes=shapes)
    assert {axis: sizes[0] for axis, sizes in shapes.sizes.items()}.items() <= empty.sizes.items()
    assert empty.positions_T.shape == (3, 256)
    exact = build_batch(table, np.arange(4), 256)
    assert (exact.sizes["V"], exact.sizes["G"]) == (6, 6)


def test_a_cut_takes_places_beyond_it_for_padding() -> None:
    whole = WithImages.padded(
        {"T": 8, "E": 4, "N": 3, "V": 3},
        {
            "ids_T": np.arange(6),
            "labels_T": np.arange(6),
            "positions_T": np.arange(6) * np.ones((3, 1)),
            "cu_seqlens": np.array([0, 3, 6]),
            "loss_rows": np.array([1, 5]),
            "image_rows_V": np.array([0, 4]),
        },
        longest=3,
    )
    assert whole.ids_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 0]
    assert whole.labels_T[6:].tolist() == [-100, -100]
    assert whole.cu_seqlens.tolist() == [0, 3, 6, 8]
    assert whole.loss_rows.tolist() == [1, 5, 7]
    assert whole.image_rows_V.tolist() == [0, 4, 7]
    assert (whole.cu_seqlens.dtype, whole.positions_T.dtype) == (torch.int32, torch.int64)
    few = whole.cut(T=4, N=2)
    assert few.positions_T.shape == (3, 4)
    assert few.cu_seqlens.tolist() == [0, 3, 4, 4]
    assert few.loss_rows.tolist() == [1, 3]
    assert few.image_rows_V.tolist() == [0, 3, 3]
    assert few.shape != whole.shape == whole.cut(T=99).shape
    inputs = whole.map(torch.zeros_like)
    inputs.copy_from(whole)
    assert torch.equal(inputs.image_rows_V, whole.image_rows_V)


def test_tensors_that_disagree_about_an_axis_are_refused() -> None:
    batch = build_batch(random_table(3), np.arange(3), 128)
    with pytest.raises(ValueError, match="axis T"):
        replace(batch, positions_T=torch.zeros(3, 127, dtype=torch.int64))


def test_a_pack_of_nothing_has_the_tensors_that_every_pack_has() -> None:
    blank = PackedDocuments.blank({"T": 1 << 40, "E": 32}, "meta", longest=128)  # takes no memory
    assert (blank.sizes, blank.positions_T.device.type) == ({"T": 1 << 40, "E": 32}, "meta")
    blank = WithImages.blank({"T": 64, "E": 32, "N": 16, "V": 4}, "cpu", longest=64)
    assert blank.image_rows_V.tolist() == [63] * 4
    assert blank.cu_seqlens.unique().tolist() == [64]
    assert blank.prompt_of_S is blank.grids_G2 is None
