"""The held-out questions of a run, answered at its evaluations: scores for its log, answers beside the base model's in a file.

The base model is the model with its adapter off, asked at the first evaluation. With `method: full` it is gone once training
has begun, so it is asked before the first step. Its answers are kept in the run's folder, and a resumed run finds them there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronghorn.evaluation.held_out import HeldOut, Judged, ModelAnswer, read_base, write_base
from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.model.causal_lm import without_adapters
from pronghorn.model.families import text_config
from pronghorn.report.answers import write_answers
from pronghorn.report.run_log import RunLog
from pronghorn.train.checkpoint.checkpoint import capture_rng, restore_rng
from pronghorn.train.run.evaluate import Evaluation, evaluate
from pronghorn.train.setup.setup import Session
from pronghorn.train.step.memory import evaluation_capacity


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """A user's own metric may draw some; those of the run stay where they are."""
    rng = capture_rng()
    yield
    restore_rng(rng)


DECIDING = "deciding"


def measure(session: Session, progress: Callable[[str, int, int], None]) -> Evaluation:
    """The held-out rows' loss under the weights as they are. On all ranks."""
    assert session.source.held_out is not None
    width = int(text_config(session.model.config).hidden_size) if session.device.type == "cuda" else 0
    return evaluate(
        session.model,
        session.source.held_out,
        capacity=evaluation_capacity(session.recipe, width),
        device=session.device,
        pad_id=session.source.pad_id,
        autocast=session.autocast,
        progress=progress,
        objective=session.objective,
        world=session.world,
        step=session.take_step,
    )


class RunAnswers:
    def __init__(
        self, session: Session, folder: Path, log: RunLog, own: OwnMetric | None, progress: Callable[[str, int, int], None]
    ) -> None:
        self._session, self._folder, self._log, self._progress = session, folder, log, progress
        with _random_numbers_kept():
            beside, spec = session.objective.scores, session.recipe.eval
            if session.recipe.rollouts is not None:  # rewards of answers that are cut where trained ones are not say nothing
                spec = spec.model_copy(update={"max_new_tokens": spec.max_new_tokens or session.recipe.answer_tokens})
            self._held_out = HeldOut.of(session.source.held_out, session.tokenizer, spec, own, beside)
        self._base: Judged | None = None
        self._told = False

    def measure(self) -> Evaluation:
        """The held-out rows' loss; or what their answers are worth, where the source says so. On all ranks."""
        session = self._session
        if session.source.evaluates:
            return session.source.evaluate(session.model)
        return measure(session, self._progress)

    def before_training(self) -> None:
        """Asks the base model now if training will overwrite it (method: full)."""
        if self._held_out.questions and self._session.recipe.method == "full" and self._session.step == 0:
            self._base = self._asked_of_base()

    def evaluate(self) -> dict[str, Any]:
        """What the event of an evaluation says of answers; `metrics` by name, where some are asked for."""
        session, questions = self._session, self._held_out.questions
        if not questions:
            return {"generations": []}
        base = self._base_answers()
        judged = self._judged(self._ask("answering"))
        rows = self._held_out.table(judged, base, session.step)
        if session.world.writes:
            write_answers(self._folder, rows)
        shown = [
            {key: row[key] for key in ("prompt", "answer", "expected", "base")}
            for row in rows[: session.recipe.eval.generations]
        ]
        if not self._held_out.measured:
            return {"generations": shown}
        measured = {"metrics": judged.metrics, "metric_errors": judged.errors, "samples": len(questions), "cut": judged.cut}
        return {"generations": shown, **measured, **self._deciding(judged)}

    def _deciding(self, judged: Judged) -> dict[str, Any]:
        """The score of each question by the metric that decides, for all ranks, and not for the log."""
        best = self._session.recipe.eval.best
        if best not in judged.metrics:
            return {}
        key = hashlib.sha256(f"{best} {self._held_out.key(self._session.recipe.model)}".encode()).hexdigest()[:12]
        return {DECIDING: {"key": key, "scores": [row[best] for row in judged.rows]}}

    def _ask(self, label: str) -> list[ModelAnswer]:
        with self._session.autocast():
            return self._held_out.ask(
                self._session.model,
                lambda _, done, total: self._progress(label, done, total),
                capture=self._session.recipe.train.graph != "off" and self._session.shards is None,
            )

    def _judged(self, answers: list[ModelAnswer]) -> Judged:
        with _random_numbers_kept():
            judged = self._held_out.judge(answers)
            numbers = [question.number for question in self._held_out.questions]
            worth = self._session.source.worth([(n, one.text) for n, one in zip(numbers, answers, strict=True)])
            for scores, rewards in zip(judged.rows, worth, strict=bool(worth)):
                scores.update(rewards)
        if judged.unscored:
            self._log.write("notice", text=judged.unscored)
        return judged

    def _base_answers(self) -> Judged | None:
        session = self._session
        if self._base is None and not self._told:
            stored = read_base(self._folder, self._held_out.key(session.recipe.model))
            if stored is not None:
                self._base = self._judged(stored)
            elif session.recipe.method != "full":
                with without_adapters(session.model):
                    self._base = self._asked_of_base()
            else:
                self._told = True
                self._log.write(
                    "notice",
                    text="the base model's answers are not shown: with method: full they are generated before "
                    "the first step, and this run started with different questions",
                )
        return self._base

    def _asked_of_base(self) -> Judged:
        judged = self._judged(self._ask("answers of the base model"))
        if self._session.world.writes:
            write_base(self._folder, self._held_out.key(self._session.recipe.model), judged.answers)
        if self._held_out.measured:
            self._log.write("base", metrics=judged.metrics, samples=len(judged.rows), cut=judged.cut)
        return judged
