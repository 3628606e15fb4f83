"""answers.jsonl of a run: what the model says to held-out rows, beside what was expected and what it said before training.

One JSON object a line: `row`, `prompt`, `expected`, `base` (before training), `answer` (at `step`), `scores` of the answer and
`base_scores` of the other, each a number by name. Any of them may be missing; a line that is none is overlooked.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pronghorn.errors import EnvironmentFault
from pronghorn.report.run_log import as_number, plain

FILE_NAME = "answers.jsonl"
MOST_LINES = 20_000  # read for the figures; the page shows fewer
LONGEST_LINE = 1 << 20


@dataclass(frozen=True, slots=True)
class AnswerRow:
    prompt: str
    expected: str
    base: str | None
    answer: str
    step: int | None
    scores: dict[str, float]
    base_scores: dict[str, float]


def write_answers(place: Path, answers: Sequence[dict[str, Any]]) -> Path:
    """Whole or not at all, into a run's folder or a file: each evaluation writes all of them anew."""
    path = place / FILE_NAME if place.is_dir() else place
    lines = [json.dumps(plain(one), ensure_ascii=False, allow_nan=False) + "\n" for one in answers]
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text("".join(lines), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        fix = "check free disk space and write permission of the folder, then run the same command again"
        raise EnvironmentFault.of(error, "cannot write the answers", path, fix) from error
    return path


def read_answers(folder: Path) -> list[AnswerRow]:
    path = folder / FILE_NAME
    if not path.is_file():
        return []
    found = []
    with path.open("rb") as file:
        for line in itertools.islice(iter(lambda: file.readline(LONGEST_LINE), b""), MOST_LINES):
            try:
                one = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(one, dict):
                found.append(_answer(one))
    return found


def mean_scores(answers: Sequence[AnswerRow]) -> dict[str, tuple[float | None, float]]:
    """By name: the mean before training, where every row has one, and after it."""
    names = dict.fromkeys(name for one in answers for name in one.scores)
    result: dict[str, tuple[float | None, float]] = {}
    for name in names:
        after = [one.scores[name] for one in answers if name in one.scores]
        before = [one.base_scores[name] for one in answers if name in one.base_scores]
        result[name] = (sum(before) / len(before) if len(before) == len(after) else None, sum(after) / len(after))
    return result


def _answer(one: dict[str, Any]) -> AnswerRow:
    step, base = one.get("step"), one.get("base")
    return AnswerRow(
        prompt=_text(one.get("prompt")), expected=_text(one.get("expected")),
        base=None if base is None else _text(base), answer=_text(one.get("answer")),
        step=step if isinstance(step, int) and 0 <= step < 2**63 else None,
        scores=_scores(one.get("scores")), base_scores=_scores(one.get("base_scores")),
    )  # fmt: skip


def _text(value: object) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _scores(value: object) -> dict[str, float]:
    pairs = value.items() if isinstance(value, dict) else ()
    numbers = {str(name): as_number(number) for name, number in pairs}
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
