"""A run's checkpoints: what its first one needs is tried before step 1, and each is copied, written and told of here.

A run that trains an adapter does not wait for its checkpoints (checkpoint_writer.py); full fine-tuning writes them itself, and
where ranks shard its weights each writes its own (sharded_saving.py).
No checkpoint holds a number that is not finite: it is refused, and the one before stays (health.py).
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import EnvironmentFault
from pronghorn.hf_types import Tokenizer
from pronghorn.memory.job import moment_bytes
from pronghorn.model.export import AdapterFiles, adapter_files, savable, save_model, save_small_files, try_small_files
from pronghorn.model.load import ModelFacts
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import RunLog
from pronghorn.report.stages import Stages
from pronghorn.train.checkpoint.checkpoint import TrainState, capture_rng, list_checkpoints, margin_bytes, save_checkpoint
from pronghorn.train.checkpoint.checkpoint_writer import CheckpointWriter, Snapshot
from pronghorn.train.checkpoint.resume import set_aside
from pronghorn.train.dist.expert_shards import ExpertShards, trained_shards_of
from pronghorn.train.run.run_folder import require_free_disk
from pronghorn.train.setup.setup import Session
from pronghorn.train.step.health import not_finite, refused_checkpoint
from pronghorn.train.step.optim import optimizer_tensors, trainable


def try_first_save(recipe: Recipe, folder: Path, facts: ModelFacts, tokenizer: Tokenizer) -> None:
    """Before weights load: the tokenizer's files and the model's config, written beside the checkpoints to come and removed,
    and room for all of these (those kept, the best one, with wsd the one before the decay, and the one being written)."""
    with scratch(folder) as place:
        try_small_files(recipe.model, tokenizer, place)
        small = bytes_of(place)
    trained = facts.parameters if recipe.method == "full" else facts.adapter_parameters
    one = 4 * trained + sum(moment_bytes(recipe.train.optimizer, trained)) + small
    one += 4 * trained * (recipe.train.average is not None)
    there = sum(bytes_of(path) for path in list_checkpoints(folder))
    needed = max(one, one * (recipe.checkpoint.keep + 2 + (recipe.train.schedule == "wsd")) - there) + margin_bytes(one)
    require_free_disk(folder, needed, "this run", then="run the same command again")


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """An empty folder on the disk that the checkpoints go to, which may have room where TMPDIR has none. Named so that the next
    start removes what a kill leaves of it."""
    place = folder / f".checkpoint-0.tmp-{os.getpid()}"
    try:
        place.mkdir(parents=True)
    except OSError as error:
        fix = "fix the reported system error, then run the same command again"
        raise EnvironmentFault.of(error, "cannot write to the run's folder", folder, fix) from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Saver:
    """`with saver_of(...) as saver`: before the first step. Here, of a rank that does not write: it only keeps count.
    `saved_step`: the last one that is on disk, or on its way."""

    def __init__(self, session: Session, folder: Path, log: RunLog, stages: Stages) -> None:
        self._session, self._folder, self._log, self._stages = session, folder, log, stages
        self.saved_step = session.resumed_from
        self.checkpoint: Path | None = folder / f"checkpoint-{session.step}" if session.resumed_from else None
        # Whether the run has to finish every step it began before it saves.
        self.waits = session.recipe.method == "full" or trained_shards_of(session.model) is not None
        self._copied: deque[int] = deque()  # steps that were begun and are not known to be sound yet

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def save(self) -> None:
        """Saves a run that has finished every step it began."""
        self._whole()
        self._saved(self._session.step)

    def snapshot(self, ahead: Sequence[StepBatch]) -> None:
        """Queues copies of weights and optimizer as they will be after the steps under way (`ahead`), whose updates are queued;
        the update after them waits for the copies, on the device."""
        self._copied.append(self._session.step + len(ahead))

    def finished(self, step: int) -> None:
        """The step is sound: what was copied of it may be written. Tells of what is on disk."""
        if self._copied and self._copied[0] == step:
            self._saved(self._copied.popleft())

    def forget_snapshots(self) -> None:
        """Drops the snapshots of steps that changed nothing."""
        self._copied.clear()

    def wait(self) -> None:
        """Until everything that was handed over is on disk."""

    def withdraw(self, step: int) -> None:
        """The weights of this step turned out to be spoilt: a checkpoint of it is nothing to go on from."""
        path = self._folder / f"checkpoint-{step}"
        if self._session.world.writes and self.saved_step == step and path.is_dir():
            aside = set_aside(path)
            self._log.write("notice", text=f"{path.name} holds the weights that broke the run; it is renamed to {aside.name}")
            self.checkpoint = None

    def _whole(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Trained weights and moments, by name; where ranks have parts of them, all take part, and the writer gets them."""
        session, moments = self._session, optimizer_tensors(self._session.optimizer, self._session.model)
        spread = trained_shards_of(session.model)
        return spread.whole(moments) if isinstance(spread, ExpertShards) else (dict(trainable(session.model)), moments)

    def _state(self, ahead: Sequence[StepBatch]) -> TrainState:
        session = self._session
        return TrainState(
            step=session.step + len(ahead),
            tensors=optimizer_tensors(session.optimizer, session.model) | session.average.tensors(),
            values={
                "cursor": ahead[-1].after if ahead else session.cursor,
                "seen_tokens": session.seen_tokens + sum(batch.tokens for batch in ahead),
                **session.identity,
                "progress": session.progress.as_dict(),
                "planned": session.source.total,
                "average": session.average.values(),
                "scaler": session.take_step.scaler.state_dict(),
                "losses": session.spikes.losses,
            },
            recipe=session.recipe.model_dump(mode="json"),
            rng=capture_rng(),
        )

    def _tell(self, step: int, path: Path, size: int, seconds: float) -> None:
        self._log.write("checkpoint", step=step, path=str(path), bytes=size, seconds=seconds)
        self._log.write("stages", **self._stages.event())

    def _saved(self, step: int) -> None:
        self.saved_step, self.checkpoint = step, self._folder / f"checkpoint-{step}"


