"""Packs into tensors: one `PackedBatch` a micro-batch, with all metadata built once, on the host, ahead of the step.

T = capacity (tokens in a pack, padding included). Every batch of a run has the same shapes apart from `loss_rows`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.packing import Packs, max_documents, pack, pack_in_order

ENTRIES = 32  # document boundaries are handed to kernels in multiples of this many
IGNORED = -100  # torch's cross-entropy skips this label


class TokenRows(Protocol):
    """What a table of tokenized documents offers (data/tokens.py has the memory-mapped one)."""

    lengths: npt.NDArray[np.int32]
    loss_counts: npt.NDArray[np.int32]

    def __len__(self) -> int: ...
    def ids(self, i: int) -> npt.NDArray[np.int32]: ...
    def loss(self, i: int) -> npt.NDArray[np.bool_]: ...


@dataclass(frozen=True)
class PackedBatch:
    ids_T: torch.Tensor  # int64
    labels_T: torch.Tensor  # int64, already shifted: labels_T[t] is the token to predict at t, or IGNORED
    positions_T: torch.Tensor  # int64, from 0 in each document
    cu_seqlens: torch.Tensor  # int32, document boundaries, padded to a fixed length by repeating T
    loss_rows: torch.Tensor  # int64, the t with a label
    longest: int  # tokens in the longest document
    tokens: int  # real tokens: T less padding
    documents: tuple[int, ...]  # row numbers in the table

    def bounds(self) -> torch.Tensor:
        """`cu_seqlens` with little padding, a view: kernels pay for each entry (FlashAttention-2's backward holds 128 rows of
        float32 for every one of them, 2 GB for 1,026 entries of an 8B layer), and a few sizes still are static."""
        used = len(self.documents) + 2
        return self.cu_seqlens[: -(-used // ENTRIES) * ENTRIES]

    def map(self, change: Any) -> PackedBatch:
        """The same batch with `change` done to each tensor."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)})

    def to(self, device: torch.device | str) -> PackedBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def build_batch(table: TokenRows, rows: npt.NDArray[np.int64], capacity: int, pad_id: int = 0) -> PackedBatch:
    """Padding at the end is one more document, without labels, so that attention needs no special case for it."""
    documents = tuple(int(row) for row in rows)
    lengths = table.lengths[rows].astype(np.int64)
    tokens = int(lengths.sum())
    padding = capacity - tokens
    ids = np.full(capacity, pad_id, dtype=np.int64)
    ids[:tokens] = np.concatenate([table.ids(row) for row in documents])
    trained = np.zeros(capacity, dtype=np.bool_)
    trained[:tokens] = np.concatenate([table.loss(row) for row in documents])

    ends = np.cumsum(lengths)
    bounds = np.concatenate([[0], ends, [capacity] if padding else []]).astype(np.int64)
    trained[bounds[:-1]] = False  # a document's first token has nothing before it that could predict it
    labels = np.full(capacity, IGNORED, dtype=np.int64)
    labels[:-1][trained[1:]] = ids[1:][trained[1:]]
    document_lengths = np.diff(bounds)
    positions = np.arange(capacity) - np.repeat(bounds[:-1], document_lengths)

    cu_seqlens = np.full(max_documents(capacity) + 2, capacity, dtype=np.int32)
    cu_seqlens[: len(bounds)] = bounds
    return PackedBatch(
        ids_T=torch.from_numpy(ids),
        labels_T=torch.from_numpy(labels),
        positions_T=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        loss_rows=torch.from_numpy(np.flatnonzero(labels != IGNORED)),
        longest=int(document_lengths.max()),
        tokens=tokens,
        documents=documents,
    )


@dataclass(frozen=True)
class Cursor:
    """Where the loader stands: the next pack to train on. All there is to save; the packs follow from (seed, epoch)."""

    epoch: int = 0
    pack: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class StepBatch:
    """The micro-batches of one optimizer step."""

    batches: tuple[PackedBatch, ...]
    after: Cursor  # where the loader stands once this step is done
    epoch: float  # progress after this step, in epochs

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self.batches)

    @property
    def loss_tokens(self) -> int:
        """What the step's summed loss is divided by, however its tokens fell into micro-batches."""
        return sum(len(batch.loss_rows) for batch in self.batches)


class BatchLoader:
    """Optimizer steps from `start` on, for ever, each built ahead of time by background threads.

    Threads rather than processes: building 16,384 tokens of 79 documents takes 0.3 ms, nearly all of it in numpy, so a
    thread never holds the step up, starts at once, and can pin memory. The order does not depend on how many there are.
    """

    def __init__(self, table: TokenRows, *, capacity: int, packs_per_step: int, seed: int, workers: int,
                 start: Cursor | None = None, pad_id: int = 0, pin: bool = False) -> None:
        self._table, self._capacity, self._packs_per_step = table, capacity, packs_per_step
        self._seed, self._workers, self._pad_id, self._pin = seed, workers, pad_id, pin
        self._start = start or Cursor()
        self.first_epoch = self._pack(self._start.epoch)

    def _pack(self, epoch: int) -> Packs:
        return pack(self._table.lengths, self._capacity, seed=self._seed, epoch=epoch)

    def _build(self, packs: Packs, at: Cursor) -> StepBatch:
        stop = min(at.pack + self._packs_per_step, len(packs))
        batches = [build_batch(self._table, packs[i], self._capacity, self._pad_id) for i in range(at.pack, stop)]
        if self._pin:
            batches = [batch.map(torch.Tensor.pin_memory) for batch in batches]
        return StepBatch(tuple(batches), after=self._next(packs, at), epoch=at.epoch + stop / len(packs))

    def _next(self, packs: Packs, at: Cursor) -> Cursor:
        stop = at.pack + self._packs_per_step
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


def steps_per_epoch(packs: int, packs_per_step: int) -> int:
    return -(-packs // packs_per_step)


def evaluation_batches(table: TokenRows, capacity: int, pad_id: int = 0) -> Iterator[PackedBatch]:
    """Every document once, in the table's order as far as packing allows."""
    for rows in pack_in_order(table.lengths, capacity):
        yield build_batch(table, rows, capacity, pad_id)
