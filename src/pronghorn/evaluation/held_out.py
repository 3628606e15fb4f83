"""Held-out questions, asked of a model as often as one likes: its answers, and what they score."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.errors import CommandError, DataError, EnvironmentFault, RecipeError, counted
from pronghorn.evaluation import strict_json
from pronghorn.evaluation.choices import ask_choices
from pronghorn.evaluation.metrics import NEED_JSON, SLOW, Scores, final_part, found, judge_of
from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.evaluation.questions import Question, held_out_questions
from pronghorn.generation.answering import answers
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.recipe_parts import Eval, figures_of
from pronghorn.small_files import read_small

SHORT_ANSWER = 64  # tokens of an answer that only people read: enough to see what the model does, and nobody waits for it
CHOICE = "multiple_choice"
MORE_TOKENS = 16  # than the longest expected answer, so that one that goes on is seen to
BASE_ANSWERS = "base_answers.json"  # in a run's folder

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """What a model makes of one question."""

    text: str
    cut: bool = False  # at the most tokens that it may have
    chosen: Scores = field(default_factory=dict)  # of multiple choice


@dataclass(frozen=True, slots=True)
class Judged:
    answers: Sequence[ModelAnswer]
    metrics: Scores  # the mean of each; nan where a row has no score
    rows: list[Scores]
    cut: int  # answers that did not end
    unscored: str = ""  # why a metric has no mean

    @property
    def errors(self) -> Scores:
        """The standard error of each mean."""
        count = len(self.rows)
        spread = {name: sum((row[name] - mean) ** 2 for row in self.rows) for name, mean in self.metrics.items()}
        return {name: math.sqrt(sum_ / (count * (count - 1))) for name, sum_ in spread.items()} if count > 1 else {}


class HeldOut:
    """The questions of a run and their judges. There are none where nothing is to be answered."""

    def __init__(
        self,
        questions: Sequence[Question],
        spec: Eval,
        tokenizer: Tokenizer,
        own: OwnMetric | None = None,
        beside: Sequence[str] = (),
    ) -> None:
        """`beside`: what the objective measures itself, and eval.best may name."""
        self.questions, self.spec, self.tokenizer, self.own = list(questions), spec, tokenizer, own
        self.measured = bool(spec.metrics) or own is not None
        longest = max((question.answer_tokens for question in questions), default=0)
        self.max_new_tokens = spec.max_new_tokens or (longest + MORE_TOKENS if self.measured else SHORT_ANSWER)
        self._says = any(name != CHOICE for name in spec.metrics) or own is not None or not self.measured
        self._judge = judge_of(spec.metrics, spec.regex)
        _require_expected(self.questions, spec)
        if own is not None and self.questions:
            own.try_on(self.questions[0].prompt, self.questions[0].expected)
        _require_best(spec, own, beside)

    @classmethod
    def of(
        cls,
        table: TokenTable | None,
        tokenizer: Tokenizer,
        spec: Eval,
        own: OwnMetric | None = None,
        beside: Sequence[str] = (),
    ) -> HeldOut:
        measured = bool(spec.metrics) or own is not None
        count = max(spec.generations, spec.samples if measured else 0)
        questions = held_out_questions(table, tokenizer, count, system=spec.system) if table is not None and count else []
        if measured and not questions:
            plain = "metrics compare answers to questions, and plain text contains none"
            raise DataError(
                "no held-out row contains a question",
                where="data.eval",
                why="the run has no held-out data" if table is None else plain,
                fix="remove eval.metrics, or hold out conversations or prompts with data.eval",
            )
        return cls(questions, spec, tokenizer, own, beside)

    def ask(self, model: HFModel, progress: Progress | None = None, *, capture: bool = True) -> list[ModelAnswer]:
        """Greedily, many at a time; multiple choice without a word, where nothing else is asked for. `capture`: on a GPU, out
        of CUDA graphs."""
        chosen = None
        if CHOICE in self.spec.metrics:
            chosen = ask_choices(model, self.tokenizer, self.questions, progress)
            if not self._says:
                return [ModelAnswer(text, chosen=scores) for text, scores in chosen]
        prompts = [question.ids for question in self.questions]
        said = answers(model, self.tokenizer, prompts, max_new_tokens=self.max_new_tokens, progress=progress, capture=capture)
        return [ModelAnswer(one.text, one.cut, chosen[i][1] if chosen else {}) for i, one in enumerate(said)]

    def judge(self, answers: Sequence[ModelAnswer]) -> Judged:
        rows: list[Scores] = []
        failed: list[str] = []
        for question, answer in zip(self.questions, answers, strict=True):
            scores = self._judge(question.prompt, question.expected, answer.text) | answer.chosen
            failed += [f"{question.where}: {name}: {SLOW}" for name, score in scores.items() if math.isnan(score)]
            if self.own is not None:
                try:
                    own = self.own(question.prompt, question.expected, answer.text)
                except CommandError as error:
                    failed.append(f"{question.where}: {error.what}" + (f" ({error.why})" if error.why else ""))
                    own = {}
                scores |= {name: own.get(name, math.nan) for name in self.own.names}
            rows.append(scores)
        told = f"{counted(len(failed), 'answer')} without a score, so the mean is undefined"
        unscored = f"{told}; {failed[0]}" if failed else ""
        means = {name: sum(row[name] for row in rows) / len(rows) for name in (rows[0] if rows else ())}
        return Judged(answers, means, rows, sum(answer.cut for answer in answers), unscored)

    def table(self, judged: Judged, base: Judged | None, step: int) -> list[dict[str, Any]]:
        """A line a question: the answer beside the base model's and the expected one."""
        rows = []
        for i, question in enumerate(self.questions):
            before = {} if base is None else {"base": base.answers[i].text, "base_scores": base.rows[i]}
            asked = {"row": question.where, "prompt": question.prompt, "expected": question.expected, "base": None}
            rows.append({**asked, **before, "answer": judged.answers[i].text, "scores": judged.rows[i], "step": step})
        return rows

    def key(self, model: str) -> str:
        """All that decides what this model answers."""
        choices = [question.choices for question in self.questions] if CHOICE in self.spec.metrics else None
        asked = [model, self.max_new_tokens, [question.ids for question in self.questions], choices, self._says]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _require_expected(questions: Sequence[Question], spec: Eval) -> None:
    """A metric that could never be met is refused, not counted as 0."""
    pattern = re.compile(spec.regex) if spec.regex else None
    needs = [name for name in spec.metrics if name in NEED_JSON]
    for question in questions:
        expected, what, fix = final_part(question.expected), "", ""
        why = f"it is {expected[:80]!r}"
        if CHOICE in spec.metrics and (wrong := _wrong_choices(question)):
            what, why, fix = wrong
        elif needs and not strict_json.is_json(expected):
            what = f"eval.metrics: {needs[0]}: the expected answer is not JSON"
            fix = "remove the metric, or fix the row"
        elif pattern is not None and pattern.groups and found(pattern, expected) is None:
            what, fix = "eval.regex: the pattern does not match the expected answer", "fix the pattern or the row"
        if what:
            raise DataError(what, where=question.where, why=why, fix=fix)


