"""The run: step after step, with evaluation, checkpoints, signals and the log around it.

Nothing here knows how a step is computed, how data is read or how anything is shown.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from pronghorn import __version__
from pronghorn.data.batches import StepBatch
from pronghorn.data.prepare import evaluation_prompts
from pronghorn.errors import EnvironmentFault, HealthStop, Interrupted, PronghornError
from pronghorn.model.export import save_model
from pronghorn.model.generate import generate_answers
from pronghorn.recipe import Recipe
from pronghorn.report.html import write_html
from pronghorn.report.run_log import RunLog
from pronghorn.report.stages import Stages
from pronghorn.train.checkpoint import (
    TrainState,
    capture_rng,
    clean_leftovers,
    list_checkpoints,
    restore_rng,
    save_checkpoint,
)
from pronghorn.train.evaluate import evaluate
from pronghorn.train.health import offending_rows, require_sound
from pronghorn.train.optim import lr_scale, optimizer_tensors, set_lr, trainable
from pronghorn.train.run_folder import RunFolder, set_aside
from pronghorn.train.setup import Session, set_up
from pronghorn.train.signals import StopRequest

ANSWER_TOKENS = 64  # of each held-out generation: enough to see what the model does, short enough not to hold the run up


class Display(Protocol):
    """What the run is shown on (report/display.py has one for terminals, one for pipes, one for machines)."""

    def handle(self, event: dict[str, Any]) -> None: ...
    def progress(self, label: str, done: int, total: int) -> None: ...


@dataclass(frozen=True)
class RunResult:
    folder: Path
    checkpoint: Path | None
    reason: str  # done | early stop
    why: str
    step: int
    best_step: int | None


def train(recipe: Recipe, *, display: Display, stages: Stages | None = None, fresh: bool = False) -> RunResult:
    """Train, or go on where the folder's last checkpoint stands. Raises what the command line turns into an exit code."""
    stages = stages or Stages()
    folder = Path(recipe.output)
    old = set_aside(folder) if fresh else None
    started = False
    try:
        with RunFolder(folder) as run_folder:
            clean_leftovers(folder)
            session = set_up(recipe, folder, report=display.progress, stage=stages)
            run_folder.require_free(_bytes_still_to_write(session, folder))
            if old:
                session.notices.insert(0, f"the earlier run was moved to {old}")
            with RunLog(folder, listeners=(display.handle,)) as log, StopRequest() as stop:
                started = True
                return _Run(session, folder, log, stages, display).go(stop)
    finally:
        if old and not started:  # the new run never began: the old one is again what the same command resumes
            old.rename(folder)


def _bytes_still_to_write(session: Session, folder: Path) -> int:
    """Trained weights and AdamW's two moments, for the checkpoints kept, the best one and the one being written."""
    one = sum(3 * p.nbytes for p in trainable(session.model).values())
    there = sum(file.stat().st_size for path in list_checkpoints(folder) for file in path.rglob("*"))
    return max(one, one * (session.recipe.checkpoint.keep + 2) - there)


@dataclass(frozen=True)
class _UnderWay:
    """A step that was begun and whose numbers were not read yet."""

    step_batch: StepBatch
    lr: float
    rng: dict[str, Any]  # before it began


