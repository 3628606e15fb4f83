"""What a recipe does to rows, done to whole units of a table: no answer goes without the ones it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.read.reading import SourceCount

Longs = npt.NDArray[np.int64]


def first_rows(table: TokenTable) -> Longs:
    """One row of each unit."""
    return table.starts[:-1]


def unit_of(table: TokenTable) -> str:
    """What a unit is called."""
    if table.pairs is None:
        return "row"
    return "pair" if len(table) > len(table.pairs.sizes) else "answer"


def in_units(sources: Sequence[SourceCount], table: TokenTable) -> list[SourceCount]:
    """The sources of the table with as many rows as they have units."""
    ends = np.cumsum([0, *(source.rows for source in sources)])
    counts = np.diff(np.searchsorted(first_rows(table), ends))
    return [replace(source, rows=int(count)) for source, count in zip(sources, counts, strict=True)]


def too_long(table: TokenTable, limit: int, capacity: int | None) -> npt.NDArray[np.bool_]:
    """Which units have a row that is too long, or do not fit into a pack as documents side by side."""
    beyond = np.add.reduceat(table.lengths, first_rows(table), dtype=np.int64) > (capacity or np.inf)
    return np.logical_or.reduceat(table.lengths > limit, first_rows(table)) | beyond


def with_loss(table: TokenTable) -> npt.NDArray[np.bool_]:
    """Which units have a label in every row."""
    found: npt.NDArray[np.bool_] = np.logical_and.reduceat(table.loss_counts > 0, first_rows(table))
    return found


def truncated(table: TokenTable, limit: int, capacity: int | None) -> TokenTable:
    """All rows cut to the limit; the rows of a unit that fits into no pack cut alike, until it does."""
    sizes, room = np.diff(table.starts), capacity or np.iinfo(np.int64).max
    tokens = np.add.reduceat(np.minimum(table.lengths, limit), first_rows(table), dtype=np.int64)
    limits = np.repeat(np.where(tokens > room, np.minimum(limit, room // sizes), limit), sizes)
    return table.cut([(i, 0, int(stop)) for i, stop in enumerate(limits)])


def held_out_by(table: TokenTable) -> Longs:
    """What stays on one side when rows are held out: pieces of one split row, all answers of a group."""
    rows = np.array([table.row(i) for i in range(len(table))], np.int64)
    return np.repeat(rows[first_rows(table)], np.diff(table.starts))
