"""Packs into tensors: one `PackedBatch` a micro-batch, with all metadata built once, on the host, ahead of the step.

T = capacity (tokens in a pack, padding included). The batches of a run have one of a few shapes (`Shapes`), so that a step can
be captured once and replayed for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.pack.packing import Packs, max_documents
from pronghorn.data.preference.pair_packing import segments_of, shared_segments, slots
from pronghorn.data.preference.pair_rows import pairs_of

# Document boundaries come in multiples of this many. Kernels pay for each entry (FlashAttention-2's backward holds 128 rows of
# float32 for every one of them, 2 GB for 1,026 entries of an 8B layer), so there is little padding.
ENTRIES = 32
ROW_STEPS = 16  # loss rows come in sixteenths of the capacity: the head computes 3 % too many rows on average, at most 6 %
IGNORED = -100  # torch's cross-entropy skips this label


class TokenRows(Protocol):
    """What a table of tokenized documents offers (data/encode/tokens.py has the memory-mapped one)."""

    lengths: npt.NDArray[np.int32]
    loss_counts: npt.NDArray[np.int32]

    def __len__(self) -> int: ...
    def ids(self, i: int) -> npt.NDArray[np.int32]: ...
    def loss(self, i: int) -> npt.NDArray[np.bool_]: ...


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. E = entries of `cu_seqlens`, N = loss rows, D = E slots for documents, of which the last is never used.

    Batches of preference data say of each document what it is in its group (`document_N`, `roles_D`, `firsts_D`), so that an
    objective adds up log-probabilities by `index_add(0, document_N, ...)` into D sums and compares `sums[firsts_D]` with
    `sums` wherever `roles_D > 0`.

    A batch with shared prompts (`shares_prompts`) has the tokens that all answers of a group begin with only once. Its segments
    follow each other group by group, each prompt right before its answers, then padding:

        [prompt 1 | chosen 1 | rejected 1 | prompt 2 | chosen 2 | rejected 2 | ... | padding]

    Each segment is a causal document of its own in `cu_seqlens`, and an answer also attends to all rows of its prompt
    (`prompt_of_S`; kernels/attention/attention_shared.py, which reads keys from the prompt's first row to the answer's last: so
    what is between them costs time). With a window positions count: `positions_T` goes on from the prompt's length in every
    answer. The label of an answer's first token is predicted by the last row of its prompt: this row stands in `loss_rows` once
    for each answer of the group, with its own `labels_N` and `document_N`. A group without a common token has no segment for
    its prompt.
    """

    ids_T: torch.Tensor  # int64
    labels_T: torch.Tensor  # int64, already shifted: labels_T[t] is the token to predict at t, or IGNORED; or see labels_N
    positions_T: torch.Tensor  # int64, from 0 in each document; in an answer from its shared prompt's length on
    cu_seqlens: torch.Tensor  # int32, document boundaries, padded by repeating T
    loss_rows: torch.Tensor  # int64, the t with a label, padded with T - 1, which never has one
    longest: int  # tokens in the longest document
    typical: int  # mean length of the documents, each token counted
    tokens: int  # real tokens: T less padding
    loss_tokens: int  # labels: `loss_rows` less padding
    documents: tuple[int, ...]  # row numbers in the table
    given_KN: torch.Tensor | None = None  # float32, what an objective knows of each loss row (a reference's log-probabilities)
    # of preference data:
    document_N: torch.Tensor | None = None  # int64, the place in `documents` of each loss row's label; D - 1 in padding
    roles_D: torch.Tensor | None = None  # int64: 0 chosen (KTO: desirable), 1 rejected (undesirable), 2.. more rejected; or -1
    firsts_D: torch.Tensor | None = None  # int64, the place of the group's first document, the chosen one; its own where none
    margins_D: torch.Tensor | None = None  # float32, the group's margin; 0 where the data has none
    # of shared prompts:
    labels_N: torch.Tensor | None = None  # int64, the label of each loss row, IGNORED in padding; replaces labels_T[loss_rows]
    prompt_of_S: torch.Tensor | None = None  # int32 [E - 1], of each segment of `cu_seqlens` that of its prompt; -1 none

    @property
    def shares_prompts(self) -> bool:
        return self.prompt_of_S is not None

    @property
    def row_labels(self) -> torch.Tensor:
        """The label of each loss row, whether or not prompts are shared."""
        return self.labels_T[self.loss_rows] if self.labels_N is None else self.labels_N

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What makes two batches the same work: they may run through the same captured step."""
        return len(self.ids_T), len(self.cu_seqlens), len(self.loss_rows), self.longest

    @property
    def every_row(self) -> bool:
        """Whether `loss_rows` is simply every t: nothing has to be gathered."""
        return self.labels_N is None and len(self.loss_rows) == len(self.ids_T)

    def map(self, change: Any) -> PackedBatch:
        """The same batch with `change` done to each tensor."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{name: change(t) for name, t in tensors.items() if isinstance(t, torch.Tensor)})

    def beginning(self, tokens: int) -> PackedBatch:
        """The first so many tokens, for who looks at shapes alone: every row has a loss if every row had one, else at most
        half of them."""
        rows = self.loss_rows[:tokens] if self.every_row else self.loss_rows.clamp(max=tokens - 1)[: tokens // 2]
        given = None if self.given_KN is None else self.given_KN[:, : len(rows)]
        labels, places = (None if known is None else known[: len(rows)] for known in (self.labels_N, self.document_N))
        return replace(
            self,
            labels_N=labels,
            document_N=places,
            ids_T=self.ids_T[:tokens],
            labels_T=self.labels_T[:tokens],
            positions_T=self.positions_T[:tokens],
            cu_seqlens=self.cu_seqlens.clamp(max=tokens),
            loss_rows=rows,
            given_KN=given,
        )

    def copy_from(self, other: PackedBatch) -> None:
        """Overwrite the tensors, in place, with those of a batch of the same shape."""
        for field in fields(self):
            mine = getattr(self, field.name)
            if isinstance(mine, torch.Tensor):
                mine.copy_(getattr(other, field.name), non_blocking=True)

    def to(self, device: torch.device | str) -> PackedBatch:
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


@dataclass(frozen=True)
class Shapes:
    """The sizes that the batches of a run are padded to: smallest that fits, ascending.

    A function of the data, the seed and the capacity, never of what the run has seen: a resumed run computes every batch in the
    same shape as the run it goes on with, so its sums have the same order.
    """

    entries: tuple[int, ...]  # of cu_seqlens
    rows: tuple[int, ...]  # of loss_rows; the last one is the capacity
    longest: int
    typical: int  # mean length of all documents, each token counted

    @classmethod
    def planned(cls, table: TokenRows, packs: Packs, capacity: int) -> Shapes:
        """One size fits all packs of this epoch, or two where three of four packs are much smaller than the largest; one more
        fits any pack there can be. Few sizes, because a step is captured for each."""
        starts, pairs, lengths = packs.starts[:-1], pairs_of(table), segments_of(table)
        documents = np.diff(packs.starts) + 2
        rows = np.add.reduceat(table.loss_counts[packs.order], starts)
        longest = min(capacity, _rounded(int(lengths.max()), 128))
        most = max_documents(capacity) + 2 + capacity // longest
        if pairs is not None and pairs.shared:  # each group has one segment more, and two documents at least
            documents += np.add.reduceat(np.diff(pairs.groups[packs.order], prepend=-1) != 0, starts, dtype=np.int64)
            most += max_documents(capacity) // 2
        return cls(
            entries=tuple(sorted({*_sizes(documents, ENTRIES, 2 * ENTRIES), _rounded(most, ENTRIES)})),
            rows=tuple(sorted({*_sizes(rows, max(16, capacity // ROW_STEPS), capacity // 8, capacity), capacity})),
            longest=longest,
            typical=_typical(lengths),
        )


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


def _padded(values: npt.NDArray[Any], size: int, fill: int) -> npt.NDArray[Any]:
    return np.concatenate([values, np.full(size - len(values), fill, dtype=values.dtype)])


def build_batch(
    table: TokenRows, rows: npt.NDArray[np.int64], capacity: int, pad_id: int = 0, shapes: Shapes | None = None
) -> PackedBatch:
    """Padding at the end is one more document, or several of the longest's length, without labels: attention needs no special
    case for it. Without `rows`, all of it is padding. Without `shapes` the loss rows are not padded, and `longest` is this
    pack's own.
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

    count, entries, longest = len(loss_rows), _rounded(len(bounds), ENTRIES), int(document_lengths.max())
    typical = _typical(document_lengths)
    if shapes is not None:
        size = next(size for size in shapes.rows if size >= count)
        every = size == capacity and shared is None
        loss_rows = np.arange(capacity) if every else _padded(loss_rows, size, capacity - 1)
        entries = next(size for size in shapes.entries if size >= len(bounds))
        longest, typical = shapes.longest, shapes.typical
    known: dict[str, npt.NDArray[Any]] = {}
    if pairs is not None:
        known = slots(pairs, rows, entries)
        if shared is None:
            place = np.searchsorted(bounds, loss_rows, side="right") - 1
            known["document_N"] = np.where(labels[loss_rows] == IGNORED, entries - 1, place)
        else:
            known["document_N"] = _padded(shared.documents, len(loss_rows), entries - 1)
            known["labels_N"] = _padded(shared.labels, len(loss_rows), IGNORED)
            known["prompt_of_S"] = _padded(shared.prompts, entries - 1, -1)
    return PackedBatch(
        ids_T=torch.from_numpy(ids),
        labels_T=torch.from_numpy(labels),
        positions_T=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(_padded(bounds, entries, capacity)),
        loss_rows=torch.from_numpy(loss_rows),
        longest=longest,
        typical=typical,
        tokens=tokens,
        loss_tokens=count,
        documents=documents,
        **{name: torch.from_numpy(values) for name, values in known.items()},
    )
