"""Preference pairs in packs: a group never splits, and a prompt that is there once is every answer's prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import BatchLoader, StepPacking, evaluation_batches
from pronghorn.data.pack.packing import pack
from pronghorn.data.pack.parts import Deal
from pronghorn.data.preference.pair_packing import groups_of, split_groups, tokens_in
from pronghorn.data.preference.pair_rows import PairRows
from pronghorn.errors import DataError
from pronghorn.packs import IGNORED, PackedBatch
from samples import ListTable, preference_table

Document = tuple[list[int], list[int], list[int]]  # ids, positions, (position, label) of what is learned


def two_pairs(shared: bool) -> ListTable:
    """[5 6 | 7 8] [5 6 | 9], and [4 | 3 2] [4 | 1 1], whose answers begin with a token that nobody learns."""
    rows, marks = [[5, 6, 7, 8], [5, 6, 9], [4, 3, 2], [4, 1, 1]], [[0, 0, 1, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    columns = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1], np.int32), np.array([2, 2, 1, 1], np.int32)
    pairs = PairRows(*columns, np.array([0.5, 0.5, 0, 0], np.float32), shared=shared)
    return ListTable(rows, [[bool(mark) for mark in row] for row in marks], pairs)


def test_a_pack_with_shared_prompts_by_hand() -> None:
    batch = build_batch(two_pairs(shared=True), np.arange(4), capacity=12, pad_id=0)
    assert batch.shares_prompts
    assert batch.ids_T.tolist() == [5, 6, 7, 8, 9, 4, 3, 2, 1, 1, 0, 0]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 1, 2, 0, 1]
    assert batch.cu_seqlens[:8].tolist() == [0, 2, 4, 5, 6, 8, 10, 12]
    assert batch.prompt_of_S is not None
    assert batch.prompt_of_S[:8].tolist() == [-1, 0, 0, -1, 3, 3, -1, -1]
    assert len(batch.prompt_of_S) == len(batch.cu_seqlens) - 1
    # the prompt's last row, 1, predicts 7 and 9; 8 is predicted at 2
    assert batch.loss_rows.tolist() == [1, 2, 1, 6, 8]
    assert batch.row_labels.tolist() == [7, 8, 9, 2, 1]
    assert batch.document_N.tolist() == [0, 0, 1, 2, 3]
    assert batch.labels_T.tolist() == [IGNORED, IGNORED, 8] + [IGNORED] * 3 + [2, IGNORED, 1] + [IGNORED] * 3
    assert (batch.tokens, batch.loss_tokens, batch.longest, batch.documents) == (10, 5, 2, (0, 1, 2, 3))


@pytest.mark.parametrize("shared", [False, True])
def test_what_a_pack_says_of_its_documents(shared: bool) -> None:
    batch = build_batch(two_pairs(shared), np.array([2, 3, 0, 1]), capacity=32)
    slots = len(batch.cu_seqlens)
    assert batch.roles_D.tolist() == [0, 1, 0, 1] + [-1] * (slots - 4)
    assert batch.firsts_D.tolist() == [0, 0, 2, 2] + [slots - 1] * (slots - 4)
    assert batch.margins_D.tolist() == [0, 0, 0.5, 0.5] + [0] * (slots - 4)
    assert batch.document_N.tolist() == [0, 1, 2, 2, 3]
    assert batch.row_labels.tolist() == [2, 1, 7, 8, 9]
    shapes = Shapes({"E": (32,), "N": (16, 32)}, longest=16, typical=4)
    padded = build_batch(two_pairs(shared), np.array([2, 3]), capacity=32, shapes=shapes)
    assert padded.document_N.tolist() == [0, 1] + [31] * 14
    assert padded.roles_D[31] == -1
    assert padded.row_labels[2:].unique().tolist() == [IGNORED]
    assert padded.loss_rows[2:].unique().tolist() == [31]
    every = build_batch(two_pairs(shared), np.arange(4), 32, shapes=Shapes({"E": (32,), "N": (32,)}, longest=16, typical=4))
    assert every.every_row != shared
    assert every.document_N[every.row_labels != IGNORED].tolist() == [0, 0, 1, 2, 3]
    assert (every.document_N[every.row_labels == IGNORED] == 31).all()


def documents_of(batch: PackedBatch) -> list[Document]:
    """Each document as a model sees it: tokens and positions of its prompt and itself, and what is learned where."""
    segments = list(pairwise(batch.cu_seqlens.tolist()))
    prompts = batch.prompt_of_S.tolist() if batch.prompt_of_S is not None else [-1] * len(segments)
    answers = [i for i in range(len(segments)) if i not in prompts or prompts[i] >= 0][: len(batch.documents)]
    found = []
    for document, segment in enumerate(answers):
        spans = [segments[prompts[segment]]] if prompts[segment] >= 0 else []
        rows = [t for start, stop in (*spans, segments[segment]) for t in range(start, stop)]
        learned = [
            (rows.index(row), label)
            for row, label, of in zip(
                batch.loss_rows.tolist(), batch.row_labels.tolist(), batch.document_N.tolist(), strict=True
            )
            if of == document
        ]
        found.append((batch.ids_T[rows].tolist(), batch.positions_T[rows].tolist(), learned))
    return found


@pytest.mark.parametrize("answers", [2, 4])
def test_sharing_changes_no_document_and_no_group_splits(answers: int) -> None:
    apart, shared = (preference_table(60, answers=answers, shared=shared) for shared in (False, True))
    seen: dict[bool, dict[int, Document]] = {}
    for table in (apart, shared):
        groups = groups_of(table)
        packs = pack(groups, 256, seed=5, epoch=0)
        assert packs.tokens == tokens_in(table, packs.order) == groups.tokens.sum()
        loader = BatchLoader(table, StepPacking(256, shapes=Shapes.planned(table, packs, 256)), seed=5, workers=0)
        steps = list(islice(loader, len(packs)))
        assert len({step.batches[0].shape for step in steps}) <= 4
        seen[table.pairs.shared] = {}
        for batch in (step.batches[0] for step in steps):
            assert batch.longest >= batch.cu_seqlens.diff().max()
            assert batch.tokens == tokens_in(table, np.array(batch.documents))
            for group in split_groups(table, np.array(batch.documents)):
                assert group.tolist() == np.flatnonzero(table.pairs.groups == table.pairs.groups[group[0]]).tolist()
            seen[table.pairs.shared] |= dict(zip(batch.documents, documents_of(batch), strict=True))
    assert sorted(seen[True]) == list(range(len(apart)))
    assert seen[True] == seen[False]
    assert groups_of(shared).tokens.sum() < groups_of(apart).tokens.sum()
    for row, (ids, positions, learned) in seen[True].items():
        assert ids == apart.rows[row].tolist()
        assert positions == list(range(len(ids)))
        marked = np.flatnonzero(apart.marks[row][1:])
        assert learned == [(int(i), int(apart.rows[row][i + 1])) for i in marked]


def test_ranks_know_the_tokens_of_each_other() -> None:
    table = preference_table(40, shared=True)
    ranks = [BatchLoader(table, StepPacking(256, deal=Deal(rank, 2)), packs_per_step=2, seed=5, workers=0) for rank in (0, 1)]
    first = [next(iter(rank)) for rank in ranks]
    assert first[0].tokens == first[1].tokens == sum(step.batches[0].tokens for step in first)


def test_a_step_of_so_many_rows_has_so_many_pairs() -> None:
    table = preference_table(20, shared=True)
    loader = BatchLoader(table, StepPacking(256), rows_per_step=8, seed=5, workers=0)
    steps = [step for step, _ in zip(loader, range(3), strict=False)]
    assert [sum(len(batch.documents) for batch in step.batches) for step in steps] == [16, 16, 8]


def test_a_pack_of_nothing_and_the_beginning_of_a_pack() -> None:
    table = preference_table(4, shared=True)
    empty = build_batch(table, np.zeros(0, np.int64), 64)
    assert (empty.tokens, empty.loss_tokens) == (0, 0)
    assert (empty.roles_D == -1).all()
    whole = build_batch(table, np.arange(len(table)), 256)
    few = whole.beginning(32)
    assert len(few.row_labels) == len(few.document_N) == len(few.loss_rows) <= 16
    assert torch.equal(replace(few).prompt_of_S, whole.prompt_of_S)


def test_a_group_that_no_pack_can_hold_is_refused() -> None:
    with pytest.raises(DataError, match="a pack holds 8"):
        list(evaluation_batches(preference_table(20), 8))
