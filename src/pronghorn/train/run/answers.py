"""The held-out questions of a run, answered at its evaluations: scores for its log, answers beside the base model's in a file.

The base model is the model with its adapter off, asked at the first evaluation. With `method: full` it is gone once training
has begun, so it is asked before the first step. Its answers are kept in the run's folder, and a resumed run finds them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pronghorn.evaluation.held_out import HeldOut, Judged, ModelAnswer, read_base, write_base
from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.model.causal_lm import without_adapters
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


def measure(session: Session, progress: Callable[[str, int, int], None], *, by_row: bool) -> Evaluation:
    """The held-out rows' loss under the weights as they are. On all ranks."""
    assert session.source.held_out is not None
    return evaluate(
        session.model,
        session.source.held_out,
        capacity=evaluation_capacity(session.recipe),
        device=session.device,
        pad_id=session.source.pad_id,
        autocast=session.autocast,
        progress=progress,
        objective=session.objective,
        world=session.world,
        by_row=by_row,
    )


class RunAnswers:
    def __init__(
        self, session: Session, folder: Path, log: RunLog, own: OwnMetric | None, progress: Callable[[str, int, int], None]
    ) -> None:
        self._session, self._folder, self._log, self._progress = session, folder, log, progress
        with _random_numbers_kept():
            beside = session.objective.scores
            self._held_out = HeldOut.of(session.source.held_out, session.tokenizer, session.recipe.eval, own, beside)
        self._base: Judged | None = None
        self._told = False

    def measure(self) -> Evaluation:
        """The held-out rows' loss; or what their answers are worth, where the source says so. On all ranks."""
        session = self._session
        if session.source.evaluates:
            return session.source.evaluate(session.model)
        stop = session.recipe.eval.stop
        return measure(session, self._progress, by_row=stop is not None and stop.gain is not None)

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
        write_answers(self._folder, rows)
        shown = [
            {key: row[key] for key in ("prompt", "answer", "expected", "base")}
            for row in rows[: session.recipe.eval.generations]
        ]
        if not self._held_out.measured:
            return {"generations": shown}
        return {"generations": shown, "metrics": judged.metrics, "samples": len(questions), "cut": judged.cut}

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
        write_base(self._folder, self._held_out.key(self._session.recipe.model), judged.answers)
        if self._held_out.measured:
            self._log.write("base", metrics=judged.metrics, samples=len(judged.rows), cut=judged.cut)
        return judged