class _Run:
    def __init__(self, session: Session, folder: Path, log: RunLog, stages: Stages, display: Display) -> None:
        self.session, self.folder, self.log, self.stages, self.display = session, folder, log, stages, display
        self.saved_step = session.resumed_from  # the last step that is safe on disk
        self._under_way: deque[_UnderWay] = deque()
        self._mark = 0.0  # when the last step ended
        self.checkpoint: Path | None = folder / f"checkpoint-{session.step}" if session.resumed_from else None

    def go(self, stop: StopRequest) -> RunResult:
        self._log_start()
        with self._logged_end() as end:
            reason, why = self._steps(stop)
            if self.saved_step != self.session.step:
                self._save()
            end.update(reason=reason, why=why)
        return RunResult(self.folder, self.checkpoint, reason, why, self.session.step, self.session.progress.best_step)

    def _steps(self, stop: StopRequest) -> tuple[str, str]:
        """Steps are begun ahead of being read (`Step.depth`); where the run looks at itself, all of them are finished first."""
        session, recipe = self.session, self.session.recipe
        total = session.data.total_steps
        verdict = session.progress.verdict(recipe.eval.stop)
        batches = iter(session.loader)
        self._mark = time.perf_counter()
        while session.step < total and not verdict:
            with self.stages("wait"):
                step_batch = next(batches)
            self._begin(step_batch)
            begun = session.step + len(self._under_way)
            last = begun == total
            evaluates = session.data.evaluation is not None and (begun % recipe.eval.every == 0 or last)
            if evaluates or last or begun % recipe.checkpoint.every == 0:
                verdict = self._pause(evaluates, last)
            elif len(self._under_way) > session.take_step.depth:
                self._finish()
            if stop.signal_number is not None and not last:
                self._leave_for(stop.signal_number)
        if verdict:
            return "early stop", verdict
        return "done", f"all {total:,} steps"

    def _pause(self, evaluates: bool, last: bool) -> str:
        """Everything begun is finished; then evaluation and checkpoint, where they are due. Returns the reason to stop."""
        session = self.session
        self._finish_all()
        verdict = self._evaluate() if evaluates else ""
        best_now = session.progress.best_step == session.step
        if session.step % session.recipe.checkpoint.every == 0 or last or best_now or verdict:
            self._save()
        self._mark = time.perf_counter()
        return verdict

    def _begin(self, step_batch: StepBatch) -> None:
        session = self.session
        number = session.step + len(self._under_way)
        lr = set_lr(session.optimizer, lr_scale(number, session.data.total_steps, session.recipe.train))
        # 160 µs: a step that is refused leaves no trace, not even in the random numbers
        self._under_way.append(_UnderWay(step_batch, lr, capture_rng()))
        try:
            session.take_step.begin(step_batch, self.stages)
        except torch.OutOfMemoryError as error:
            raise EnvironmentFault(
                what=f"step {number + 1}: out of GPU memory", where=str(self.folder), why=str(error).split(". ")[0],
                fix=f"lower train.capacity (now {session.recipe.train.capacity:,}) and start with --fresh",
            ) from error
        self._tell()

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish()

    def _finish(self) -> None:
        """Read the oldest step that is under way, and count it if it is sound."""
        session, done = self.session, self._under_way.popleft()
        step_batch = done.step_batch
        try:
            result = session.take_step.finish(self.stages)
            if not result.skipped:
                require_sound(result.loss, result.grad_norm, session.step + 1, lambda: self._offenders(step_batch),
                              folder=str(self.folder))
        except HealthStop:
            restore_rng(done.rng)
            raise
        session.step += 1
        session.cursor = step_batch.after
        session.seen_tokens += step_batch.tokens
        if result.skipped:
            self.log.write("notice", text=f"step {session.step}: fp16 overflow, update skipped, loss scale lowered")
        now = time.perf_counter()
        self.log.write(
            "step", step=session.step, epoch=round(step_batch.epoch, 6), loss=result.loss, grad_norm=result.grad_norm,
            lr=done.lr, tokens=step_batch.tokens, loss_tokens=step_batch.loss_tokens, seconds=now - self._mark,
            seen_tokens=session.seen_tokens,
        )
        self._mark = now

    def _offenders(self, step_batch: StepBatch) -> list[str]:
        session = self.session
        return offending_rows(session.model, step_batch, session.data.train, session.data.train.where, session.device,
                              session.autocast)

    def _evaluate(self) -> str:
        """Returns the reason to stop, or nothing."""
        session, recipe = self.session, self.session.recipe
        assert session.data.evaluation is not None
        began = time.perf_counter()
        with self.stages("evaluate"):
            result = evaluate(session.model, session.data.evaluation, capacity=recipe.train.capacity, device=session.device,
                              pad_id=session.data.pad_id, autocast=session.autocast, progress=self.display.progress)
            samples = evaluation_prompts(session.data.evaluation, session.tokenizer, recipe.eval.generations)
            with session.autocast():
                answers = generate_answers(session.model, session.tokenizer, [sample.ids for sample in samples],
                                           max_new_tokens=ANSWER_TOKENS)
        session.progress = session.progress.after(result.loss, session.step, recipe.eval.stop)
        self.log.write(
            "eval", step=session.step, loss=result.loss, perplexity=result.perplexity, tokens=result.tokens,
            seconds=time.perf_counter() - began, best=session.progress.best_step == session.step,
            generations=[{"prompt": sample.prompt, "answer": answer, "expected": sample.expected}
                         for sample, answer in zip(samples, answers, strict=True)],
        )
        return session.progress.verdict(recipe.eval.stop)

    def _save(self) -> None:
        session, began = self.session, time.perf_counter()
        with self.stages("checkpoint"):
            state = TrainState(
                step=session.step,
                tensors=optimizer_tensors(session.optimizer, session.model),
                values={
                    "cursor": session.cursor.as_dict(), "seen_tokens": session.seen_tokens, "data": session.data.key,
                    "progress": session.progress.as_dict(), "scaler": session.take_step.scaler.state_dict(),
                },
                recipe=session.recipe.model_dump(mode="json"),
                rng=capture_rng(),
            )
            self.checkpoint = save_checkpoint(
                self.folder, state, self._write_model, keep=session.recipe.checkpoint.keep,
                best_step=session.progress.best_step, needed_bytes=sum(p.nbytes for p in trainable(session.model).values()),
            )
        self.saved_step = session.step
        written = sum(file.stat().st_size for file in self.checkpoint.rglob("*") if file.is_file())
        self.log.write("checkpoint", step=session.step, path=str(self.checkpoint), bytes=written,
                       seconds=time.perf_counter() - began)
        self.log.write("stages", **self.stages.event())

    def _write_model(self, folder: Path) -> None:
        save_model(self.session.model, folder)
        self.session.tokenizer.save_pretrained(str(folder))

    def _leave_for(self, signal_number: int) -> None:
        self._finish_all()
        if self.saved_step != self.session.step:
            self._save()
        raise Interrupted(
            what=f"stopped at step {self.session.step} as asked; everything is saved in {self.checkpoint}",
            signal_number=signal_number, fix="the same command goes on from here",
        )

    def _log_start(self) -> None:
        session = self.session
        model = session.model
        self.log.write(
            "start", run=self.folder.name, recipe=session.recipe.model_dump(mode="json"), versions=_versions(),
            device=_device_name(session.device), threads=torch.get_num_threads(), precision=session.precision,
            resumed_from=session.resumed_from, steps=session.data.total_steps,
            parameters={"total": sum(p.numel() for p in model.parameters()),
                        "trainable": sum(p.numel() for p in trainable(model).values())},
            data=session.data.summary(session.recipe.train.capacity),
            eval_documents=len(session.data.evaluation) if session.data.evaluation is not None else 0,
        )
        self._tell()

    def _tell(self) -> None:
        while self.session.notices:
            self.log.write("notice", text=self.session.notices.pop(0))

    @contextmanager
    def _logged_end(self) -> Iterator[dict[str, str]]:
        """However the run ends, its log says so and its report is written."""
        end = {"reason": "error", "why": ""}
        code = 1
        try:
            yield end
            code = 0
        except HealthStop as stopped:
            end.update(reason="health", why=stopped.what)
            code = stopped.exit_code
            if self.session.step and self.saved_step != self.session.step:
                self._save()  # the weights are those of the last good step
            raise
        except Interrupted as stopped:
            end.update(reason="signal", why=stopped.what)
            code = stopped.exit_code
            raise
        except PronghornError as stopped:
            end.update(why=stopped.what)
            code = stopped.exit_code
            raise
        finally:
            progress = self.session.progress
            best = {"step": progress.best_step, "loss": progress.best_loss} if progress.best_step is not None else None
            self.log.write("stages", **self.stages.event())
            self.log.write("end", **end, step=self.session.step, exit_code=code, best=best)
            write_html(self.folder)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "pronghorn": __version__,
            **{name: version(name) for name in ("torch", "transformers", "peft")}}


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
