"""A run's looks at its held-out rows: losses and answers, what a stop rule needs of them, and the mean of the last weights."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from pronghorn.report.run_log import RunLog
from pronghorn.report.stages import Stages
from pronghorn.train.run.answers import DECIDING, RunAnswers
from pronghorn.train.run.average import put
from pronghorn.train.run.evaluate import Evaluation, QuestionScores
from pronghorn.train.setup.setup import Session


class Looks:
    def __init__(self, session: Session, log: RunLog, stages: Stages, answers: RunAnswers) -> None:
        self.session, self.log, self.stages, self._answers = session, log, stages, answers
        self._began = 0.0

    def look(self) -> None:
        self._last = self._measured()
        self._tell(self._last)

    def before_training(self) -> None:
        """What answers score before the first step, where the source measures that."""
        source = self.session.source
        if source.evaluates and source.held_out is not None and not self.session.step:
            with self.stages("evaluate"):
                found = self._answers.measure()
            self.log.write("base", metrics=found.figures, samples=found.samples)

    def at_the_mean(self) -> None:
        """The mean of the last weights beside the last ones, on the held-out rows: the better one stays in the model."""
        session, last = self.session, self._last
        assert session.source.held_out is not None
        with self.stages("average"):
            before = session.average.put_in(session.model)
        mean = self._measured()
        facts = session.average.decided(session.step, mean, last, session.source.held_out.loss_counts)
        self.log.write("average", step=session.step, **facts)
        if session.average.kept:
            self._tell(mean)
        else:
            put(session.model, before)

    def _measured(self) -> Evaluation:
        self._began = time.perf_counter()
        with self.stages("evaluate"):
            return self._answers.measure()

    def _tell(self, result: Evaluation) -> None:
        """With answers, and what the progress of the run is by now."""
        session, recipe = self.session, self.session.recipe
        with self.stages("answers"):
            answered = session.on_writer(self._answers.evaluate)
        deciding = answered.pop(DECIDING, None)
        if result.figures:
            answered = answered | {"metrics": result.figures | answered.get("metrics", {})}
        value = result.loss if recipe.eval.best == "loss" else answered["metrics"][recipe.eval.best]
        scores = deciding and QuestionScores(deciding["key"], np.array(deciding["scores"]))
        against = session.progress.against(scores) if scores else None
        session.progress = session.progress.after(value, session.step, recipe.eval.stop, scores)
        answered = answered | ({"paired": against._asdict()} if against else {}) | self._compare_rows(result)
        self.log.write(
            "eval",
            step=session.step,
            **({} if session.source.evaluates else {"loss": result.loss, "tokens": result.tokens}),
            **({} if result.error is None else {"loss_error": result.error}),
            **({} if result.figures else {"perplexity": result.perplexity}),
            seconds=time.perf_counter() - self._began,
            best=session.progress.best_step == session.step,
            **answered,
        )

    def _compare_rows(self, result: Evaluation) -> dict[str, Any]:
        """For eval.stop.gain, where the rate is constant; and what the event of the evaluation says of it."""
        session, stop, train = self.session, self.session.recipe.eval.stop, self.session.recipe.train
        constant = train.constant(session.source.total)
        if (
            stop is None
            or stop.gain is None
            or result.losses_R is None
            or session.step not in constant
            or session.progress.decay_from is not None
        ):
            return {}
        assert session.source.held_out is not None
        counts_R, tokens = session.source.held_out.loss_counts, session.seen_tokens
        end = tokens * constant.stop / session.step
        session.progress, said = session.progress.compared(result.losses_R, counts_R, tokens, end, stop)
        return {"paired": said} if said else {}
