"""Why a training row may be worth less than its tokens cost. A reason is a row of `REASONS`.

A new one (by losses of rows, say) is a function from what is known of all rows to those that it names, a field of `Known` for
what it reads, and a row of the table. U = units: rows, or groups of preference rows, of the training data and of what is held
out of it (`Side`). The order decides by which reason a row is left out that has several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pronghorn.data.audit.leaked import HeldPrompts
from pronghorn.data.audit.scores import RowScores
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
    scores: RowScores | None = None  # of the trained rows, in order; None: no model has seen them
    shares: Mapping[str, float] = field(default_factory=dict)  # of the rows, that --leave-out names by a reason


@dataclass(frozen=True, slots=True)
class Reason:
    name: str  # in select.json and in the log
    title: str
    why: str  # how such rows are found
    risk: str  # what leaving them out risks
    leaves_out: bool  # whether select.json names them; else they are for people
    find: Callable[[Known], dict[int, Hit]]  # by unit
    reads: str = ""  # what of the scores it needs

    def looks(self, known: Known) -> bool:
        """Whether there is something to look at."""
        return not self.reads or getattr(known.scores, self.reads, None) is not None


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


def off_task(known: Known) -> dict[int, Hit]:
    if known.scores is None or known.scores.alike_R is None:
        return {}
    alike, units = known.scores.alike_R, np.flatnonzero(known.trained)
    lowest = _lowest(alike, known.shares.get("off_task", SHOWN_OFF_TASK))
    middle = f"{np.nanmedian(alike):.3f}"
    return {int(units[row]): Hit(f"similarity {alike[row]:.3f}; of the row in the middle {middle}") for row in lowest}


def known_rows(known: Known) -> dict[int, Hit]:
    """A share that is to be left out is of all rows, and takes no row that is not known; every tenth of them stays."""
    if known.scores is None:
        return {}
    first, units = known.scores.first_R, np.flatnonzero(known.trained)
    share = known.shares.get("known")
    rows = np.flatnonzero(first <= KNOWN).tolist()
    if share is not None:
        rows = [row for row in _lowest(first, share) if first[row] <= KNOWN]
        rows = [row for number, row in enumerate(rows) if number % 10 != 9]
    return {int(units[row]): Hit(f"{first[row]:.0%} of the mean loss, when it was first seen") for row in rows}


def suspects(known: Known) -> dict[int, Hit]:
    if known.scores is None:
        return {}
    scores, units = known.scores, np.flatnonzero(known.trained)
    with np.errstate(invalid="ignore"):
        high = (scores.last_R >= SUSPECT) & ((scores.times_R < 2) | (scores.last_R >= scores.first_R))
    rows = sorted(np.flatnonzero(high).tolist(), key=lambda row: -scores.last_R[row])
    return {int(units[row]): Hit(f"{scores.last_R[row]:.1f} times the mean loss{_before(scores, row)}") for row in rows}


def _before(scores: RowScores, row: int) -> str:
    return f", {scores.first_R[row]:.1f} times when it was first seen" if scores.times_R[row] > 1 else ""


def _lowest(values: npt.NDArray[np.float64], share: float) -> list[int]:
    """The share of all rows with the lowest values, from the lowest; rows without one stay."""
    count = min(int(np.isfinite(values).sum()), round(share * len(values)))
    found: list[int] = np.argsort(values, kind="stable")[:count].tolist()
    return found


KNOWN, SUSPECT = 0.1, 2.0  # times the mean loss of all rows at the same time
SHOWN_OFF_TASK = 0.05  # of the rows

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
# Where a model has seen the rows. What --leave-out names is left out, too.
SCORED = (
    Reason(
        "off_task", "least like the held-out rows",
        "Of all rows, the states that the model's head reads are the least like those of the held-out rows (--score). Clean "
        "data has such rows, too.",
        "What the held-out rows do not ask for gets worse, and the held-out loss does not show it.", False, off_task, "alike_R",
    ),
    Reason(
        "known", "known rows", "The loss was under a tenth of the mean when a model first saw the row.",
        "Rows that a model can do hold its format; a tenth of them stays.", False, known_rows, "first_R",
    ),
    Reason(
        "suspect", "suspects", "The loss is twice the mean or more, and did not fall beside the others'.",
        "Wrong answers are often among them, and rare right ones: these rows are shown and never left out. One wrong number in "
        "a long answer hardly changes its mean.", False, suspects, "last_R",
    ),
)  # fmt: skip
