"""Why a training row may be worth less than its tokens cost. A reason is a row of `REASONS`.

A new one (by losses of rows, say) is a function from what is known of all rows to those that it names, a field of `Known` for
what it reads, and a row of the table. U = units: rows, or groups of preference rows, of the training data and of what is held
out of it (`Side`). The order decides by which reason a row is left out that has several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pronghorn.data.audit.leaked import HeldPrompts
from pronghorn.data.prepare import Findings
from pronghorn.data.read.copies import Families, Flags, Side


@dataclass(frozen=True, slots=True)
class Hit:
    """A row that a reason names."""

    note: str  # what was found
    beside: int | None = None  # the row that it was found by: a unit of `Known.side`, or of `Known.held`
    in_held: bool = False  # which of the two


@dataclass(frozen=True, slots=True)
class Known:
    side: Side  # all rows of data.train that could be trained on
    trained: Flags  # U: those that are not held out
    held: Side | None
    findings: Findings  # by rows of the table
    families: Families | None  # None: preference data, whose answers are alike
    prompts: HeldPrompts | None  # with all trained rows added, in order
    questions: Sequence[tuple[bytes, bytes]]  # digests of the prompt and of the answer of each trained row; b"": it has none


@dataclass(frozen=True, slots=True)
class Reason:
    name: str  # in select.json and in the log
    title: str
    why: str  # how such rows are found
    risk: str  # what leaving them out risks
    leaves_out: bool  # whether select.json names them; else they are for people
    find: Callable[[Known], dict[int, Hit]]  # by unit


def leaks(known: Known) -> dict[int, Hit]:
    if known.prompts is None:
        return {}
    units = np.flatnonzero(known.trained)
    whole = "a whole held-out prompt stands in it"
    return {
        int(units[row]): Hit(whole if share == 1 else f"{share:.0%} of a held-out prompt stands in it", held, in_held=True)
        for row, (held, share) in known.prompts.found().items()
    }


def copies(known: Known) -> dict[int, Hit]:
    """The first row of a copy may be one that is held out, or one that the recipe drops: then the row is named by itself."""
    unit = {int(number): unit for unit, number in enumerate(known.side.numbers)}
    exact = ((unit.get(row), unit.get(first)) for row, first in known.findings.exact.items())
    return {row: Hit("all of it is equal", first) for row, first in exact if row is not None and known.trained[row]}


def near_copies(known: Known) -> dict[int, Hit]:
    if known.families is None:
        return {}
    first, exact = known.families.dropped, copies(known)
    found = np.flatnonzero((first != np.arange(len(first))) & known.trained)
    return {int(row): Hit("its words are almost the same", int(first[row])) for row in found if int(row) not in exact}


def junk(known: Known) -> dict[int, Hit]:
    reasons = ((unit, known.findings.junk.get(int(number), "")) for unit, number in enumerate(known.side.numbers))
    return {unit: Hit(why) for unit, why in reasons if why and known.trained[unit]}


def contradictions(known: Known) -> dict[int, Hit]:
    """Each row beside the first of another answer."""
    answers: dict[bytes, dict[bytes, int]] = {}
    units = np.flatnonzero(known.trained).tolist()
    for unit, (prompt, answer) in zip(units, known.questions, strict=True):
        if prompt and answer:
            answers.setdefault(prompt, {}).setdefault(answer, unit)
    found = {}
    for unit, (prompt, answer) in zip(units, known.questions, strict=True):
        others = answers.get(prompt, {}) if answer else {}
        if len(others) > 1:
            other = next(first for said, first in others.items() if said != answer)
            found[unit] = Hit(f"one of {len(others):,} different answers", other)
    return found


REASONS = (
    Reason(
        "leak", "held-out prompts",
        "At least half of the 8 words in a row (13 in long texts) of a held-out row's prompt stand in this training row.",
        "Without them the held-out loss is higher, and true. A sentence that many tasks share may have been found.",
        True, leaks,
    ),
    Reason(
        "copy", "copies", "All that is said is equal to an earlier row.",
        "A copy is one more epoch of its row. Leave it where that is meant.", True, copies,
    ),
    Reason(
        "near copy", "near copies", "About 0.8 of the 3 words in a row are those of an earlier row that stays.",
        "Rows that differ in one name or number on purpose are near copies, too.", True, near_copies,
    ),
    Reason(
        "junk", "junk", "The answer is empty, equal to its prompt, or the same words over and over.",
        "Little: a model learns to end its turn at once, to echo or to repeat itself.", True, junk,
    ),
    Reason(
        "contradiction", "same prompt, different answers",
        "All that is said before the last answer is equal, the answer is not.",
        "One of them may be wrong, or all of them right: these rows are shown and never left out.", False, contradictions,
    ),
)  # fmt: skip