def _wrong_choices(question: Question) -> tuple[str, str, str] | None:
    """What, why and fix, where the right one is not one of several different choices."""
    choices = [choice.strip() for choice in question.choices]
    if not choices:
        why = "the row needs a column `choices` with a list of two or more texts"
        return f"eval.metrics: {CHOICE}: the row has no choices", why, "add the column, or set its name in data.fields.choices"
    if len(set(choices)) < len(choices) or question.expected.strip() not in choices:
        why = f"it is {question.expected[:80]!r}, the choices are {', '.join(map(repr, choices))[:200]}"
        what = f"eval.metrics: {CHOICE}: the expected answer is not one of the choices"
        return what, why, "make the expected answer equal one choice, and list each choice once"
    return None


def _require_best(spec: Eval, own: OwnMetric | None, beside: Sequence[str]) -> None:
    loss = () if "reward" in beside else ("loss",)  # of what the model learns from rewards, it says nothing
    known = [*loss, *beside, *figures_of(spec.metrics), *(own.names if own else ())]
    if spec.best not in known:
        why = f"available metrics: {', '.join(known)}"
        fix = f"use one of these, or add your own metric: --metric-file FILE (such as {spec.best}.py)"
        raise RecipeError(what=f"eval.best: {spec.best} is not measured", why=why, fix=fix)


# Files of a run -----------------------------------------------------------------------------------------------------------


def write_base(folder: Path, key: str, answers: Sequence[ModelAnswer]) -> None:
    """Whole or not at all."""
    path, beside = folder / BASE_ANSWERS, folder / f".{BASE_ANSWERS}.tmp"
    try:
        beside.write_text(json.dumps({"key": key, "answers": [asdict(answer) for answer in answers]}), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        fix = "free some disk space, or fix the reported system error; then run the same command again"
        raise EnvironmentFault.of(error, "cannot write the base model's answers", path, fix) from error


def read_base(folder: Path, key: str) -> list[ModelAnswer] | None:
    """Nothing where there is no such file, or one of other questions, or a damaged one: they are asked again then."""
    try:
        stored = json.loads(read_small(folder / BASE_ANSWERS))
        if stored["key"] != key:
            return None
        return [
            ModelAnswer(str(one["text"]), bool(one["cut"]), {str(k): float(v) for k, v in one["chosen"].items()})
            for one in stored["answers"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
