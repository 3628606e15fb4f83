"""Packs into tensors: one `PackedBatch` a micro-batch, with all metadata built once, on the host, ahead of the step.

T = capacity (tokens in a pack, padding included); packs.py has the other axes. The batches of a run have one of a few shapes
(`Shapes`), so that a step can be captured once and replayed for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.pack.packing import Packs, max_documents, pack, pack_in_order
from pronghorn.data.preference.pair_packing import groups_of, segments_of, shared_segments, slots, tokens_in
from pronghorn.data.preference.pair_rows import pairs_of
from pronghorn.packs import IGNORED, PackedBatch

# Document boundaries come in multiples of this many. Kernels pay for each entry (FlashAttention-2's backward holds 128 rows of
# float32 for every one of them, 2 GB for 1,026 entries of an 8B layer), so there is little padding.
ENTRIES = 32
STEPS = 16  # other axes come in sixteenths of their largest size: the head computes 3 % too many rows on average, at most 6 %


class TokenRows(Protocol):
    """What a table of tokenized documents offers (data/encode/tokens.py has the memory-mapped one)."""

    lengths: npt.NDArray[np.int32]
    loss_counts: npt.NDArray[np.int32]

    def __len__(self) -> int: ...
    def ids(self, i: int) -> npt.NDArray[np.int32]: ...
    def loss(self, i: int) -> npt.NDArray[np.bool_]: ...


class RowColumn(Protocol):
    """What rows have beside tokens: one tensor of a pack (packs.py), row by row. Values that are places on T count from the
    row's first token."""

    counts: npt.NDArray[np.integer]  # entries of each row on the first axis that is named

    def __getitem__(self, row: int) -> npt.NDArray[Any]: ...


def extras_of(table: object) -> Mapping[str, RowColumn]:
    """By the names of the pack's tensors; a table of text has none."""
    found: Mapping[str, RowColumn] = getattr(table, "extras", {})
    return found


