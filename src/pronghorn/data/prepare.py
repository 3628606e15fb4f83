"""From the names in a recipe to rows ready for packing: read, tokenize once, clean, cut to length, count everything.

Tokenized rows come from the cache (cached_rows.py). What is dropped, cut or split is a view on that table, so changing
max_length or duplicates tokenizes nothing again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pronghorn.data import clean
from pronghorn.data.cached_rows import Progress, Rows, Stage, no_stage, silent, tokenized_rows
from pronghorn.data.encode import example_from_json
from pronghorn.data.formats import Example
from pronghorn.data.mixing import repeated
from pronghorn.data.reading import Name, SourceCount, told_of_columns
from pronghorn.data.token_cache import DamagedError, read_note, write_note
from pronghorn.data.tokens import TokenTable
from pronghorn.errors import DataError, counted
from pronghorn.recipe import Data, named

FINDINGS_VERSION = 2  # raise it when clean.py finds other things
SILENT_SHARE = 0.01  # of rows may be too long and dropped without having been asked for


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the rows. Rows are counted where they leave: a duplicate that is also too long is a duplicate."""

    read: int
    bad: int
    exact_duplicates: int
    near_duplicates: int
    junk: int
    too_long: int  # affected by max_length: dropped, truncated or split
    dropped_long: int
    truncated: int
    split_into: int  # pieces made of the rows that were split
    no_loss: int  # rows (or pieces) without a single token to learn from
    kept: int
    tokens: int
    loss_tokens: int
    format: str
    sources: tuple[SourceCount, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """Row numbers: copy -> first of its kind, junk -> why. `near` holds the exact ones too, None when not looked for."""

    exact: dict[int, int]
    junk: dict[int, str]
    near: dict[int, int] | None = None
    remark: str = ""  # what became of the file they are kept in, if there is something to tell


@dataclass(frozen=True, slots=True)
class Prepared:
    tokens: TokenTable
    counts: Counts
    bad_rows_file: Path | None = None
    remarks: tuple[str, ...] = field(default=())  # what the user should be told

    def example(self, i: int) -> Example:
        return example_of(self.tokens, i)


def example_of(table: TokenTable, i: int) -> Example:
    return example_from_json(table.example_json(i), table.where(i))


def prepare(
    names: Sequence[Name], spec: Data, tokenizer: Any, *, progress: Progress = silent, stage: Stage = no_stage
) -> Prepared:
    """The rows to train (or evaluate) on. `tokenizer` may be a `TokenizerFiles`, loaded only when the cache misses."""
    rows = tokenized_rows(names, spec, tokenizer, progress=progress, stage=stage)
    found = None
    if spec.duplicates != "keep" or spec.junk != "keep":
        with stage("read"):
            found = findings(rows, near=spec.duplicates == "drop-near", progress=progress)
    prepared = choose(rows, spec, found)
    if not prepared.counts.kept:
        raise _nothing_left(names, prepared.counts, spec)
    return prepared


# Duplicates and junk ----------------------------------------------------------------------------------------------------


def findings(rows: Rows, near: bool, progress: Progress = silent) -> Findings:
    """Duplicates and junk among the rows; looked for once, then kept beside the cached table."""
    path = rows.path.with_suffix(f".findings{FINDINGS_VERSION}.json")
    remark = ""
    try:
        known = _read_findings(path)
    except DamagedError as damage:
        known, remark = None, f"the list of duplicates and junk is damaged ({damage}) and is created again: {path}"
    if known is not None and (known.near is not None or not near):
        return known
    known = _look(rows.table, near, progress)
    write_note(path, json.dumps([known.exact, known.junk, known.near]))
    return replace(known, remark=remark)


def _look(table: TokenTable, near: bool, progress: Progress) -> Findings:
    """In one pass, so that each row is read and parsed once, and a batch of them at a time."""
    alike = clean.NearDuplicates(lambda i: example_of(table, i)) if near else None
    identities, reasons = bytearray(), dict[int, str]()
    for start in range(0, len(table), clean.BATCH):
        progress("duplicates and junk", start, len(table))
        batch = [example_from_json(text, "") for text in table.examples_json(start, start + clean.BATCH)]
        for i, example in enumerate(batch, start=start):
            identities += clean.identity(example)
            if reason := clean.junk(example):
                reasons[i] = reason
        if alike is not None:
            alike.add(batch)
    progress("duplicates and junk", len(table), len(table))
    return Findings(clean.copies_of(identities), reasons, alike.copies if alike is not None else None)


def _read_findings(path: Path) -> Findings | None:
    note = read_note(path)
    if note is None:
        return None
    exact, junk, near = ({int(i): v for i, v in part.items()} if part is not None else None for part in json.loads(note))
    return Findings(exact or {}, junk or {}, near)


# Choosing ---------------------------------------------------------------------------------------------------------------


def choose(rows: Rows, spec: Data, found: Findings | None, *, strict: bool = True) -> Prepared:
    """Apply what the recipe says to the rows. Not `strict`: too many long rows are a remark, not an error (for stats)."""
    table, keep = rows.table, np.ones(len(rows.table), np.bool_)
    exact = near = junk = 0
    if found is not None and spec.duplicates != "keep":
        copies = set(found.exact) | set(found.near or () if spec.duplicates == "drop-near" else ())
        keep[sorted(copies)] = False
        exact, near = len(found.exact), len(copies) - len(found.exact)
    if found is not None and spec.junk == "drop":
        reasons = [i for i in found.junk if keep[i]]
        keep[reasons] = False
        junk = len(reasons)
    chosen, mixed = repeated(rows.sources, keep)
    table = table.select(chosen) if mixed or not keep.all() else table

    remarks = [*rows.remarks, *told_of_columns(rows.sources), *mixed]
    remarks += [found.remark] if found is not None and found.remark else []
    if rows.empty and spec.junk == "keep":
        remarks.append(
            f"{counted(rows.empty, 'row')} with an empty answer: only the end token carries loss; data.junk: drop removes them"
        )
    if rows.lost:
        remarks.append(
            f"{counted(rows.lost, 'row')} whose content the chat template partly drops, trained without it (data.lost: allow)"
        )
    if rows.controls:
        fate = "kept as text" if spec.control_tokens == "escape" else "trained as control tokens (data.control_tokens: keep)"
        remarks.append(f"{counted(rows.controls, 'row')} with control tokens inside a message: {fate}")
    limit, affected = spec.max_length, int((table.lengths > spec.max_length).sum())
    if spec.long is None and affected > SILENT_SHARE * len(table):
        problem = _too_many_long(table, limit, affected)
        if strict:
            raise problem
        remarks.append(f"{problem.what}; {problem.fix}")
    cut, dropped_long, truncated, split_into = _cut(table, limit, spec.long)
    with_loss = cut.loss_counts > 0
    no_loss = int((~with_loss).sum())
    kept = cut.select(np.flatnonzero(with_loss)) if no_loss else cut
    if dropped_long and strict:
        why = "the answer starts after" if spec.long == "truncate" else "longer than"
        remarks.append(f"dropped {dropped_long:,} of {counted(len(table), 'row')}: {why} {limit:,} tokens")
    if no_loss and strict:
        parts = counted(len(cut), "row") + " and pieces" * (split_into > 0)
        remarks.append(f"dropped {no_loss:,} of {parts}: no token carries loss")
    if rows.bad:
        remarks.append(f"{counted(rows.bad, 'bad row')} written to {rows.bad_rows_file}")
    counts = Counts(
        read=rows.read, bad=rows.bad, exact_duplicates=exact, near_duplicates=near, junk=junk,
        too_long=affected, dropped_long=dropped_long, truncated=truncated, split_into=split_into,
        no_loss=no_loss, kept=len(kept), tokens=int(kept.lengths.sum(dtype=np.int64)),
        loss_tokens=int(kept.loss_counts.sum(dtype=np.int64)), format=rows.format, sources=rows.sources,
    )  # fmt: skip
    return Prepared(kept, counts, rows.bad_rows_file, tuple(remarks))


def _cut(table: TokenTable, limit: int, long: str | None) -> tuple[TokenTable, int, int, int]:
    """The table with no row above the limit, and how many were dropped, truncated, and made by splitting."""
    over = table.lengths > limit
    if not over.any():
        return table, 0, 0, 0
    if long in {None, "drop"}:
        return table.select(np.flatnonzero(~over)), int(over.sum()), 0, 0
    if long == "truncate":
        cut = table.cut([(i, 0, limit) for i in range(len(table))])
        lost = over & (cut.loss_counts == 0) & (table.loss_counts > 0)  # its answer began after the limit
        return cut.select(np.flatnonzero(~lost)), int(lost.sum()), int((over & ~lost).sum()), 0
    pieces = [(i, at, at + limit) for i, length in enumerate(table.lengths) for at in range(0, max(1, int(length)), limit)]
    return table.cut(pieces), 0, 0, len(pieces) - int((~over).sum())


def _too_many_long(table: TokenTable, limit: int, affected: int) -> DataError:
    longest = int(table.lengths.argmax())
    enough = int(np.quantile(table.lengths, 1 - SILENT_SHARE, method="higher"))
    share = affected / len(table)
    return DataError(
        f"{affected:,} of {counted(len(table), 'row')} ({share:.1%}) {'has' if affected == 1 else 'have'} more than"
        f" {limit:,} tokens", where="data.max_length",
        why=f"the longest has {table.lengths[longest]:,} tokens ({table.where(longest)}); dropping more than 1 % needs an "
            "explicit setting",
        fix=f"set data.long: drop, truncate or split, or data.max_length: {enough} or more",
    )  # fmt: skip


def _nothing_left(names: Sequence[Name], counts: Counts, spec: Data) -> DataError:
    where = ", ".join(map(named, names))
    if counts.dropped_long and spec.long == "truncate":
        return DataError(
            f"no row has a token with loss within its first {spec.max_length:,} tokens", where=where,
            why="truncation removes all answers", fix="raise data.max_length, or set data.long: split",
        )  # fmt: skip
    if counts.dropped_long and counts.dropped_long + counts.no_loss >= counts.read - counts.bad - counts.junk:
        return DataError(
            f"all rows are too long: none has {spec.max_length:,} tokens or fewer", where=where,
            why=f"dropped: {counted(counts.dropped_long, 'row')}",
            fix="raise data.max_length, or set data.long: truncate or split",
        )  # fmt: skip
    fates = {
        "too long": counts.dropped_long, "without a token that carries loss": counts.no_loss, "junk": counts.junk,
        "exact duplicates": counts.exact_duplicates, "near duplicates": counts.near_duplicates, "bad": counts.bad,
    }  # fmt: skip
    why = ", ".join(f"{count:,} {fate}" for fate, count in fates.items() if count)
    return DataError("no row is left to train on", where=where, why=why, fix="inspect rows with `pronghorn data show`")


# Evaluation -------------------------------------------------------------------------------------------------------------


def hold_out(table: TokenTable, fraction: float, seed: int) -> tuple[TokenTable, TokenTable]:
    """Split into (train, held out), the same for the same seed. Pieces of one split row stay together."""
    rows = np.array([table.row(i) for i in range(len(table))], np.int64)
    different = np.unique(rows)
    count = max(1, round(fraction * len(different)))
    if count >= len(different):
        raise DataError(
            f"data.eval: {fraction:.1%} cannot be held out of {counted(len(different), 'row')}", where="data.eval",
            why="none would be left to train on",
            fix="add rows, or set data.eval to a separate file",
        )  # fmt: skip
    shuffled = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(different)
    held = np.isin(rows, shuffled[:count])
    return table.select(np.flatnonzero(~held)), table.select(np.flatnonzero(held))
