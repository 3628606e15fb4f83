"""From the names in a recipe to rows ready for packing: read, tokenize once, clean, cut to length, count everything.

Tokenized rows come from the cache (cached_rows.py). What is dropped, cut or split is a view on that table, so changing
max_length or duplicates tokenizes nothing again.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pronghorn.data.encode.cached_rows import Progress, Rows, no_stage, silent, tokenized_rows
from pronghorn.data.encode.token_cache import kept
from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_choices import first_rows, in_units, too_long, truncated, unit_of, with_loss
from pronghorn.data.preference.pair_rows import CHOSEN, PairRows
from pronghorn.data.read import clean
from pronghorn.data.read.copies import Side, families
from pronghorn.data.read.formats import Example
from pronghorn.data.read.mixing import repeated
from pronghorn.data.read.reading import FIRST_BAD_ROWS, Name, SourceCount, Stage, bad_rows, told_of_columns
from pronghorn.data.read.source_files import BadRow, excerpt
from pronghorn.errors import DataError, counted
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe_objective import Rows as Wanted
from pronghorn.recipe_parts import Data, named

FINDINGS_VERSION = 3  # raise it when clean.py finds other things; for near copies, COPIES_VERSION
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
    left_out: Mapping[str, tuple[int, int]]  # rows and tokens of copies and junk that were dropped, by reason


@dataclass(frozen=True, slots=True)
class Findings:
    """Row numbers: copy -> first of its kind, junk -> why. `near` holds the exact ones too, None when not looked for."""

    exact: dict[int, int]
    junk: dict[int, str]
    near: dict[int, int] | None = None
    remark: str = ""  # what became of the file they are kept in, if there is something to tell


_Stored = tuple[dict[int, int], dict[int, str]]  # exact and junk, as they are kept


@dataclass(frozen=True, slots=True)
class Prepared:
    tokens: TokenTable
    counts: Counts
    rows: Rows  # all of them; what is found is kept beside their cached table
    remarks: tuple[str, ...] = field(default=())  # what the user should be told

    def example(self, i: int) -> Example:
        return example_of(self.tokens, i)


def example_of(table: TokenTable, i: int) -> Example:
    return Example.from_json(table.example_json(i), table.where(i))


def prepare(
    names: Sequence[Name],
    spec: Data,
    tokenizer: Tokenizer,
    *,
    progress: Progress = silent,
    stage: Stage = no_stage,
    wanted: Wanted = "documents",
    capacity: int | None = None,
    answer: int = 0,
) -> Prepared:
    """The rows to train (or evaluate) on. `tokenizer` may be a `TokenizerFiles`, loaded only when the cache misses. `wanted`:
    what the objective takes rows for; `capacity`: of a pack, which must hold a group of them. `answer`: tokens of
    data.max_length that prompts leave to the model's answer; rows with loss: 0."""
    rows = tokenized_rows(names, spec, tokenizer, progress=progress, stage=stage, wanted=wanted)
    found = None
    if spec.duplicates != "keep" or spec.junk != "keep":
        with stage("read"):
            found = findings(rows, near=spec.duplicates == "drop-near", progress=progress)
    prepared = choose(rows, spec, found, capacity=capacity, answer=answer)
    if not prepared.counts.kept:
        raise _nothing_left(names, prepared.counts, spec)
    return prepared


# Duplicates and junk ----------------------------------------------------------------------------------------------------


def findings(rows: Rows, near: bool, progress: Progress = silent) -> Findings:
    """Duplicates and junk among the rows; looked for once, then kept beside the cached table."""
    path = rows.path.with_suffix(f".findings{FINDINGS_VERSION}.json")
    known, wrong = kept(path, _Stored, lambda: _look(rows.table, progress), lambda found: _names_rows(found, len(rows.table)))
    remark = f"the list of duplicates and junk is damaged ({wrong}) and is created again: {path}" if wrong else ""
    if not near or rows.table.pairs is not None:  # answers that are compared are alike
        return Findings(*known, None, remark)
    first = families(Side.of(rows.table), rows.path, progress).dropped
    return Findings(*known, {int(i): int(first[i]) for i in np.flatnonzero(first != np.arange(len(first)))}, remark)


def _look(table: TokenTable, progress: Progress) -> _Stored:
    """A batch of rows at a time."""
    identities, reasons = bytearray(), dict[int, str]()
    for start in range(0, len(table), clean.BATCH):
        progress("duplicates and junk", start, len(table))
        batch = [Example.from_json(text, "") for text in table.examples_json(start, start + clean.BATCH)]
        for i, example in enumerate(batch, start=start):
            identities += clean.identity(example)
            if reason := clean.junk(example):
                reasons[i] = reason
    progress("duplicates and junk", len(table), len(table))
    if table.pairs is not None:
        return of_groups(table.pairs, identities, reasons)
    return clean.copies_of(identities), reasons


def identities_of_groups(pairs: PairRows, identities: bytearray) -> bytearray:
    """Equal where all answers are, in the same roles."""
    starts = pairs.starts
    rows = np.frombuffer(identities, np.uint8).reshape(-1, clean.IDENTITY)
    of_group = bytearray()
    for start, stop in itertools.pairwise(starts.tolist()):
        roles = pairs.roles[start:stop].tobytes()
        of_group += hashlib.blake2b(rows[start:stop].tobytes() + roles, digest_size=clean.IDENTITY).digest()
    return of_group


