"""Token rows of groups: the answers side by side, with how many tokens all of them begin with; a document is a row as it is.

Answers that are empty, and answers that are the same as the chosen one, teach nothing where answers are compared: they are left
out and counted, with their group where nothing is left to compare.

The shared tokens end where the first answer begins, which is a border of the chat template: up to there all texts are the same.
Where a token straddles that border in one of the answers, all of them are tokenized in parts, as they meet when a model is
asked. Where texts differ earlier than that (a template that writes earlier turns in another way, an answer of several turns
that begins with the user's), the shared tokens are those that are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pronghorn.data.encode.tokens import TokenRow
from pronghorn.data.preference.pair_rows import CHOSEN
from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.read import clean
from pronghorn.data.read.formats import Example
from pronghorn.data.read.source_files import BadRow, excerpt
from pronghorn.data.template.rendering import RowError

Made = TokenRow | RowError


def rows_of_groups(
    groups: Sequence[Group], made: Sequence[Sequence[Made]], encode_apart: Callable[[Example], Made]
) -> tuple[list[TokenRow], list[BadRow], dict[str, int]]:
    """Rows, bad rows, and how many groups had empty answers or identical ones. `made`: the answers of each group, encoded."""
    rows: list[TokenRow] = []
    bad: list[BadRow] = []
    told = {"empty": 0, "identical": 0}
    for group, encoded in zip(groups, made, strict=True):
        wrong = next((pair for pair in zip(group.answers, encoded, strict=True) if isinstance(pair[1], RowError)), None)
        if wrong is not None:
            bad.append(_bad_row(*wrong))  # type: ignore[arg-type]
            continue
        made_rows = [row for row in encoded if isinstance(row, TokenRow)]
        if not group.roles:
            rows += made_rows
            told["empty"] += not group.answers[0].asks and clean.says_nothing(group.answers[0])
            continue
        answers = list(zip(group.answers, group.roles, made_rows, strict=True))
        said = [answer for answer in answers if not clean.says_nothing(answer[0])]
        told["empty"] += len(said) < len(answers)
        different = [answer for i, answer in enumerate(said) if i == 0 or answer[2].ids.tolist() != said[0][2].ids.tolist()]
        told["identical"] += len(different) < len(said)
        paired = len(group.answers) > 1
        if len(different) > (1 if paired else 0) and (not paired or different[0][1] == CHOSEN):
            rows += _group(group, different, encode_apart)
    return rows, bad, told


def _bad_row(example: Example, error: RowError) -> BadRow:
    why = error.what if not error.why else f"{error.what}; {error.why}"
    return BadRow(example.where, why, excerpt(example.to_json()), error.fix)


def _group(
    group: Group, answers: Sequence[tuple[Example, int, TokenRow]], encode_apart: Callable[[Example], Made]
) -> list[TokenRow]:
    rows = [row for _, _, row in answers]
    shared, border = _shared(rows)
    if shared < border:
        again = [encode_apart(example) for example, _, _ in answers]
        apart = [row for row in again if isinstance(row, TokenRow)]
        if len(apart) == len(rows) and (found := _shared(apart)) and found[0] == found[1]:
            rows, shared = apart, found[0]
    return [
        replace(row, pair=(i == 0, role, shared, group.margin))
        for i, (row, (_, role, _)) in enumerate(zip(rows, answers, strict=True))
    ]


def _shared(rows: Sequence[TokenRow]) -> tuple[int, int]:
    """How many tokens all rows begin with, none of which carries loss; and where the first of their answers begins."""
    border = min(row.runs[0][0] if row.runs else len(row.ids) for row in rows)
    first = rows[0].ids[:border]
    same = (
        np.logical_and.reduce([row.ids[:border] == first for row in rows[1:]]) if len(rows) > 1 else np.ones(border, np.bool_)
    )
    return (border if same.all() else int(np.argmin(same))), border
