"""`data.select`: training rows that are left out: those that a file of `pronghorn data audit` names, or a random share.

Rows are left out after the held-out rows are taken away, which stay the same whatever is selected: losses of runs with and
without a selection can be compared. A row's key is a digest of its content, so a file holds for the same rows in another order
or another place. Of rows with equal content, the second has `+2` behind it. A random share is a function of train.seed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from pronghorn.data.encode.cached_rows import Progress, Rows, silent
from pronghorn.data.encode.token_cache import kept
from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_choices import first_rows, unit_of
from pronghorn.data.prepare import identities_of_groups
from pronghorn.data.read import clean
from pronghorn.data.read.copies import Flags, Side
from pronghorn.data.read.formats import Example
from pronghorn.digests import LARGEST_SEALED
from pronghorn.errors import DataError, counted
from pronghorn.recipe_parts import Share
from pronghorn.small_files import read_small

KEYS_VERSION = 1  # raise it when the same row has another key
OF_SELECTION = 2**63  # apart from the random numbers of epochs and of held-out rows, which have small ones
AGAIN = "write it again: pronghorn data audit"


@dataclass(frozen=True, slots=True)
class LeftOut:
    key: str
    reason: str
    row: str  # file and line, for people


@dataclass(frozen=True, slots=True)
class _File:
    version: Literal[1]
    left_out: list[LeftOut]
    scored_seconds: float = 0.0  # that choosing them took on the model


@dataclass(frozen=True, slots=True)
class Selection:
    """What `data.select` did."""

    train: TokenTable
    left_out: Mapping[str, tuple[int, int]]  # rows that are not trained on, and their tokens, by reason
    remarks: tuple[str, ...]
    file: str = ""
    digest: str = ""  # SHA-256 of the file
    scored_seconds: float = 0.0

    @property
    def key(self) -> dict[str, str]:
        """By which a resumed run recognizes the file."""
        return {"select": self.digest} if self.digest else {}

    def as_dict(self) -> dict[str, Any]:
        """For the log."""
        return {"file": self.file, "sha256": self.digest, "left_out": {why: rows for why, (rows, _) in self.left_out.items()},
                **({"scored_seconds": self.scored_seconds} if self.scored_seconds else {})}  # fmt: skip


def keys_of(rows: Rows, progress: Progress = silent) -> list[str]:
    """A key for each row (preference data: each group), in order; kept beside the cached table."""

    def look() -> list[str]:
        table, identities = rows.table, bytearray()
        for start in range(0, len(table), clean.BATCH):
            progress("reading rows", start, len(table))
            for text in table.examples_json(start, start + clean.BATCH):
                identities += clean.identity(Example.from_json(text, ""))
        progress("reading rows", len(table), len(table))
        if table.pairs is not None:
            identities = identities_of_groups(table.pairs, identities)
        size, seen, keys = clean.IDENTITY, Counter[str](), list[str]()
        for start in range(0, len(identities), size):
            key = identities[start : start + size].hex()
            seen[key] += 1
            keys.append(key if seen[key] == 1 else f"{key}+{seen[key]}")
        return keys

    count = len(first_rows(rows.table))
    path = rows.path.with_suffix(f".keys{KEYS_VERSION}.json")
    return kept(path, list[str], look, lambda keys: len(keys) == count)[0]


def selection_text(rows: Sequence[LeftOut], scored_seconds: float = 0.0) -> str:
    """The content of a file: a row on each line, so that people can remove one."""
    lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in rows)
    scored = f'"scored_seconds": {scored_seconds:.3f}, ' if scored_seconds else ""
    return f'{{"version": 1, {scored}"left_out": [\n{lines}\n]}}\n'


def select(train: TokenTable, rows: Rows, what: str | Share, seed: int, progress: Progress = silent) -> Selection:
    """`train`: without the rows that are held out; `rows`: all that were read."""
    side = Side.of(train)
    reasons, remarks, file = _random(side, what, seed) if isinstance(what, Share) else _named(side, rows, what, progress)
    leaves = np.array([bool(reason) for reason in reasons], np.bool_)
    if leaves.all():
        raise DataError("data.select leaves no row to train on", where="data.select", fix="select fewer rows, or none")
    counts, unit = Counter(reason for reason in reasons if reason), unit_of(train)
    told = [
        f"left out {counted(count, unit)}: {reason} ({file.get('file', 'data.select')})" for reason, count in counts.items()
    ]
    if not counts:
        told = [f"data.select ({file.get('file', 'random')}) changes nothing: it leaves out none of {counted(len(side), unit)}"]
    tokens = np.bincount(np.searchsorted(side.numbers, side.units), weights=train.lengths, minlength=len(side))
    left_out = {
        why: (count, int(sum(tokens[unit] for unit, reason in enumerate(reasons) if reason == why)))
        for why, count in counts.items()
    }
    return Selection(_without(side, leaves), left_out, (*told, *remarks), **file)


def _without(side: Side, leaves: Flags) -> TokenTable:
    table = side.table
    rows = ~side.rows(leaves)
    return table.select_units(rows[first_rows(table)]) if leaves.any() else table


def _random(side: Side, share: Share, seed: int) -> tuple[list[str], list[str], dict[str, Any]]:
    stays = max(1, round(share.random * len(side)))
    order = np.random.Generator(np.random.Philox(key=[seed, OF_SELECTION])).permutation(len(side))
    reasons = [f"not in the random {share.random:.4g} of all rows"] * len(side)
    for unit in order[:stays].tolist():
        reasons[unit] = ""
    return reasons, [], {}


def _named(side: Side, rows: Rows, name: str, progress: Progress) -> tuple[list[str], list[str], dict[str, Any]]:
    content = _read(name)
    try:
        whole = TypeAdapter(_File).validate_json(content, strict=True)
        named = whole.left_out
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            "this is not a selection of rows", where=name, why=f"{place}: {first['msg']}" if place else first["msg"], fix=AGAIN
        ) from error
    reasons, keys = {row.key: row.reason or "named" for row in named}, keys_of(rows, progress)
    missing = len(reasons.keys() - set(keys))
    if reasons and missing == len(reasons):
        raise DataError(
            "data.select belongs to other data",
            where=name,
            why=f"none of its {counted(missing, 'row')} is in data.train",
            fix=AGAIN,
        )
    number = {int(row): key for row, key in zip(first_rows(rows.table), keys, strict=True)}
    remarks = [f"{counted(missing, 'row')} of {name} {'is' if missing == 1 else 'are'} not in data.train"] if missing else []
    found = [reasons.get(number[int(row)], "") for row in side.numbers]
    digest = hashlib.sha256(content).hexdigest()
    return found, remarks, {"file": name, "digest": digest, "scored_seconds": whole.scored_seconds}


def _read(name: str) -> bytes:
    try:
        return read_small(Path(name), LARGEST_SEALED)
    except OSError as error:
        raise DataError.of(error, "cannot read the selection", name, "correct data.select, or " + AGAIN) from error