def of_groups(pairs: PairRows, identities: bytearray, junk: dict[int, str]) -> _Stored:
    """A group is a copy if all its answers are those of another, in the same roles; it is junk if its chosen answer is. All
    its rows are named."""
    starts, of_group = pairs.starts, identities_of_groups(pairs, identities)
    exact = {
        int(row): int(starts[first])
        for group, first in clean.copies_of(of_group).items()
        for row in range(starts[group], starts[group + 1])
    }
    groups = [(group, junk[int(start)]) for group, start in enumerate(starts[:-1]) if int(start) in junk]
    chosen = [(group, why) for group, why in groups if pairs.roles[starts[group]] == CHOSEN]
    return exact, {int(row): why for group, why in chosen for row in range(starts[group], starts[group + 1])}


def _names_rows(found: _Stored, count: int) -> bool:
    return all(0 <= row < count for part in found for row in part)


# Choosing ---------------------------------------------------------------------------------------------------------------


def choose(
    rows: Rows, spec: Data, found: Findings | None, *, strict: bool = True, capacity: int | None = None, answer: int = 0
) -> Prepared:
    """Apply what the recipe says to the rows, or to groups of them. Not `strict`: too many long rows are a remark, not an error
    (for stats)."""
    table, keep, unit = rows.table, np.ones(len(rows.table), np.bool_), unit_of(rows.table)
    firsts = first_rows(table)
    exact, near, junk, dropped = 0, 0, 0, dict[str, list[int]]()  # `dropped`: rows of the table, by reason
    if found is not None and spec.duplicates != "keep":
        copies = set(found.exact) | set(found.near or () if spec.duplicates == "drop-near" else ())
        keep[sorted(copies)] = False
        dropped["copies"], dropped["near copies"] = sorted(found.exact), sorted(copies - set(found.exact))
        exact = int(np.isin(firsts, list(found.exact)).sum())
        near = int((~keep[firsts]).sum()) - exact
    if found is not None and spec.junk == "drop":
        reasons = [i for i in found.junk if keep[i]]
        keep[reasons] = False
        dropped["junk"] = reasons
        junk = int(np.isin(firsts, reasons).sum())
    chosen, mixed = repeated(in_units(rows.sources, table), keep[firsts])
    table = table.select_units(chosen) if mixed or not keep.all() else table
    remarks = [*rows.remarks, *told_of_columns(rows.sources), *mixed, *([found.remark] if found and found.remark else [])]
    if rows.table.pairs is not None:
        nothing_learned = {"an empty answer": rows.empty, "identical answers": rows.identical}
        remarks += [f"left out {counted(count, unit)} with {what}" for what, count in nothing_learned.items() if count]
    elif rows.empty and spec.junk == "keep":
        drops = "data.junk: drop removes them" + ("" if spec.select is None else ", and so may data.select")
        remarks.append(f"{counted(rows.empty, 'row')} with an empty answer: only the end token carries loss; {drops}")
    if rows.lost:
        remarks.append(
            f"{counted(rows.lost, 'row')} whose content the chat template partly drops, trained without it (data.lost: allow)"
        )
    if rows.controls:
        fate = "kept as text" if spec.control_tokens == "escape" else "trained as control tokens (data.control_tokens: keep)"
        remarks.append(f"{counted(rows.controls, 'row')} with control tokens inside a message: {fate}")
    limit, units = spec.max_length - answer, len(first_rows(table))
    over = too_long(table, limit, capacity)
    affected = int(over.sum())
    if spec.long is None and affected > SILENT_SHARE * units:
        problem = _too_many_long(table, limit, affected, capacity, answer)
        if strict:
            raise problem
        remarks.append(f"{problem.what}; {problem.fix}")
    cut, dropped_long, shortened, split_into = _cut(table, over, limit, spec.long, capacity)
    learnt = np.ones(len(first_rows(cut)), np.bool_) if answer else with_loss(cut)
    no_loss = int((~learnt).sum())
    kept = cut.select_units(learnt) if no_loss else cut
    if dropped_long and strict:
        why = "the answer starts after" if spec.long == "truncate" else "longer than"
        remarks.append(f"dropped {dropped_long:,} of {counted(units, unit)}: {why} {limit:,} tokens")
    if no_loss and strict:
        remarks.append(
            f"dropped {no_loss:,} of {counted(len(learnt), unit)}{' and pieces' * (split_into > 0)}: no token carries loss"
        )
    remarks += [f"{counted(rows.bad, 'bad row')} written to {rows.bad_rows_file}"] if rows.bad else []
    counts = Counts(
        read=rows.read, bad=rows.bad, exact_duplicates=exact, near_duplicates=near, junk=junk,
        too_long=affected, dropped_long=dropped_long, truncated=shortened, split_into=split_into,
        no_loss=no_loss, kept=len(first_rows(kept)), tokens=int(kept.lengths.sum(dtype=np.int64)),
        loss_tokens=int(kept.loss_counts.sum(dtype=np.int64)), format=rows.format, sources=tuple(rows.sources),
        left_out=_left_out(rows.table, dropped),
    )  # fmt: skip
    if strict and not answer and spec.bad_rows == "stop" and counts.kept:
        _refuse_idle(table, limit, spec.long, capacity, rows.read)
    return Prepared(kept, counts, rows, tuple(remarks))


