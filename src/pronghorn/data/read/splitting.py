"""Training rows and held-out rows, apart: what a model is measured on must not be what it was trained on.

A fraction of the rows is held out by families (copies.py): copies and near copies go to one side. Rows without copies are held
out as they always were, the same for the same seed. A file of held-out rows is compared with the training rows; what stands in
both is told, dropped from training or refused, as `data.leaks` says. What `data.select` leaves out is taken from the training
rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pronghorn.data.encode.cached_rows import Progress, silent
from pronghorn.data.encode.tokens import TokenTable
from pronghorn.data.preference.pair_choices import unit_of
from pronghorn.data.prepare import Prepared, prepare
from pronghorn.data.read.copies import Families, Flags, Leaks, Longs, Side, families, leaks
from pronghorn.data.read.reading import Name, Stage
from pronghorn.data.read.selection import Selection, select
from pronghorn.errors import DataError, RecipeError, counted
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe_parts import Data, Parts

NAMED = 3  # leaks named in a message


@dataclass(frozen=True, slots=True)
class Apart:
    train: TokenTable
    held: TokenTable | None = None
    remarks: tuple[str, ...] = field(default=())
    selection: Selection | None = None
    leaked: tuple[int, int] = (0, 0)  # units dropped by `data.leaks`, and their tokens


def read_apart(
    recipe: Parts, tokenizer: Tokenizer, progress: Progress, stage: Stage
) -> tuple[Prepared, Prepared | None, Apart]:
    """The rows of data.train, those of data.eval if that is a file, and what to train and to evaluate on."""
    prepared, other = read_both(recipe, tokenizer, progress, stage)
    with stage("read"):
        sides = apart(prepared, other, recipe.data, recipe.train.seed, progress)
    if recipe.eval.stop and sides.held is None:
        raise RecipeError(
            what="eval.stop needs held-out data",
            why="early stopping compares evaluations",
            fix="set data.eval to a file, or to a fraction such as 0.02",
        )
    if not len(sides.train):
        raise DataError(what="no rows are left to train on", fix="run `pronghorn data stats` to see what was dropped and why")
    return prepared, other, sides


def read_both(recipe: Parts, tokenizer: Tokenizer, progress: Progress, stage: Stage) -> tuple[Prepared, Prepared | None]:
    """The rows of data.train, and those of data.eval if that is a file."""
    reads, capacity, answer = recipe.objective.kind.reads, recipe.train.capacity, recipe.answer_tokens

    def read(names: Sequence[Name]) -> Prepared:
        return prepare(
            names, recipe.data, tokenizer, progress=progress, stage=stage, wanted=reads, capacity=capacity, answer=answer
        )

    return read(recipe.data.train), read((recipe.data.eval,)) if isinstance(recipe.data.eval, str) else None


def apart(prepared: Prepared, held: Prepared | None, spec: Data, seed: int, progress: Progress = silent) -> Apart:
    """`held`: of the file in `data.eval`, if that is one. `data.select` comes before `data.leaks`: what it leaves out is no
    leak."""
    train, where, remarks = Side.of(prepared.tokens), str(spec.eval), list[str]()
    other = None if held is None else Side.of(held.tokens)
    between: Leaks | None = None
    if isinstance(spec.eval, float):
        where = "data.eval"
        train, other, between, remarks = hold_out(train, spec.eval, seed, prepared.rows.path, progress)
    chosen = None if spec.select is None else select(train.table, prepared.rows, spec.select, seed, progress)
    if chosen is not None and chosen.left_out:
        train = Side.of(chosen.train)
        between = between if between is not None and not len(between.held) else None
    if other is None:
        done = Apart(train.table)
    else:
        found = leaks(train, other, prepared.rows.path, progress) if between is None else between
        done = _policy(train, other, found, spec, where)
    told = chosen.remarks if chosen is not None else ()
    return replace(done, remarks=(*remarks, *done.remarks, *told), selection=chosen)


def hold_out(
    side: Side, fraction: float, seed: int, cache: Path, progress: Progress = silent
) -> tuple[Side, Side, Leaks, list[str]]:
    """Both sides, what stands in both, and remarks. The same rows for the same seed. Pieces of one split row, answers to one
    prompt and copies stay together."""
    unit, target = unit_of(side.table), max(1, round(fraction * len(side)))
    if target >= len(side):
        raise DataError(
            f"data.eval: {fraction:.1%} cannot be held out of {counted(len(side), unit)}", where="data.eval",
            why="none would be left to train on", fix="add rows, or set data.eval to a separate file",
        )  # fmt: skip
    order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(side))
    kin, remarks = families(side, cache, progress), []
    rule, held = "row", np.zeros(len(side), np.bool_)
    held[order[:target]] = True
    for name, family in (("copies", kin.exact), ("near copies", kin.near)):  # the stricter rule, if the fraction allows it
        together = _held(family, order, target)
        if target <= 2 * together.sum() and together.sum() <= max(2 * target, len(side) // 2):
            rule, held = name, together
    if rule != "near copies":
        remarks.append(_not_apart(side, kin, rule))
    if abs(int(held.sum()) - target) > 0.1 * target:
        remarks.append(f"held out {held.sum():,} of {counted(len(side), unit)} instead of {target:,}: copies stay together")
    both = np.intersect1d(kin.near[held], kin.near[~held])
    trained, measured = (Side.of(side.table.select(side.rows(chosen))) for chosen in (~held, held))
    return trained, measured, _between(kin, held, both), remarks


def _held(family: Longs, order: Longs, target: int) -> Flags:
    """Whole families in this order, each if it fits; one that does not, if that comes nearer to the target."""
    _, numbers, sizes = np.unique(family, return_inverse=True, return_counts=True)
    taken, room = np.zeros(len(sizes), np.bool_), target
    for number in dict.fromkeys(numbers[order].tolist()):
        if sizes[number] <= room:
            taken[number], room = True, room - int(sizes[number])
        if not room:
            break
    left = np.where(taken, len(family), sizes)
    least = int(left.argmin())
    if room and (room == target or left[least] < 2 * room) and left[least] - room + target < len(family):
        taken[least] = True
    return np.asarray(taken[numbers])


def _not_apart(side: Side, kin: Families, rule: str) -> str:
    what, unit = ("prompts", unit_of(side.table)) if side.table.pairs is not None else ("texts", "row")
    largest = int(np.unique(kin.near, return_counts=True)[1].max())
    only = "only equal ones stay together" if rule == "copies" else f"each {unit} is held out by itself"
    return (
        f"{largest:,} of {counted(len(side), unit)} have {what} that are near copies of one another, too many to keep on one "
        f"side: {only}"
    )


def _between(kin: Families, held: Flags, both: Longs) -> Leaks:
    """Where families could not be kept on one side. Units are counted on each side."""
    inside = np.isin(kin.near, both)
    at, ours = np.flatnonzero(inside & held), np.flatnonzero(inside & ~held)
    order = ours[np.argsort(kin.near[ours], kind="stable")]
    copy = order[np.searchsorted(kin.near[order], kin.near[at])] if len(at) else at
    place = np.where(held, np.cumsum(held), np.cumsum(~held)) - 1
    return Leaks(place[at], place[copy], np.isin(kin.exact[at], kin.exact[ours]), place[ours])


def _policy(train: Side, held: Side, found: Leaks, spec: Data, where: str) -> Apart:
    """What `data.leaks` says, done to what was found."""
    if not len(found.held):
        return Apart(train.table, held.table)
    unit, exact = unit_of(held.table), int(found.exact.sum())
    same = "prompt" if held.table.pairs is not None else "text"
    kinds = " and ".join(f"{count:,} {kind}" for count, kind in ((exact, "exact"), (len(found.held) - exact, "near")) if count)
    what = f"{len(found.held):,} of {counted(len(held), f'held-out {unit}')}: the training data has the same {same} ({kinds})"
    named = list(zip(found.held[:NAMED], found.copy[:NAMED], strict=True))
    rows = ", ".join(f"{held.where(int(a))} like {train.where(int(b))}" for a, b in named)
    rows += ", ..." * (len(found.held) > NAMED)
    if spec.leaks == "refuse":
        raise DataError(
            what, where=where, why=f"a loss on rows that were trained on is too low: {rows}",
            fix="remove them from one of the two, or set data.leaks: drop (from training) or warn",
        )  # fmt: skip
    if spec.leaks == "warn":
        told = f"{what}, so the held-out loss is too low: {rows}; data.leaks: drop removes them from training"
        return Apart(train.table, held.table, (told,))
    leaked = np.zeros(len(train), np.bool_)
    leaked[found.train] = True
    if leaked.all():
        raise DataError(
            "data.leaks: drop leaves no row to train on", where=where, why=f"all of them are also held out: {rows}",
            fix="set data.eval to other rows",
        )  # fmt: skip
    told = f"dropped {counted(int(leaked.sum()), unit)} of the training data, because the held-out data has them, too: {rows}"
    gone = train.rows(leaked)
    dropped = int(leaked.sum()), int(train.table.lengths[gone].sum(dtype=np.int64))
    return Apart(train.table.select(~gone), held.table, (told,), leaked=dropped)
