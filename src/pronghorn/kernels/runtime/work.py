"""Counts what a dry run would do on a GPU: floating-point operations by unit, bytes that kernels move, launches.

Triton launches are counted where they are skipped (compile_ahead.py): each tensor argument once. Libraries are counted where
they are called, with `count` or `count_mm`, and so are operations of Triton kernels that multiply. `memory/costs.py` turns the
sums into milliseconds. Outside of `counting` nothing happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Work:
    flops: Counter[str] = field(default_factory=Counter)  # by unit, a row of costs.CEILINGS
    bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.launches + other.launches)

    def __sub__(self, other: Work) -> Work:
        return Work(self.flops - other.flops, self.bytes - other.bytes, self.launches - other.launches)

    def __mul__(self, times: float) -> Work:
        scaled = Counter({unit: times * flops for unit, flops in self.flops.items()})
        return Work(scaled, times * self.bytes, times * self.launches)


_counting: list[Work] = []


@contextmanager
def counting(work: Work) -> Iterator[Work]:
    _counting.append(work)
    try:
        yield work
    finally:
        _counting.pop()


def launched(tensors: Iterable[Any]) -> None:
    """A kernel that reads or writes these; what is not a tensor is left out, and a tensor that stands for two counts once."""
    if _counting:
        seen = {(x.untyped_storage()._cdata, x.storage_offset()): x.nbytes for x in tensors if isinstance(x, Tensor)}
        _counting[-1].bytes += sum(seen.values())
        _counting[-1].launches += 1


def count(unit: str, flops: float) -> None:
    if _counting:
        _counting[-1].flops[unit] += flops  # type: ignore[assignment]


def count_mm(a: Tensor, b: Tensor, *others: Tensor | None) -> None:
    """A library's a @ b, and what else it reads or writes."""
    if _counting:
        count({1: "fp8", 4: "fp32"}.get(a.element_size(), "bf16"), 2.0 * a.shape[0] * a.shape[1] * b.shape[-1])
        launched((a, b, *others))