def _refuse_idle(table: TokenTable, limit: int, long: str | None, capacity: int | None, read: int) -> None:
    """A row (or group) without a token that carries loss is a bad row; a piece of a row that was split is none."""
    whole = with_loss(table)
    seen = with_loss(truncated(table, limit, capacity)) if long == "truncate" else whole
    idle = first_rows(table)[~seen]
    if not len(idle):
        return
    row, why, fix = int(idle[0]), "none of its tokens carries loss", "give it an answer that carries loss"
    if whole[~seen][0]:
        why = f"its answer begins after the first {limit:,} of {table.lengths[row]:,} tokens (data.long: truncate)"
        fix = "raise data.max_length"
    bad = [BadRow(table.where(i), f"the row trains nothing: {why}", excerpt(table.example_json(i)), fix)
           for i in idle[: 1 + FIRST_BAD_ROWS].tolist()]  # fmt: skip
    raise bad_rows(bad, len(idle), read, skipped="to leave such rows out")


def _left_out(table: TokenTable, dropped: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Rows (or groups) and tokens, each once however often its source repeats it. `dropped`: rows of the table, by reason."""
    firsts = first_rows(table)
    return {
        why: (int(np.isin(firsts, rows).sum()), int(table.lengths[np.asarray(rows)].sum(dtype=np.int64)))
        for why, rows in dropped.items()
        if rows
    }


def _cut(
    table: TokenTable, over: npt.NDArray[np.bool_], limit: int, long: str | None, capacity: int | None
) -> tuple[TokenTable, int, int, int]:
    """The table with no row (and no group) above the limit, and how many were dropped, truncated, and made by splitting."""
    if not over.any():
        return table, 0, 0, 0
    if long in {None, "drop"}:
        return table.select_units(np.flatnonzero(~over)), int(over.sum()), 0, 0
    if long == "truncate":
        cut = truncated(table, limit, capacity)
        lost = over & ~with_loss(cut) & with_loss(table)  # its answer began after the limit
        return cut.select_units(np.flatnonzero(~lost)), int(lost.sum()), int((over & ~lost).sum()), 0
    pieces = [(i, at, at + limit) for i, length in enumerate(table.lengths) for at in range(0, max(1, int(length)), limit)]
    return table.cut(pieces), 0, 0, len(pieces) - int((~over).sum())


def _too_many_long(table: TokenTable, limit: int, affected: int, capacity: int | None, answer: int = 0) -> DataError:
    longest = int(table.lengths.argmax())
    enough = int(np.quantile(table.lengths, 1 - SILENT_SHARE, method="higher"))
    units, unit = len(first_rows(table)), unit_of(table)
    have, ways = f"{'has' if affected == 1 else 'have'} more than {limit:,} tokens", "drop, truncate or split"
    if table.pairs is not None:
        packed = f", or with all answers together more than train.capacity: {capacity:,}" if capacity and unit == "pair" else ""
        have, ways = f"have a prompt and answer of more than {limit:,} tokens{packed}", "drop or truncate"
    if answer:
        have, ways = f"{have}, which is data.max_length less rollouts.max_new_tokens: {answer:,}", "drop"
    return DataError(
        f"{affected:,} of {counted(units, unit)} ({affected / units:.1%}) {have}", where="data.max_length",
        why=f"the longest has {table.lengths[longest]:,} tokens ({table.where(longest)}); dropping more than 1 % needs an "
            "explicit setting",
        fix=f"set data.long: {ways}, or data.max_length: {enough + answer} or more",
    )  # fmt: skip


def _nothing_left(names: Sequence[Name], counts: Counts, spec: Data) -> DataError:
    fates = {
        "too long": counts.dropped_long, "without a token that carries loss": counts.no_loss, "junk": counts.junk,
        "exact duplicates": counts.exact_duplicates, "near duplicates": counts.near_duplicates, "bad": counts.bad,
    }  # fmt: skip
    what, fix = "no row is left to train on", "inspect rows with `pronghorn data show`"
    why = ", ".join(f"{count:,} {fate}" for fate, count in fates.items() if count)
    if counts.dropped_long and spec.long == "truncate":
        what = f"no row has a token with loss within its first {spec.max_length:,} tokens"
        why, fix = "truncation removes all answers", "raise data.max_length, or set data.long: split"
    elif counts.dropped_long and counts.dropped_long + counts.no_loss >= counts.read - counts.bad - counts.junk:
        what = f"all rows are too long: none has {spec.max_length:,} tokens or fewer"
        why = f"dropped: {counted(counts.dropped_long, 'row')}"
        fix = "raise data.max_length, or set data.long: truncate or split"
    return DataError(what, where=", ".join(map(named, names)), why=why, fix=fix)
