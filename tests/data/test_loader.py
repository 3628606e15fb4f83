from __future__ import annotations

import json
from itertools import chain, islice

import pytest

from pronghorn.data.pack.loader import BatchLoader, State, StepPacking
from pronghorn.data.pack.packing import pack
from pronghorn.data.pack.parts import Deal
from samples import random_table


def flat(steps: list) -> list[list[int]]:
    return [b.ids_T.tolist() for step in steps for b in step.batches]


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("size", [{"packs_per_step": 3}, {"rows_per_step": 23}], ids=["packs", "rows"])
def test_any_number_of_workers_and_any_restart_give_the_same_steps(workers: int, size: dict[str, int]) -> None:
    table = random_table(100)

    def loader(start: State | None, workers: int) -> BatchLoader:
        return BatchLoader(table, StepPacking(256), seed=5, workers=workers, start=start, **size)

    whole = list(islice(loader(None, 0), 12))
    assert whole[-1].after["epoch"] >= 2  # the comparison crosses two ends of an epoch
    assert flat(list(islice(loader(None, workers), 12))) == flat(whole)
    for done in (1, 4, 5, 9):
        resumed = list(islice(loader(json.loads(json.dumps(whole[done - 1].after)), workers), 12 - done))
        assert flat(resumed) == flat(whole[done:])


@pytest.mark.parametrize("capacity", [64, 256, 4096])
def test_a_step_of_so_many_rows_has_them_in_as_many_packs_as_they_need(capacity: int) -> None:
    table = random_table(100)
    steps = list(islice(BatchLoader(table, StepPacking(capacity), rows_per_step=16, seed=5, workers=2), 14))
    rows = [sorted(row for batch in step.batches for row in batch.documents) for step in steps]
    assert [len(one) for one in rows] == [16, 16, 16, 16, 16, 16, 4] * 2
    assert sorted(chain(*rows[:7])) == sorted(chain(*rows[7:])) == list(range(100))
    assert [step.epoch for step in steps if step.after["pack"] == 0] == [1.0, 2.0]
    other = islice(
        BatchLoader(table, StepPacking(300), rows_per_step=16, seed=5, workers=0), 14
    )  # no pack decides what is in a step
    assert [sorted(row for batch in step.batches for row in batch.documents) for step in other] == rows
    packs = pack(table.lengths, capacity, seed=5, epoch=0, rows=16)
    assert [len(step.batches) for step in steps[:7]] == packs.packs_of_steps.tolist()
    assert packs.count_steps(1) == 7


def test_ranks_share_the_packs_of_a_step_of_so_many_rows() -> None:
    table = random_table(100)
    loaders = [
        BatchLoader(table, StepPacking(128, deal=Deal(rank, ranks)), rows_per_step=16, seed=5, workers=0)
        for ranks in (1, 3)
        for rank in range(ranks)
    ]
    for alone, *three in islice(zip(*loaders, strict=True), 9):
        rows = [row for step in three for batch in step.batches for row in batch.documents]
        assert sorted(rows) == sorted(row for batch in alone.batches for row in batch.documents)
        assert {(step.tokens, step.loss_tokens) for step in three} == {(alone.tokens, alone.loss_tokens)}


def test_an_error_in_a_worker_reaches_the_loop() -> None:
    table = random_table(20)
    table.rows[3] = table.rows[3][:-1]  # shorter than the table says
    with pytest.raises(ValueError, match="broadcast"):
        list(islice(BatchLoader(table, StepPacking(2048), seed=5, workers=2), 1))


def test_an_epoch_sees_every_document_once_and_the_next_in_another_order() -> None:
    table = random_table(100)
    steps = list(islice(BatchLoader(table, StepPacking(256), packs_per_step=3, seed=5, workers=2), 30))
    epochs: dict[int, list[int]] = {}
    epoch = 0
    for step in steps:
        epochs.setdefault(epoch, []).extend(row for batch in step.batches for row in batch.documents)
        epoch = step.after["epoch"]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(100))
    assert epochs[0] != epochs[1]
