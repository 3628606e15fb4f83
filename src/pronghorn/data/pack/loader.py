"""Optimizer steps from rows: how packs become a step, a table's steps built ahead of time, and the packs of an evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.packing import Packs, TokenRows, pack, pack_in_order
from pronghorn.data.pack.parts import ALONE, Deal, part_of
from pronghorn.data.preference.pair_packing import groups_of, tokens_in
from pronghorn.packs import PackedBatch

State = dict[str, Any]  # JSON: where a source of steps stands. Checkpoints keep it, and only the source reads it
Complete = Callable[[PackedBatch, TokenRows], PackedBatch]  # adds what the run's objective knows of the rows


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step; with several ranks, those of this one. Counts are of all ranks. Without batches
    there is nothing to learn from, on any rank."""

    batches: tuple[PackedBatch, ...]
    rows: TokenRows  # that the batches' `documents` are numbers of
    after: State  # where the source stands once this step is done
    epoch: float  # progress after this step, in epochs
    elsewhere: tuple[int, int] = (0, 0)  # tokens and loss tokens of other ranks
    # of rows that were made during the run, for its log: what is known of them, what to tell, some of them to look at
    figures: Mapping[str, float] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    samples: tuple[dict[str, Any], ...] = ()
    may_rest: bool = False  # a gradient of zero is no fault

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches) + self.elsewhere[0]

    @property
    def loss_tokens(self) -> int:
        """What the step's summed loss is divided by, however its tokens fell into micro-batches."""
        return sum(batch.loss_tokens for batch in self.batches) + self.elsewhere[1]

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """Row numbers, on this rank."""
        return np.array([row for batch in self.batches for row in batch.documents], dtype=np.int64)

    def names(self, documents: Iterable[int]) -> list[str]:
        """What messages call these rows: where they came from, if the table knows."""
        where = getattr(self.rows, "where", "row {}".format)
        return [where(int(row)) for row in documents]


@dataclass(frozen=True)
class StepPacking:
    """How packs of rows become the batches of a step.

    With several ranks the packs of a step are dealt out in turn, to groups of ranks where these share packs (`deal`). So a
    step trains on the same packs for any number of ranks, and each rank knows the counts of all. One that gets none has an
    empty pack; with `even`, so has one that gets fewer than others.
    """

    capacity: int
    pad_id: int = 0
    shapes: Shapes | None = None
    complete: Complete | None = None
    deal: Deal = ALONE
    even: bool = False
    pin: bool = False

    def step(self, table: TokenRows, packs: Sequence[npt.NDArray[np.int64]], after: State, epoch: float) -> StepBatch:
        """`packs`: the row numbers of each."""
        group, groups = self.deal.group, self.deal.groups
        mine, others = packs[group::groups], [rows for i, rows in enumerate(packs) if i % groups != group]
        empty = (-(-len(packs) // groups) if self.even else 1) - len(mine)
        batches = [
            build_batch(table, rows, self.capacity, self.pad_id, self.shapes)
            for rows in (*mine, *[np.zeros(0, np.int64)] * empty)
        ]
        if self.complete is not None:
            batches = [self.complete(batch, table) for batch in batches]
        parts = [part_of(batch, self.deal.part) for batch in batches]
        if self.pin:
            parts = [batch.map(torch.Tensor.pin_memory) for batch in parts]
        tokens = sum(tokens_in(table, rows) for rows in others)
        loss_tokens = sum(int(table.loss_counts[rows].sum()) for rows in others)
        for whole, part in zip(batches, parts, strict=True):  # what ranks have that share packs with this one
            tokens, loss_tokens = tokens + whole.tokens - part.tokens, loss_tokens + whole.loss_tokens - part.loss_tokens
        return StepBatch(tuple(parts), table, after, epoch, (tokens, loss_tokens))


class Place(NamedTuple):
    """The pack of a table that comes next. All there is to save: the packs follow from (seed, epoch)."""

    epoch: int = 0
    pack: int = 0


class BatchLoader:
    """Optimizer steps from `start` on, for ever, each built ahead of time by background threads.

    Threads rather than processes: building 16,384 tokens of 79 documents takes 0.3 ms, nearly all of it in numpy, so a
    thread never holds the step up, starts at once, and can pin memory. The order does not depend on how many there are.

    A step has `packs_per_step` packs or, with `rows_per_step`, so many rows (groups of preference rows) in as many packs as
    they need.
    """

    def __init__(
        self,
        table: TokenRows,
        packing: StepPacking,
        *,
        seed: int,
        workers: int,
        packs_per_step: int = 1,
        rows_per_step: int | None = None,
        start: State | None = None,
        together: int = 1,
    ) -> None:
        self._table, self._packing, self._seed, self._workers = table, packing, seed, workers
        self._packs_per_step, self._rows_per_step = packs_per_step, rows_per_step
        self._start, self._groups = Place(**start or {}), groups_of(table, together)

    def _pack(self, epoch: int) -> Packs:
        return pack(self._groups, self._packing.capacity, seed=self._seed, epoch=epoch, rows=self._rows_per_step)

    def _build(self, packs: Packs, at: Place) -> StepBatch:
        stop = packs.end_of_step(at.pack, self._packs_per_step)
        chosen = [packs[i] for i in range(at.pack, stop)]
        return self._packing.step(self._table, chosen, self._next(packs, at)._asdict(), at.epoch + stop / len(packs))

    def _next(self, packs: Packs, at: Place) -> Place:
        stop = packs.end_of_step(at.pack, self._packs_per_step)
        return Place(at.epoch, stop) if stop < len(packs) else Place(at.epoch + 1, 0)

    def _places(self, pack: Callable[[int], Callable[[], Packs]]) -> Iterator[tuple[Packs, Place]]:
        """Where each step begins. `pack`: what waits for the packs of an epoch; asked for one epoch ahead."""
        at, coming = self._start, pack(self._start.epoch)
        while True:
            packs, epoch, coming = coming(), at.epoch, pack(at.epoch + 1)
            while at.epoch == epoch:
                yield packs, at
                at = self._next(packs, at)

    def __iter__(self) -> Iterator[StepBatch]:
        if not self._workers:
            yield from starmap(self._build, self._places(lambda epoch: partial(self._pack, epoch)))
        pool = ThreadPoolExecutor(self._workers + 1, thread_name_prefix="pack")
        try:
            places = self._places(lambda epoch: pool.submit(self._pack, epoch).result)
            waiting: deque[Future[StepBatch]] = deque()
            while True:
                while len(waiting) < self._workers + 1:
                    waiting.append(pool.submit(self._build, *next(places)))
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def evaluation_batches(
    table: TokenRows, capacity: int, pad_id: int = 0, together: int = 1, deal: Deal = ALONE, few_shapes: bool = False
) -> Iterator[PackedBatch]:
    """Every document once, in the table's order as far as packing allows; with several ranks, dealt out to them in turn, to
    each as many packs as to any other: the last may be empty. A pack that ranks share is not cut yet. `few_shapes`: padded as
    those of a run are."""
    packs = pack_in_order(groups_of(table, together), capacity)
    shapes = Shapes.planned(table, packs, capacity) if few_shapes else None
    for first in range(deal.group, -(-len(packs) // deal.groups) * deal.groups, deal.groups):
        rows = packs[first] if first < len(packs) else packs.order[:0]
        yield build_batch(table, rows, capacity, pad_id, shapes)
