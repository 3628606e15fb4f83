"""The ranks that train together, as a run sees them. Here: one rank, for which every reduction is what it already has;
several are in ranks.py.

Everything that ranks must agree on goes through a `World`: sums of losses, counts and flat gradient buffers, signals to stop,
what only one rank may do. Rank 0 is the writer: run.jsonl, checkpoints, reports, answers and caches are written by it alone.
With one rank nothing is copied, sent or waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Pending:
    """A reduction that has begun. Its tensors are neither read nor written before `wait`."""

    def wait(self) -> None: ...


class World:
    rank = 0
    size = 1
    waited = 0.0  # seconds in which this rank waited for others
    captures = False  # whether `add_up` can be part of a CUDA graph
    ordered = False  # whether what was begun later also writes later

    @property
    def writes(self) -> bool:
        """Whether this rank is the one that writes files."""
        return self.rank == 0

    # ---- reductions: all ranks call them, in the same order ------------------------------------------------------------

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor becomes its sum over all ranks, in place: a step's gradients and its loss."""

    def total(self, *numbers: float) -> tuple[float, ...]:
        """Sums over all ranks of numbers on the host."""
        return numbers

    def largest(self, number: int) -> int:
        return number

    def joined(self, rows: list[str]) -> list[str]:
        """The lists of all ranks, rank by rank."""
        return rows

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        """Begins to fill `whole` with the parts of all ranks, which have one size, one after the other."""
        whole.copy_(part)
        return Pending()

    def scatter_sum(self, part: Tensor, whole: Tensor) -> Pending:
        """Begins to fill `part` with this rank's part of the sum of all ranks' `whole`."""
        part.copy_(whole)
        return Pending()

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows go to the ranks, so many to each, one after the other; returns those that come, so many from each."""
        return rows

    def wait(self) -> None:
        """Until every rank is here."""

    def neighbours(self, size: int) -> World:
        """The group of `size` consecutive ranks that this one is in: ranks 0 to size - 1 are the first. All ranks call it."""
        return self

    def before_parting(self, work: Callable[[], None]) -> None:
        """A method that is called when the ranks part, if its object is still there: it gives up graphs that have sums."""

    def require_same(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Refuses ranks for which one of these is not what it is for the writer."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around collectives that do not go through here."""
        yield

    # ---- what one rank does ----------------------------------------------------------------------------------------------

    def sent_by(self, rank: int, work: Callable[[], T]) -> T:
        """This rank does it; every rank gets its result, which is plain JSON, or its error."""
        return work()

    def on_writer(self, work: Callable[[], T]) -> T:
        return self.sent_by(0, work)

    @contextmanager
    def writer_first(self) -> Iterator[None]:
        """All ranks do what follows, the writer before the others: it fills a cache that they find."""
        yield
