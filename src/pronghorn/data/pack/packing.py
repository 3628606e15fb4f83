"""Whole documents into packs of a fixed number of tokens, in a bounded window, so that it also serves streams.

A pack takes documents in the order they arrive until the next one does not fit; the hole that is left is filled with
the largest waiting document that fits it, again and again. So a pack is a fair sample of the data (packing by sorted
length would put all long documents into the same steps), no document waits longer than the window, and the hole is
small because the window holds a thousand candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pronghorn.errors import DataError

# Candidates for the last hole of a pack. 100,000 instruction documents (mean 207 tokens) into 2,048: 128 waiting
# documents fill 99.69 %, 1,024 fill 99.85 %, 4,096 fill 99.87 %; into 16,384 all of them fill 99.91 %.
WINDOW = 1024

# A bound on the documents of a pack, so that its metadata has a fixed length. Below 16 tokens a document on average,
# packs close early; instruction data has about 80 documents in 16,384 tokens.
TOKENS_PER_DOCUMENT = 16


class TokenRows(Protocol):
    """What a table of tokenized documents offers (data/encode/tokens.py has the memory-mapped one)."""

    lengths: npt.NDArray[np.int32]
    loss_counts: npt.NDArray[np.int32]

    def __len__(self) -> int: ...
    def ids(self, i: int) -> npt.NDArray[np.int32]: ...
    def loss(self, i: int) -> npt.NDArray[np.bool_]: ...


def max_documents(capacity: int) -> int:
    """The most documents one pack holds."""
    return max(8, capacity // TOKENS_PER_DOCUMENT)


@dataclass(frozen=True)
class Packs(Sequence[npt.NDArray[np.int64]]):
    """The packs of one epoch: `packs[i]` is the row numbers of the documents of pack i."""

    order: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]  # pack i is order[starts[i]:starts[i + 1]]
    tokens: int  # in all packs
    steps: npt.NDArray[np.int64] | None = None  # where a step has so many rows: its first pack, and at the end all packs

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, i):  # type: ignore[no-untyped-def]
        return self.order[self.starts[i] : self.starts[i + 1]]

    def end_of_step(self, at: int, packs_per_step: int) -> int:
        """The pack behind those of the step that begins with this one."""
        if self.steps is None:
            return min(at + packs_per_step, len(self))
        return int(self.steps[np.searchsorted(self.steps, at, side="right")])

    def count_steps(self, packs_per_step: int) -> int:
        return -(-len(self) // packs_per_step) if self.steps is None else len(self.steps) - 1

    @property
    def packs_of_steps(self) -> npt.NDArray[np.int64]:
        """How many packs each step has, where it has so many rows."""
        return np.zeros(0, np.int64) if self.steps is None else np.diff(self.steps)

    def efficiency(self, capacity: int) -> float:
        """Share of all slots that hold a real token."""
        return self.tokens / (len(self) * capacity) if len(self) else 0.0


@dataclass(frozen=True, slots=True)
class Groups:
    """Documents that stay side by side in one pack."""

    starts: npt.NDArray[np.int64]  # group i is the documents starts[i] to starts[i + 1]
    tokens: npt.NDArray[np.int64]  # that each group takes in a pack

    @classmethod
    def alike(cls, lengths: npt.NDArray[np.integer], together: int = 1) -> Groups:
        """So many documents in a row, counted from the first."""
        count = len(lengths) // together
        return cls(np.arange(count + 1) * together, lengths[: count * together].reshape(-1, together).sum(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.tokens)


Documents = Groups | npt.NDArray[np.integer]  # or their lengths, where each stands for itself


def pack(documents: Documents, capacity: int, *, seed: int, epoch: int, window: int = WINDOW, rows: int | None = None) -> Packs:
    """Shuffle all documents with (seed, epoch), then pack them. The same arguments give the same packs, anywhere. `rows`: each
    step has so many documents (or groups), in packs of its own; the last one of an epoch has what is left."""
    shuffled = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(len(documents))
    return _collect(shuffled, documents, capacity, window, rows)


def pack_in_order(documents: Documents, capacity: int) -> Packs:
    """Pack without shuffling: for evaluation, which sees every document once."""
    return _collect(np.arange(len(documents)), documents, capacity, WINDOW)


def _collect(
    shuffled: npt.NDArray[np.int64], documents: Documents, capacity: int, window: int, rows: int | None = None
) -> Packs:
    groups = documents if isinstance(documents, Groups) else Groups.alike(documents)
    sizes = np.diff(groups.starts)
    largest = int(sizes.max(initial=1))
    order: list[int] = []
    starts, steps, together = [0], [0], rows or max(1, len(shuffled))
    for first in range(0, len(shuffled), together):
        lengths = groups.tokens[shuffled[first : first + together]].tolist()
        for members in pack_stream(lengths, capacity, window, max_documents(capacity) // largest):
            order += [first + member for member in members]
            starts.append(len(order))
        steps.append(len(starts) - 1)
    chosen, begins = shuffled[np.array(order, dtype=np.int64)], np.array(starts, dtype=np.int64)
    if largest > 1:
        counts = sizes[chosen]
        ends = np.concatenate([[0], np.cumsum(counts)])
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        chosen, begins = np.repeat(groups.starts[chosen], counts) + within, ends[begins]
    return Packs(chosen, begins, int(groups.tokens.sum()), np.array(steps, np.int64) if rows else None)


def pack_stream(lengths: Iterable[int], capacity: int, window: int = WINDOW, most: int | None = None) -> Iterator[list[int]]:
    """Yields packs as lists of arrival numbers, of `most` at most. Holds `window` documents at most."""
    waiting = _Window(capacity)
    most = max_documents(capacity) if most is None else most
    arrivals = enumerate(lengths)
    while True:
        waiting.refill(arrivals, window)
        if not waiting.count:
            return
        members: list[int] = []
        room = capacity
        while len(members) < most and (length := waiting.oldest_length()) <= room and length:
            members.append(waiting.take(length))
            room -= length
            if waiting.count < window // 2:
                waiting.refill(arrivals, window)
        while len(members) < most and (length := waiting.largest_up_to(room)):
            members.append(waiting.take(length))
            room -= length
        yield members


class _Window:
    """Waiting documents, found by age and by length in constant time.

    The lengths present are the bits of one integer, so "the largest length up to n" is a mask and a bit_length: 0.3 µs
    at 16,384 bits, which is what lets plain Python pack a million documents in about a second.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self._capacity = capacity
        self._by_length: dict[int, deque[int]] = {}
        self._present = 0
        self._by_age: deque[tuple[int, int]] = deque()  # (arrival, length); taken ones leave when they reach the front
        self._taken: set[int] = set()

    def refill(self, arrivals: Iterator[tuple[int, int]], window: int) -> None:
        while self.count < window:
            arrival, length = next(arrivals, (-1, 0))
            if arrival < 0:
                return
            if not 0 < length <= self._capacity:
                raise DataError(
                    what=f"document {arrival} has {length:,} tokens, but a pack holds {self._capacity:,}",
                    why="documents are not split across packs",
                    fix="lower data.max_length to train.capacity, or raise train.capacity",
                )
            same = self._by_length.setdefault(length, deque())
            if not same:
                self._present |= 1 << length
            same.append(arrival)
            self._by_age.append((arrival, length))
            self.count += 1

    def oldest_length(self) -> int:
        """0 when nothing waits."""
        while self._by_age and self._by_age[0][0] in self._taken:
            self._taken.remove(self._by_age.popleft()[0])
        return self._by_age[0][1] if self._by_age else 0

    def largest_up_to(self, room: int) -> int:
        """0 when nothing fits."""
        return max(0, (self._present & ((1 << (room + 1)) - 1)).bit_length() - 1)

    def take(self, length: int) -> int:
        """The oldest document of this length."""
        same = self._by_length[length]
        arrival = same.popleft()
        if not same:
            self._present &= ~(1 << length)
        self._taken.add(arrival)
        self.count -= 1
        return arrival