class WritingSaver(Saver):
    def __init__(self, session: Session, folder: Path, log: RunLog, stages: Stages) -> None:
        super().__init__(session, folder, log, stages)
        self._snapshots: deque[Snapshot] = deque()  # of steps that were begun and are not known to be sound yet
        self._writer: CheckpointWriter | None = None  # who waits saves without one
        self._adapter: AdapterFiles | None = None
        with scratch(folder) as place, savable("the model", session.recipe.model):
            if session.recipe.method == "full":
                save_small_files(session.model, session.tokenizer, place)
            else:
                found = adapter_files(session.model, session.tokenizer, place)
                self._adapter = None if self.waits else found
            self._small = bytes_of(place)

    def __enter__(self) -> Self:
        if self._adapter is not None:
            self._writer = CheckpointWriter(self._folder, self._session.device, say=self._session.notices.append)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._writer is not None:
            self._writer.__exit__(*error)

    def save(self) -> None:
        if self._writer is not None:
            self.snapshot(())
            self._hand_over(self._snapshots.popleft())
            return
        session, began = self._session, time.perf_counter()
        with self._stages("checkpoint"):
            weights, moments = self._whole()
            state = replace(self._state(()), tensors=moments)
            if broken := not_finite({**weights, **state.tensors}):
                raise refused_checkpoint(session.step, broken, str(self._folder))
            self.checkpoint = save_checkpoint(
                self._folder,
                state,
                lambda place: self._write_model(place, weights),
                keep=session.recipe.checkpoint.keep,
                best_step=session.progress.best_step,
                stable_step=session.stable_step,
                needed_bytes=sum(p.nbytes for p in weights.values()) + self._small,
            )
        self.saved_step = session.step
        self._tell(session.step, self.checkpoint, bytes_of(self.checkpoint), time.perf_counter() - began)

    def snapshot(self, ahead: Sequence[StepBatch]) -> None:
        assert self._writer is not None
        assert self._adapter is not None
        with self._stages("checkpoint"):
            snapshot = self._writer.snapshot(self._adapter, self._state(ahead))
            self._session.take_step.hold_update(snapshot.hold)
            self._snapshots.append(snapshot)

    def finished(self, step: int) -> None:
        if self._snapshots and self._snapshots[0].step == step:
            self._hand_over(self._snapshots.popleft())
        self._tell_written()

    def forget_snapshots(self) -> None:
        while self._snapshots and self._writer is not None:
            self._writer.drop(self._snapshots.pop())

    def wait(self) -> None:
        with self._stages("checkpoint"):
            self._tell_written(wait=True)

    def _hand_over(self, snapshot: Snapshot) -> None:
        assert self._writer is not None
        session = self._session
        with self._stages("checkpoint"):
            # the loss of the step itself was read after the snapshot
            self._writer.write(
                snapshot,
                keep=session.recipe.checkpoint.keep,
                best_step=session.progress.best_step,
                stable_step=session.stable_step,
                values={"losses": session.spikes.losses},
            )
        self._saved(snapshot.step)

    def _write_model(self, folder: Path, weights: dict[str, Tensor]) -> None:
        save_model(self._session.model, folder, weights if self._session.shards else None)
        self._session.tokenizer.save_pretrained(str(folder))

    def _tell_written(self, *, wait: bool = False) -> None:
        if self._writer is not None:
            for one in self._writer.wait() if wait else self._writer.finished():
                self._tell(one.step, one.path, one.bytes, one.seconds)