@dataclass(frozen=True)
class Shapes:
    """The sizes that the batches of a run are padded to: smallest that fits, ascending.

    A function of the data, the seed and the capacity, never of what the run has seen: a resumed run computes every batch in the
    same shape as the run it goes on with, so its sums have the same order.
    """

    sizes: Mapping[str, tuple[int, ...]]  # by axis; the largest of N is the capacity
    longest: int
    typical: int  # mean length of all documents, each token counted

    def fit(self, axis: str, needed: int) -> int:
        return next(size for size in self.sizes[axis] if size >= needed)

    @classmethod
    def planned(cls, table: TokenRows, packs: Packs, capacity: int) -> Shapes:
        """One size fits all packs of this epoch, or two where three of four packs are much smaller than the largest; one more
        fits any pack there can be. Few sizes, because a step is captured for each."""
        starts, pairs, lengths = packs.starts[:-1], pairs_of(table), segments_of(table)
        documents = np.diff(packs.starts) + 2
        longest = min(capacity, _rounded(int(lengths.max()), 128))
        most = max_documents(capacity) + 2 + capacity // longest
        if pairs is not None and pairs.shared:  # each group has one segment more, and two documents at least
            documents += np.add.reduceat(np.diff(pairs.groups[packs.order], prepend=-1) != 0, starts, dtype=np.int64)
            most += max_documents(capacity) // 2

        def of_counts(counts: npt.NDArray[np.integer], most: int) -> tuple[int, ...]:
            needed = np.add.reduceat(counts[packs.order], starts)
            return tuple(sorted({*_sizes(needed, max(16, most // STEPS), most // 8, most), most}))

        sizes = {
            "E": tuple(sorted({*_sizes(documents, ENTRIES, 2 * ENTRIES), _rounded(most, ENTRIES)})),
            "N": of_counts(table.loss_counts, capacity),
        }
        for name, extra in extras_of(table).items():
            axis, densest = next(iter(PackedBatch.columns[name].dims)), float((extra.counts / table.lengths).max())
            if axis != "T":
                sizes[axis] = of_counts(extra.counts, int(np.ceil(densest * capacity)))
        return cls(sizes, longest=longest, typical=_typical(lengths))


def _typical(lengths: npt.NDArray[np.integer]) -> int:
    """The mean length of the document that a token is in."""
    return int(np.square(lengths, dtype=np.float64).sum() / max(1, lengths.sum(dtype=np.int64)))


def _sizes(needed: npt.NDArray[np.integer], step: int, much: int, limit: int | None = None) -> set[int]:
    """The largest need, and what three of four get by with where that is smaller by more than `much`; in whole steps."""
    sizes = [_rounded(float(np.quantile(needed, q)), step) for q in (0.75, 1.0)]
    chosen = set(sizes) if sizes[1] - sizes[0] > much else {sizes[1]}
    return chosen if limit is None else {min(limit, size) for size in chosen}


def _rounded(value: float, multiple: int) -> int:
    return max(1, -(-int(np.ceil(value)) // multiple)) * multiple


def build_batch(
    table: TokenRows, rows: npt.NDArray[np.int64], capacity: int, pad_id: int = 0, shapes: Shapes | None = None
) -> PackedBatch:
    """Padding at the end is one more document, or several of the longest's length, without labels: attention needs no special
    case for it. Without `rows`, all of it is padding. Without `shapes` only tokens and boundaries are padded, and `longest` is
    this pack's own.
    """
    documents = tuple(int(row) for row in rows)
    pairs = pairs_of(table)
    shared = shared_segments(table, pairs, rows) if pairs is not None and pairs.shared else None
    lengths = table.lengths[rows].astype(np.int64) if shared is None else shared.lengths
    tokens = int(lengths.sum())
    ids = np.full(capacity, pad_id, dtype=np.int64)
    padding = np.arange(tokens, capacity, shapes.longest if shapes else capacity)  # where each piece of it begins
    begins = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if documents else lengths
    bounds = np.concatenate([begins, padding, [capacity]]).astype(np.int32)
    document_lengths = np.diff(bounds)
    positions = np.arange(capacity) - np.repeat(bounds[:-1], document_lengths)
    labels = np.full(capacity, IGNORED, dtype=np.int64)
    if shared is None:
        trained = np.zeros(capacity, dtype=np.bool_)
        if documents:
            ids[:tokens] = np.concatenate([table.ids(row) for row in documents])
            trained[:tokens] = np.concatenate([table.loss(row) for row in documents])
        trained[bounds[:-1]] = False  # a document's first token has nothing before it that could predict it
        labels[:-1][trained[1:]] = ids[1:][trained[1:]]
        loss_rows = np.flatnonzero(labels != IGNORED)
    else:
        ids[:tokens], positions[:tokens], loss_rows = shared.ids, shared.positions, shared.loss_rows
        once = np.bincount(loss_rows, minlength=capacity)[loss_rows] == 1
        labels[loss_rows[once]] = shared.labels[once]

    count, longest, typical = len(loss_rows), int(document_lengths.max()), _typical(document_lengths)
    sizes = {"T": capacity, "N": count, "E": _rounded(len(bounds), ENTRIES)}
    values: dict[str, npt.NDArray[Any]]
    values = {"ids_T": ids, "labels_T": labels, "positions_T": positions, "cu_seqlens": bounds, "loss_rows": loss_rows}
    assert shared is None or not extras_of(table), "prompts that have more than tokens cannot be shared"
    values |= _extra_values(table, documents, begins)
    for name in extras_of(table):
        sizes |= {axis: values[name].shape[dim] for axis, dim in PackedBatch.columns[name].dims.items() if axis != "T"}
    if shapes is not None:
        needed = sizes | {"E": len(bounds)}
        sizes |= {axis: shapes.fit(axis, needed[axis]) for axis in shapes.sizes}
        longest, typical = shapes.longest, shapes.typical
        if sizes["N"] == capacity and shared is None:
            values["loss_rows"] = loss_rows = np.arange(capacity)
    entries = sizes["E"]
    sizes |= {"D": entries, "S": entries - 1}
    if pairs is not None:
        values |= slots(pairs, rows)
        if shared is None:
            place = np.searchsorted(bounds, loss_rows, side="right") - 1
            values["document_N"] = np.where(labels[loss_rows] == IGNORED, entries - 1, place)
        else:
            values |= {"document_N": shared.documents, "labels_N": shared.labels, "prompt_of_S": shared.prompts}
    return PackedBatch.padded(
        sizes, values, longest=longest, typical=typical, tokens=tokens, loss_tokens=count, documents=documents
    )


def _extra_values(table: TokenRows, documents: tuple[int, ...], begins: npt.NDArray[np.integer]) -> dict[str, npt.NDArray[Any]]:
    """What the rows of a pack have beside tokens, one row behind the other."""
    found = {}
    for name, extra in extras_of(table).items():
        column = PackedBatch.columns[name]
        along = next(iter(column.dims.values()))
        parts = [extra[row] for row in documents]
        if column.of == "T":
            parts = [part + begin for part, begin in zip(parts, begins, strict=True)]
        found[name] = np.concatenate(parts or [extra[0].take(range(0), axis=along)], axis=along)
    return found


@dataclass(frozen=True)
class Cursor:
    """Where the loader stands: the next pack to train on. All there is to save; the packs follow from (seed, epoch)."""

    epoch: int = 0
    pack: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step; with several ranks, those of this one. Counts are of all ranks."""

    batches: tuple[PackedBatch, ...]
    after: Cursor  # where the loader stands once this step is done
    epoch: float  # progress after this step, in epochs
    elsewhere: tuple[int, int] = (0, 0)  # tokens and loss tokens of other ranks

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches) + self.elsewhere[0]

    @property
    def loss_tokens(self) -> int:
        """What the step's summed loss is divided by, however its tokens fell into micro-batches."""
        return sum(batch.loss_tokens for batch in self.batches) + self.elsewhere[1]


Complete = Callable[[PackedBatch, TokenRows], PackedBatch]  # adds what the run's objective knows of the rows


class BatchLoader:
    """Optimizer steps from `start` on, for ever, each built ahead of time by background threads.

    Threads rather than processes: building 16,384 tokens of 79 documents takes 0.3 ms, nearly all of it in numpy, so a
    thread never holds the step up, starts at once, and can pin memory. The order does not depend on how many there are.

    With several ranks (`deal`: this one's number, and how many there are) the packs of a step are dealt out in turn. So a step
    trains on the same packs for any number of ranks, and each rank knows the counts of all. One that gets none has an empty
    pack; with `even`, so has one that gets fewer than others.

    A step has `packs_per_step` packs or, with `rows_per_step`, so many rows (groups of preference rows) in as many packs as
    they need.
    """

    def __init__(
        self,
        table: TokenRows,
        *,
        capacity: int,
        seed: int,
        workers: int,
        packs_per_step: int = 1,
        rows_per_step: int | None = None,
        start: Cursor | None = None,
        pad_id: int = 0,
        pin: bool = False,
        shapes: Shapes | None = None,
        together: int = 1,
        complete: Complete | None = None,
        deal: tuple[int, int] = (0, 1),
        even: bool = False,
    ) -> None:
        self._table, self._capacity, self._packs_per_step = table, capacity, packs_per_step
        self._rows_per_step = rows_per_step
        self._seed, self._workers, self._pad_id, self._pin, self._shapes = seed, workers, pad_id, pin, shapes
        self._complete, self._deal, self._even = complete, deal, even
        self._start, self._groups = start or Cursor(), groups_of(table, together)
        self.first_epoch = self._pack(self._start.epoch)

    def _pack(self, epoch: int) -> Packs:
        return pack(self._groups, self._capacity, seed=self._seed, epoch=epoch, rows=self._rows_per_step)

    def _build(self, packs: Packs, at: Cursor) -> StepBatch:
        stop = packs.end_of_step(at.pack, self._packs_per_step)
        rank, ranks = self._deal
        mine = [packs[i] for i in range(at.pack + rank, stop, ranks)]
        mine += [packs.order[:0]] * ((-(-(stop - at.pack) // ranks) if self._even else 1) - len(mine))
        others = [packs[i] for i in range(at.pack, stop) if (i - at.pack) % ranks != rank]
        batches = [build_batch(self._table, rows, self._capacity, self._pad_id, self._shapes) for rows in mine]
        if self._complete is not None:
            batches = [self._complete(batch, self._table) for batch in batches]
        if self._pin:
            batches = [batch.map(torch.Tensor.pin_memory) for batch in batches]
        elsewhere = (
            sum(tokens_in(self._table, rows) for rows in others),
            sum(int(self._table.loss_counts[rows].sum()) for rows in others),
        )
        return StepBatch(tuple(batches), self._next(packs, at), epoch=at.epoch + stop / len(packs), elsewhere=elsewhere)

    def _next(self, packs: Packs, at: Cursor) -> Cursor:
        stop = packs.end_of_step(at.pack, self._packs_per_step)
        return Cursor(at.epoch, stop) if stop < len(packs) else Cursor(at.epoch + 1, 0)

    def __iter__(self) -> Iterator[StepBatch]:
        return self._ahead() if self._workers else self._inline()

    def _inline(self) -> Iterator[StepBatch]:
        at, packs = self._start, self.first_epoch
        while True:
            yield self._build(packs, at)
            following = self._next(packs, at)
            if following.epoch != at.epoch:
                packs = self._pack(following.epoch)
            at = following

    def _ahead(self) -> Iterator[StepBatch]:
        pool = ThreadPoolExecutor(self._workers + 1, thread_name_prefix="pack")
        try:
            at, packs = self._start, self.first_epoch
            next_packs = pool.submit(self._pack, at.epoch + 1)
            waiting: deque[Future[StepBatch]] = deque()
            while True:
                while len(waiting) < self._workers + 1:
                    waiting.append(pool.submit(self._build, packs, at))
                    following = self._next(packs, at)
                    if following.epoch != at.epoch:
                        packs = next_packs.result()
                        next_packs = pool.submit(self._pack, following.epoch + 1)
                    at = following
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def evaluation_batches(
    table: TokenRows, capacity: int, pad_id: int = 0, together: int = 1, deal: tuple[int, int] = (0, 1)
) -> Iterator[PackedBatch]:
    """Every document once, in the table's order as far as packing allows; with several ranks, dealt out to them in turn, to
    each as many packs as to any other: the last may be empty."""
    packs, (rank, ranks) = pack_in_order(groups_of(table, together), capacity), deal
    for first in range(0, len(packs), ranks):
        rows = packs[first + rank] if first + rank < len(packs) else packs.order[:0]
        yield build_batch(table, rows, capacity, pad_id)
