"""The run: step after step, with evaluation, checkpoints, signals and the log around it.

Nothing here knows how a step is computed, how data is read or how anything is shown.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, Protocol

import torch

from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import EnvironmentFault, HealthStop, Interrupted, PronghornError
from pronghorn.evaluation.own_metric import OwnMetric
from pronghorn.recipe_parts import steps_between
from pronghorn.report.display import SAVING
from pronghorn.report.live import LiveReport
from pronghorn.report.run_log import RunLog
from pronghorn.report.stages import Stages
from pronghorn.train.checkpoint.checkpoint import capture_rng, restore_rng
from pronghorn.train.checkpoint.sharded_saving import saver_of
from pronghorn.train.run.answers import RunAnswers
from pronghorn.train.run.looks import Looks
from pronghorn.train.run.row_losses import RowLosses
from pronghorn.train.run.run_events import foretold, log_end, log_experts, log_start, log_step
from pronghorn.train.run.signals import StopRequest
from pronghorn.train.setup.setup import Session
from pronghorn.train.step.health import BrokenWeights, Offenders, listed, offending_rows, require_sound
from pronghorn.train.step.memory import COMPARED_AFTER, WARM_UP, main_memory, out_of_memory
from pronghorn.train.step.optim import lr_scale, set_lr
from pronghorn.train.step.spikes import GaveUp, LeftOut, Rewind
from pronghorn.train.step.step import StepResult

FIRST_STEP = "first step"  # a progress of its own


class Display(Protocol):
    """What the run is shown on (report/display.py has one for terminals, one for pipes, one for machines)."""

    def handle(self, event: dict[str, Any]) -> None: ...
    def progress(self, label: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class RunResult:
    folder: Path
    checkpoint: Path | None
    reason: str  # done | early stop | paused
    why: str
    step: int
    best_step: int | None


@dataclass(frozen=True)
class _UnderWay:
    """A step that was begun and whose numbers were not read yet."""

    step_batch: StepBatch
    lr: float
    rng: dict[str, Any]  # before it began
    limit: float  # of its loss


@dataclass
class Pause:
    """Where a run ends before its last step, for a sweep to look at it. The same run goes on from there."""

    share: float = 1.0  # of all steps
    evaluates: bool = True  # by eval.every
    why: str = ""  # set while it runs: it ends after the steps that are under way


class Run:
    def __init__(
        self,
        session: Session,
        folder: Path,
        log: RunLog,
        stages: Stages,
        display: Display,
        own: OwnMetric | None = None,
        pause: Pause | None = None,
    ) -> None:
        self._pause_at = pause or Pause()
        self.session, self.folder, self.log, self.stages, self.display = session, folder, log, stages, display
        self._under_way: deque[_UnderWay] = deque()
        self._mark = 0.0  # when the last step ended
        self._looked = time.perf_counter()  # at how long ranks waited
        self._saver = saver_of(session, folder, log, stages)
        self._left_out = LeftOut.of(folder)
        known = session.source.known
        self._rows = RowLosses(folder, session.world, known[0] if known else None, session.step)
        self._page = LiveReport(folder, writes=session.world.writes)
        self._answers = RunAnswers(session, folder, log, own, display.progress)
        self._looks = Looks(session, log, stages, self._answers)
        self._seconds: list[float] = []  # of the first steps under the plan
        self._eval_every = steps_between(session.recipe.eval.every, session.source.total)
        self._save_every = steps_between(session.recipe.checkpoint.every, session.source.total)

    def go(self, stop: StopRequest) -> RunResult:
        log_start(self.session, self.folder, self.log)
        self._tell()
        self._log_plan()
        self._refresh_page(news=True)
        with self._saver, self._logged_end() as end, main_memory(self.session.recipe, self._doing):
            with self.stages("answers"):
                self.session.on_writer(self._answers.before_training)
            self._looks.before_training()
            if signal_number := self.session.world.largest(stop.signal_number or 0):
                self._leave_for(signal_number)
            reason, why = self._steps(stop)
            self._save_what_is_not_saved()
            if worst := self.session.world.on_writer(lambda: self._rows.worst(self.session.tokenizer)):
                self.log.write("rows", worst=worst)
            end.update(reason=reason, why=why)
        return RunResult(self.folder, self._saver.checkpoint, reason, why, self.session.step, self.session.progress.best_step)

    @property
    def _end(self) -> int:
        """The step after which this start of the run ends."""
        return min(self.session.total, math.ceil(round(self._pause_at.share * self.session.source.total, 6)))

    def _steps(self, stop: StopRequest) -> tuple[str, str]:
        """Steps are begun ahead of being read (`Step.depth`); where the run looks at itself, all of them are finished first."""
        session, source = self.session, self.session.source
        verdict = self._verdict()
        if session.step < session.total and not verdict:
            self.display.progress(FIRST_STEP, 0, 0)  # on a GPU kernels are compiled in it, 12 s on a new machine; until it ends
        self._mark = time.perf_counter()
        while session.step < self._end and not verdict and not self._pause_at.why:
            if not source.ahead:
                self._finish_all()
            with self.stages(source.stage):
                step_batch = source.next(session.model)
            if step_batch.after in self._left_out.steps:
                self._pass_over(step_batch, "skipped because of an earlier loss spike")
            elif not step_batch.batches:
                self._pass_over(step_batch, "no answer to a prompt is better than another, so there is no update")
            else:
                self._begin(step_batch)
            begun = self._begun_and_averaged()
            last, pauses = begun == session.total, begun == self._end
            evaluates = source.held_out is not None and (last or (self._pause_at.evaluates and begun % self._eval_every == 0))
            saves = self._saves_at(begun)
            if evaluates or pauses or (saves and (self._saver.waits or not self._under_way)):
                verdict = self._pause(evaluates, pauses)
            else:
                if saves:
                    self._saver.snapshot([step.step_batch for step in self._under_way])
                if len(self._under_way) > session.take_step.depth:
                    self._finish()
            signal_number = session.world.largest(stop.signal_number or 0)  # one rank's is everybody's
            if signal_number and not last:
                self._leave_for(signal_number)
        self._finish_all()
        return self._ended(verdict)

    def _ended(self, verdict: str) -> tuple[str, str]:
        """(reason, why)"""
        session, progress = self.session, self.session.progress
        if session.step < session.total and not verdict:
            return "paused", self._pause_at.why
        if session.total < session.source.total:
            verdict = f"{progress.why}; decayed from step {progress.decay_from} on"
        return ("early stop", verdict) if verdict else ("done", "")

    def _verdict(self) -> str:
        """Why the run ends now, or nothing. Where the rate is constant and a decay is to come, the decay begins instead."""
        session, train = self.session, self.session.recipe.train
        verdict, decays = session.progress.verdict(session.recipe.eval.stop), train.decays(session.source.total)
        if train.schedule != "wsd":
            return verdict
        if verdict and session.progress.decay_from is None and session.step < decays.start:
            session.progress = replace(session.progress, decay_from=session.step, why=verdict)
            text = f"step {session.step}: {verdict}; the decay begins, and the run ends after step {session.total}"
            self.log.write("decay", step=session.step, steps=session.total, text=text)
        return ""

    def _pause(self, evaluates: bool, last: bool) -> str:
        """Everything begun is finished; then evaluation and checkpoint, where they are due. Returns the reason to stop."""
        session = self.session
        self._finish_all()
        self._rows.flush()
        log_experts(self.session, self.log)
        self._log_ranks()
        if evaluates:
            self._looks.look()
        verdict = self._verdict() if evaluates else ""
        if session.step == session.total and session.average.count > 1:
            self._looks.at_the_mean()
        best_now = session.progress.best_step == session.step
        if self._saves_at(session.step) or last or best_now or verdict:
            self._saver.save()
        if not last:
            self._refresh_page(news=evaluates)
        self._mark = time.perf_counter()
        return verdict

    def _begin(self, step_batch: StepBatch) -> None:
        while not self._begun(step_batch):
            pass
        self._tell()

    def _begun(self, step_batch: StepBatch) -> bool:
        """Not if memory ran out: then the steps before it are finished, the plan is lower, and the step is to be repeated."""
        session = self.session
        number = session.step + len(self._under_way)
        scale = lr_scale(number, session.source.total, session.recipe.train, session.progress.decay_from)
        lr = set_lr(session.optimizer, scale)
        if session.world.rank:  # dropout of its own; a checkpoint has the random numbers of rank 0 alone
            torch.manual_seed(session.recipe.train.seed + 1_000_003 * session.world.rank + number)
        # 160 µs: a step that is refused leaves no trace, not even in the random numbers
        limit = session.take_step.loss_limit = session.spikes.limit(number + 1)
        self._under_way.append(_UnderWay(step_batch, lr, capture_rng(), limit))
        try:
            session.take_step.begin(step_batch, self.stages)
            return True
        except torch.OutOfMemoryError as error:
            why = str(error).split(". ")[0]  # the error itself holds on to the frames it passed, and they to their tensors
        failed = self._under_way.pop()
        self._finish_all()
        self._lower_memory(number + 1, why)
        restore_rng(failed.rng)
        return False

    def _lower_memory(self, step: int, why: str) -> None:
        session = self.session
        alone = session.world.size == 1  # other ranks are in the middle of this step, and do not repeat it
        if session.memory is None or session.take_step.updating or not alone:
            raise out_of_memory(step, str(self.folder), why, session.recipe)
        before = session.memory.plan
        try:
            with self.stages("load"):
                session.lower_memory(session.memory)
        except EnvironmentFault as fault:
            raise EnvironmentFault(what=f"step {step}: {fault.what}", where=str(self.folder), why=why, fix=fault.fix) from None
        amounts = [f"{plan.needed_bytes / 1e9:.2f}" for plan in (before, session.memory.plan)]
        self.log.write(
            "notice",
            text=f"step {step}: out of memory ({why}); replanned from {amounts[0]} to {amounts[1]} GB, the step is repeated",
        )
        self._log_plan()

    def _log_plan(self) -> None:
        if self.session.memory is not None:
            self.log.write("plan", **self.session.memory.event())
            self._seconds.clear()

    def _compare_with_plan(self, seconds: float) -> None:
        """Once there are enough steps: what they took, beside what was planned."""
        if self.session.memory is None or len(self._seconds) >= COMPARED_AFTER:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == COMPARED_AFTER:
            self.log.write("measured", **self.session.memory.measured(median(self._seconds[WARM_UP:])))

    def _forget_what_is_under_way(self) -> None:
        """Steps behind a refused one changed nothing either."""
        self._under_way.clear()
        self._saver.forget_snapshots()

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish()

    def _finish(self) -> None:
        """Read the oldest step that is under way, and count it if it is sound."""
        session, done = self.session, self._under_way.popleft()
        step_batch = done.step_batch
        try:
            result = session.take_step.finish(self.stages)
            if not result.skipped and (result.grad_norm or not step_batch.may_rest):
                require_sound(
                    result.loss,
                    result.grad_norm,
                    session.step + 1,
                    lambda: self._offenders(step_batch),
                    folder=str(self.folder),
                    precision=session.precision,
                )
        except HealthStop:
            restore_rng(done.rng)
            self._forget_what_is_under_way()
            raise
        if not result.skipped and session.objective.spikes:
            self._look_at_loss(done, result.loss)
        session.step += 1
        session.cursor = step_batch.after
        session.seen_tokens += step_batch.tokens
        if result.skipped:
            self.log.write("notice", text=f"step {session.step}: fp16 overflow, update skipped, loss scale lowered")
        now = time.perf_counter()
        log_step(session, self.log, step_batch, result, done.lr, now - self._mark)
        self._rows.add(session.step, step_batch, result.losses)
        if self._saves_at(session.step):
            self._rows.flush()
        self._compare_with_plan(now - self._mark)
        self._mark = time.perf_counter() if self._refresh_page() else now  # a page is no part of the next step's time
        self._saver.finished(session.step)

    def _look_at_loss(self, done: _UnderWay, loss: float) -> None:
        """Where it stands out, the run says so and does what the recipe wants (spikes.py)."""
        session, step = self.session, self.session.step + 1
        try:
            if not session.spikes.add(step, loss, done.limit, str(self.folder)):
                return
            if session.spikes.policy == "rewind":
                self._left_out.require_one_more(self._saver.saved_step or 0, step, loss, str(self.folder))
        except GaveUp:
            self._forget_what_is_under_way()
            raise
        rows = list(dict.fromkeys(session.world.joined(done.step_batch.names(done.step_batch.documents))))
        text = f"step {step}: loss spike: {loss:.4g} exceeds the limit of {done.limit:.4g}; rows of this step: {listed(rows)}"
        if session.spikes.policy == "rewind":
            self._rewind(done, text, step=step, loss=loss, rows=rows)
        self.log.write("notice", text=text + "; the update is skipped" * (session.spikes.policy == "skip"))

    def _rewind(self, done: _UnderWay, text: str, **facts: object) -> NoReturn:
        """To the last checkpoint that is on disk, or on its way there. From then on the step is left out, after a kill as well:
        the log says so."""
        to = self._saver.saved_step or 0
        self._forget_what_is_under_way()
        back = f"checkpoint-{to}" if to else "the start"
        self.log.write(
            "rewind",
            **facts,
            limit=done.limit,
            to=to,
            after=done.step_batch.after,
            text=f"{text}; rewinding to {back} and skipping these rows",
        )
        raise Rewind

    def _pass_over(self, step_batch: StepBatch, why: str) -> None:
        """A step that a rewind left out, or that has nothing to learn from: it is counted, and nothing is computed."""
        session = self.session
        self._finish_all()
        session.step += 1
        session.cursor = step_batch.after
        self.log.write("notice", text=f"step {session.step}: {why}")
        if not step_batch.batches:
            now, self._mark = self._mark, time.perf_counter()
            log_step(session, self.log, step_batch, StepResult(0.0, 0.0), 0.0, self._mark - now)

    def _offenders(self, step_batch: StepBatch) -> Offenders:
        session = self.session
        if session.recipe.world.context > 1:  # a rank need not have room for a whole row
            return Offenders([], [])
        session.take_step.release()
        found = offending_rows(session.model, step_batch, session.device, session.autocast, session.objective)
        return Offenders(session.world.joined(found[0]), session.world.joined(found[1]))

    def _begun_and_averaged(self) -> int:
        """The last step that was begun. Its weights are read before the next one, where they are averaged."""
        session = self.session
        begun = session.step + len(self._under_way)
        if begun in session.averaged:
            self._finish_all()
            with self.stages("average"):
                session.average.add(session.model, session.averaged.start)
            self._mark = time.perf_counter()
        return begun

    def _leave_for(self, signal_number: int) -> NoReturn:
        self._finish_all()
        what = "Stopped before the first step. Run the same command to start again."
        if self.session.step:
            self.display.progress(SAVING, 0, 0)
            self._save_what_is_not_saved()
            self.display.progress(SAVING, 1, 1)
            what = f"Stopped after step {self.session.step}; saved to {self._saver.checkpoint}. Run the same command to resume."
        raise Interrupted(what=what, signal_number=signal_number)

    def _saves_at(self, step: int) -> bool:
        return step % self._save_every == 0 or step == self.session.stable_step

    def _doing(self) -> str:
        return f"step {self.session.step + max(1, len(self._under_way))}"

    def _save_what_is_not_saved(self) -> None:
        if self._saver.saved_step != self.session.step:
            self._rows.flush()
            self._saver.save()
        self._saver.wait()

    def _save_after(self, stopped: HealthStop) -> HealthStop:
        """The health stop to report, after the last good step was saved: the worse of the two verdicts."""
        try:
            if isinstance(stopped, BrokenWeights):
                self._saver.wait()
                self._saver.withdraw(self.session.step)
            elif isinstance(stopped, GaveUp):
                self._saver.wait()
            elif self.session.step:
                self._save_what_is_not_saved()
        except HealthStop as worse:  # the update before this step had overflowed
            return worse
        return stopped

    def _log_ranks(self) -> None:
        """How long each rank waited for the others since the last look, where there are several."""
        world, now = self.session.world, time.perf_counter()
        if world.size > 1:
            waited = [float(seconds) for seconds in world.joined([f"{world.waited:.6f}"])]
            looked = {"seconds": now - self._looked, "waited": waited, **foretold(self.session)}
            self.log.write("ranks", step=self.session.step, **looked)
            world.waited, self._looked = 0.0, now

    def _refresh_page(self, *, news: bool = False) -> bool:
        with self.stages("report"):
            return self._page.refresh(news=news)

    def _tell(self) -> None:
        while self.session.notices:
            self.log.write("notice", text=self.session.notices.pop(0))

    @contextmanager
    def _logged_end(self) -> Iterator[dict[str, str]]:
        """However the run ends, its log says so and its report is written."""
        end = {"reason": "error", "why": ""}
        code, goes_on = 1, False
        try:
            yield end
            code = 0
        except Rewind:
            goes_on = True
            raise
        except HealthStop as stopped:
            told = self._save_after(stopped)
            end.update(reason="health", why=told.what)
            code = told.exit_code
            raise told from None
        except Interrupted as stopped:
            end.update(reason="signal", why="")
            code = stopped.exit_code
            raise
        except PronghornError as stopped:
            end.update(why=stopped.what)
            code = stopped.exit_code
            raise
        finally:
            if not goes_on:
                log_end(self.session, self.folder, self.log, self.stages, end, code)
