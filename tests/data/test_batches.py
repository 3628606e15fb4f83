from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import BatchLoader, StepPacking
from pronghorn.data.pack.packing import max_documents, pack
from pronghorn.packs import IGNORED
from samples import ListTable, random_table


def test_a_batch_by_hand() -> None:
    table = ListTable([[5, 6, 7], [8, 9]], [[True, False, True], [True, True]])
    batch = build_batch(table, np.array([0, 1]), capacity=8, pad_id=1)
    assert batch.ids_T.tolist() == [5, 6, 7, 8, 9, 1, 1, 1]
    # 7 is predicted at 6, 9 at 8; the first tokens 5 and 8 are predicted by nothing, though marked.
    assert batch.labels_T.tolist() == [IGNORED, 7, IGNORED, 9, IGNORED, IGNORED, IGNORED, IGNORED]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens[:4].tolist() == [0, 3, 5, 8]
    assert set(batch.cu_seqlens[4:].tolist()) == {8}
    assert batch.loss_rows.tolist() == [1, 3]
    assert (batch.longest, batch.tokens, batch.documents) == (3, 5, (0, 1))


def test_the_batches_of_a_run_have_few_shapes_whatever_the_epoch() -> None:
    table = random_table(400)
    shapes = Shapes.planned(table, pack(table.lengths, 256, seed=5, epoch=0), 256)
    loader = BatchLoader(table, StepPacking(256, shapes=shapes), packs_per_step=2, seed=5, workers=0)
    batches = [batch for step in islice(loader, 150) for batch in step.batches]
    assert batches[-1].documents  # several epochs
    assert len({batch.shape for batch in batches}) <= 4
    plain = [build_batch(table, np.array(batch.documents), 256) for batch in batches]
    for batch, exact in zip(batches, plain, strict=True):
        rows = batch.loss_rows[batch.labels_T[batch.loss_rows] != IGNORED]
        assert rows.tolist() == exact.loss_rows.tolist()
        assert (batch.loss_tokens, batch.tokens) == (exact.loss_tokens, exact.tokens)
        assert torch.equal(batch.ids_T, exact.ids_T)
        assert torch.equal(batch.labels_T, exact.labels_T)
        assert batch.longest >= batch.cu_seqlens.diff().max()
        assert batch.cu_seqlens.dtype == torch.int32
        assert (batch.cu_seqlens.diff() >= 0).all()
        assert batch.cu_seqlens[-1] == 256


def test_padding_rows_name_a_token_without_a_label_and_every_row_needs_none() -> None:
    table = ListTable([[5, 6, 7, 8]] * 16, [[False, False, True, True]] * 16)
    few = Shapes({"E": (32,), "N": (48, 64)}, longest=16, typical=4)
    half = build_batch(table, np.arange(16), 64, shapes=few)
    assert not half.every_row
    assert half.loss_rows[32:].tolist() == [63] * 16
    assert half.labels_T[63] == IGNORED
    whole = build_batch(table, np.arange(16), 64, shapes=Shapes({"E": (32,), "N": (64,)}, longest=16, typical=4))
    assert whole.every_row
    assert whole.loss_rows.tolist() == list(range(64))


def test_the_beginning_of_a_batch_is_one_of_its_kind() -> None:
    table = ListTable([list(range(1, 41)), list(range(1, 31))], [[False] * 20 + [True] * 20, [False] * 20 + [True] * 10])
    whole = build_batch(table, np.arange(2), 80)
    few = whole.beginning(48)
    assert torch.equal(few.ids_T, whole.ids_T[:48])
    assert few.cu_seqlens.tolist()[:3] == [0, 40, 48]
    assert few.cu_seqlens.max() == 48
    assert len(few.cu_seqlens) == len(whole.cu_seqlens)
    assert not few.every_row
    assert few.loss_rows.max() < 48
    assert len(few.loss_rows) <= 24
    every = replace(whole, loss_rows=torch.arange(80)).beginning(48)
    assert every.every_row
    assert every.loss_rows.tolist() == list(range(48))
    assert whole.beginning(500).shape == whole.shape


def test_padding_is_cut_into_documents_no_longer_than_the_longest() -> None:
    table = ListTable([[5, 6, 7]])
    batch = build_batch(table, np.array([0]), 64, shapes=Shapes({"E": (32,), "N": (64,)}, longest=16, typical=4))
    assert batch.cu_seqlens[:6].tolist() == [0, 3, 19, 35, 51, 64]
    assert batch.positions_T.max() == 15


def test_a_full_pack_of_the_most_documents_fits_its_metadata() -> None:
    table = ListTable([[4] * 16] * max_documents(256))
    batch = build_batch(table, np.arange(16), 256)
    assert batch.tokens == 256
    assert batch.cu_seqlens[-1] == 256
