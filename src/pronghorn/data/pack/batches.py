"""Packs into tensors: one `PackedBatch` a micro-batch, with all metadata built once, on the host, ahead of the step.

T = capacity (tokens in a pack, padding included); packs.py has the other axes. The batches of a run have one of a few shapes
(`Shapes`), so that a step can be captured once and replayed for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pronghorn.data.pack.packing import Packs, TokenRows, max_documents
from pronghorn.data.preference.pair_packing import segments_of, shared_segments, slots
from pronghorn.data.preference.pair_rows import pairs_of
from pronghorn.packs import IGNORED, PackedBatch

# Document boundaries come in multiples of this many. Kernels pay for each entry (FlashAttention-2's backward holds 128 rows of
# float32 for every one of them, 2 GB for 1,026 entries of an 8B layer), so there is little padding.
ENTRIES = 32
STEPS = 16  # other axes come in sixteenths of their largest size: the head computes 3 % too many rows on average, at most 6 %


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
