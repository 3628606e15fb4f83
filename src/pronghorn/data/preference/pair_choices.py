"""What a recipe does to rows, done to whole groups of preference rows: no answer goes without the ones it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_rows import PairRows
from pronghorn.data.read.reading import SourceCount

Longs = npt.NDArray[np.int64]


def first_rows(table: TokenTable) -> Longs:
    """One row of each group; every row where rows stand for themselves."""
    return np.arange(len(table)) if table.pairs is None else table.pairs.starts[:-1]


def unit_of(table: TokenTable) -> str:
    """What rows are called that stay together."""
    if table.pairs is None:
        return "row"
    return "pair" if len(table) > len(table.pairs.sizes) else "answer"


def in_groups(sources: Sequence[SourceCount], pairs: PairRows | None) -> list[SourceCount]:
    """The sources with as many rows as they have groups."""
    if pairs is None:
        return list(sources)
    ends = np.cumsum([0, *(source.rows for source in sources)])
    groups = np.diff(np.searchsorted(pairs.starts[:-1], ends))
    return [replace(source, rows=int(count)) for source, count in zip(sources, groups, strict=True)]


def take(table: TokenTable, units: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> TokenTable:
    """These rows, or these groups."""
    if table.pairs is None:
        return table.select(units)
    return table.select_groups(np.flatnonzero(units) if units.dtype == np.bool_ else units.astype(np.int64))


def too_long(table: TokenTable, limit: int, capacity: int | None) -> npt.NDArray[np.bool_]:
    """Which rows are too long; which groups have such a row, or do not fit into a pack as documents side by side."""
    over: npt.NDArray[np.bool_] = table.lengths > limit
    if table.pairs is None or not len(table):
        return over
    starts = table.pairs.starts[:-1]
    beyond = np.add.reduceat(table.lengths, starts, dtype=np.int64) > (capacity or np.inf)
    return np.logical_or.reduceat(over, starts) | beyond


def with_loss(table: TokenTable) -> npt.NDArray[np.bool_]:
    """Which rows have a label; which groups have one in every row."""
    some: npt.NDArray[np.bool_] = table.loss_counts > 0
    return some if table.pairs is None or not len(table) else np.logical_and.reduceat(some, table.pairs.starts[:-1])


def truncated(table: TokenTable, limit: int, capacity: int | None) -> TokenTable:
    """All rows cut to the limit; the rows of a group that fits into no pack cut alike, until it does."""
    limits = np.full(len(table), limit, np.int64)
    if table.pairs is not None and capacity is not None and len(table):
        sizes = table.pairs.sizes
        beyond = np.add.reduceat(np.minimum(table.lengths, limit), table.pairs.starts[:-1], dtype=np.int64) > capacity
        limits = np.where(np.repeat(beyond, sizes), np.minimum(limits, capacity // np.repeat(sizes, sizes)), limits)
    return table.cut([(i, 0, int(stop)) for i, stop in enumerate(limits)])


def held_out_by(table: TokenTable) -> Longs:
    """What stays on one side when rows are held out: pieces of one split row, all answers of a group."""
    rows = np.array([table.row(i) for i in range(len(table))], np.int64)
    return rows if table.pairs is None else np.repeat(rows[first_rows(table)], table.pairs.sizes)
