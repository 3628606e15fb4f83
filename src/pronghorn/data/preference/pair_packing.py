"""Groups of preference rows in a pack: what stays together, how many tokens it takes, and where shared prompts lie.

Without sharing, the rows of a group are documents side by side. With it (`PairRows.shared`) the tokens that they begin with are
there once, as a segment of its own in front of the answers (batches.py shows the layout). Labels of shared rows are told for
each loss row: the last row of a prompt predicts the first token of every answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pronghorn.data.pack.packing import Groups
from pronghorn.data.preference.pair_rows import PairRows, pairs_of

if TYPE_CHECKING:
    from pronghorn.data.pack.packing import TokenRows

Longs = npt.NDArray[np.int64]


def groups_of(table: TokenRows, together: int = 1) -> Groups:
    """What stays side by side in one pack: the groups of preference rows; of other tables, so many rows in a row."""
    pairs = pairs_of(table)
    if pairs is None:
        return Groups.alike(table.lengths, together)
    return Groups(pairs.starts, np.add.reduceat(_tokens(table, slice(None)), pairs.starts[:-1]))


def tokens_in(table: TokenRows, rows: Longs) -> int:
    """Tokens that these rows, whole groups of them, take in a pack."""
    return int(_tokens(table, rows).sum())


def _tokens(table: TokenRows, rows: Any) -> Longs:
    """Tokens of each row; a shared prompt counts with the first row of its group."""
    pairs = pairs_of(table)
    lengths: Longs = table.lengths[rows].astype(np.int64)
    if pairs is None or not pairs.shared:
        return lengths
    later = np.diff(pairs.groups[rows], prepend=-1) == 0
    lengths[later] -= pairs.prefixes[rows][later]
    return lengths


def split_groups(table: TokenRows, rows: Longs, together: int = 1) -> list[Longs]:
    """The groups that these rows, whole groups side by side, consist of."""
    pairs = pairs_of(table)
    if pairs is None:
        return [rows[i : i + together] for i in range(0, len(rows), together)]
    return np.split(rows, np.flatnonzero(np.diff(pairs.groups[rows])) + 1)


def segments_of(table: TokenRows) -> Longs:
    """Lengths of all documents of a table as they lie in packs: prompts and answers apart where prompts are shared."""
    pairs = pairs_of(table)
    lengths = table.lengths.astype(np.int64)
    if pairs is None or not pairs.shared:
        return lengths
    prompts = pairs.prefixes[pairs.starts[:-1]].astype(np.int64)
    return np.concatenate([prompts[prompts > 0], lengths - pairs.prefixes])


@dataclass(frozen=True, slots=True)
class Segments:
    """The real tokens of a pack with shared prompts, before it is padded."""

    ids: Longs
    positions: Longs
    lengths: Longs  # of each segment
    prompts: npt.NDArray[np.int32]  # of each segment the number of its prompt's; -1: none
    loss_rows: Longs  # in the order of the documents, in each of them ascending
    labels: Longs  # of each loss row
    documents: Longs  # of each loss row the document, counted in the pack


def shared_segments(table: TokenRows, pairs: PairRows, rows: Longs) -> Segments:
    ids: list[npt.NDArray[Any]] = []
    positions, loss_rows, labels, documents = ([np.zeros(0, np.int64)] for _ in range(4))
    lengths: list[int] = []
    prompts: list[int] = []
    at = document = 0
    for group in split_groups(table, rows) if len(rows) else []:
        shared, prompt, prompt_begins = int(pairs.prefixes[group[0]]), -1, at
        if shared:
            prompt = len(lengths)
            ids.append(table.ids(int(group[0]))[:shared])
            positions.append(np.arange(shared))
            lengths.append(shared)
            prompts.append(-1)
            at += shared
        for row in group:
            tokens, marks = table.ids(int(row)), table.loss(int(row))
            targets = np.flatnonzero(marks[1:]) + 1  # the first token has nothing before it that could predict it
            before = targets - 1
            loss_rows.append(np.where(before < shared, prompt_begins + before, at + before - shared))
            labels.append(tokens[targets].astype(np.int64))
            documents.append(np.full(len(targets), document))
            ids.append(tokens[shared:])
            positions.append(np.arange(shared, len(tokens)))
            lengths.append(len(tokens) - shared)
            prompts.append(prompt)
            at, document = at + len(tokens) - shared, document + 1
    return Segments(
        np.concatenate([np.zeros(0, np.int64), *ids]).astype(np.int64),
        np.concatenate(positions),
        np.array(lengths, np.int64),
        np.array(prompts, np.int32),
        np.concatenate(loss_rows),
        np.concatenate(labels),
        np.concatenate(documents),
    )


def ends_of(table: TokenRows, rows: Longs, pad_id: int) -> Longs:
    """Where in a pack of these rows each document has its last token that is not `pad_id`; of one without, its first."""
    pairs, at, ends = pairs_of(table), 0, []
    for group in split_groups(table, rows) if len(rows) else []:
        shared = int(pairs.prefixes[group[0]]) if pairs is not None and pairs.shared else 0
        prompt, at = at, at + shared
        for row in group:
            ids = table.ids(int(row))
            last = int(np.flatnonzero(ids != pad_id)[-1:].sum())
            ends.append(prompt + last if last < shared else at + last - shared)
            at += len(ids) - shared
    return np.array(ends, np.int64)


def slots(pairs: PairRows, rows: Longs) -> dict[str, npt.NDArray[Any]]:
    """`roles_D`, `firsts_D` and `margins_D` of a pack with these rows."""
    new = np.diff(pairs.groups[rows], prepend=-1) != 0
    firsts = np.flatnonzero(new)[np.cumsum(new) - 1]
    return {"roles_D": pairs.roles[rows], "firsts_D": firsts, "margins_D": pairs.margins[rows]}
