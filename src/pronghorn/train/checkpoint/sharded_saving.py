"""Checkpoints of weights that ranks shard (`world.shard: full`): every rank writes what it has, and the run goes on meanwhile.

    all ranks   copy their rows of weights and moments into host memory; one thread each writes and digests them, in the
                temporary folder that the writer made
    all ranks   after a later step, once every thread has ended: they tell the writer sizes and digests
    the writer  writes the manifest, renames the folder and prunes older ones (checkpoint.py)

Until the rename there is only the temporary folder, which the next start removes, whichever rank was killed. Where host memory
has no room for the copies of all ranks, each tensor is copied as it is written, and the run waits.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from pronghorn.errors import EnvironmentFault
from pronghorn.model.export import savable, save_small_files
from pronghorn.model.rank_files import Part, file_name, write_rank_file
from pronghorn.model.read_ahead import free_memory
from pronghorn.report.run_log import RunLog
from pronghorn.report.stages import Stages
from pronghorn.train.checkpoint.checkpoint import (
    STATE,
    TENSORS,
    begin_checkpoint,
    disk_faults,
    finish_checkpoint,
    manifest_of,
    storable,
    what_resumes,
)
from pronghorn.train.checkpoint.checkpoint_writer import SILENT_S, SLOWEST_DISK
from pronghorn.train.checkpoint.saving import Saver, WritingSaver, bytes_of, scratch
from pronghorn.train.dist.expert_shards import trained_shards_of
from pronghorn.train.dist.fsdp import Fsdp
from pronghorn.train.dist.shards import MOMENTS
from pronghorn.train.setup.setup import Session
from pronghorn.train.step.health import not_finite, refused_checkpoint
from pronghorn.train.step.optim import optimizer_tensors
from pronghorn.train.step.spikes import Rewind

Files = Mapping[str, Mapping[str, Part]]  # what this rank writes, by file


def saver_of(session: Session, folder: Path, log: RunLog, stages: Stages) -> Saver:
    if isinstance(spread := trained_shards_of(session.model), Fsdp):
        return ShardedSaver(session, folder, log, stages, spread)
    return (WritingSaver if session.world.writes else Saver)(session, folder, log, stages)


class _UnderWay:
    """A checkpoint whose files this rank writes."""

    def __init__(self, session: Session, folder: Path, manifest: dict[str, Any], files: Files) -> None:
        progress = session.progress
        self.folder, self.manifest, self.began = folder, manifest, time.perf_counter()
        self.step, self.keep = session.step, session.recipe.checkpoint.keep
        self.beside = (progress.best_step, session.stable_step)
        self.written: Future[dict[str, Any]] = Future()
        self._files = files
        largest = max((part.tensor.nbytes for its in files.values() for part in its.values()), default=0)
        self._moved, self._patience = time.monotonic(), SILENT_S + largest / SLOWEST_DISK
        # A daemon: where another rank has failed, nobody waits for it.
        threading.Thread(target=self._write, name="checkpoint", daemon=True).start()

    def _write(self) -> None:
        try:
            with disk_faults(self.folder.parent, f"cannot write checkpoint-{self.step}"):
                files = {name: write_rank_file(self.folder / name, its, self._move) for name, its in self._files.items()}
            self.written.set_result(files)
        except BaseException as error:  # noqa: BLE001  (the run raises it)
            self.written.set_exception(error)
        self._files = {}

    def _move(self) -> None:
        self._moved = time.monotonic()

    def ended(self, seconds: float) -> bool:
        """Waits so long; refuses a disk that takes nothing any more."""
        with suppress(TimeoutError):
            self.written.exception(seconds)
            return True
        if time.monotonic() - self._moved > self._patience:
            raise EnvironmentFault(
                f"checkpoint-{self.step} is not written",
                where=str(self.folder.parent),
                why=f"the disk has not responded for {self._patience:.0f} s",
                fix=f"check the disk; then {what_resumes(self.folder.parent)}",
            )
        return False


class ShardedSaver(Saver):
    """Every rank saves what it trains."""

    def __init__(self, session: Session, folder: Path, log: RunLog, stages: Stages, spread: Fsdp) -> None:
        super().__init__(session, folder, log, stages)
        self._spread, self._small = spread, 0
        self._under_way: _UnderWay | None = None
        if session.world.writes:
            with scratch(folder) as place, savable("the model", session.recipe.model):
                save_small_files(session.model, session.tokenizer, place)
                self._small = bytes_of(place)

    def __exit__(self, *error: Any) -> None:
        """Where all ranks leave together; else what is not whole is lost."""
        kind = error[0]
        if kind is None or issubclass(kind, Rewind):
            self.wait()

    def save(self) -> None:
        session, world = self._session, self._session.world
        self.wait()  # for the one before
        with self._stages("checkpoint"):
            state = optimizer_tensors(session.optimizer, session.model)
            if broken := world.joined(not_finite({**self._spread.trained, **state})):
                raise refused_checkpoint(session.step, sorted({*broken}), str(self._folder))
            files, everywhere = self._files(state), {k: v for k, v in state.items() if not k.startswith(MOMENTS)}
            own = sum(part.tensor.nbytes for its in files.values() for part in its.values())
            (size,) = world.total(own)
            manifest = manifest_of(self._state(())) if world.writes else {}
            folder = Path(world.on_writer(lambda: str(self._begin(int(size), everywhere))))
            here = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))  # ranks of this machine
            crowded = world.total(2 * here * own > free_memory())[0]
            self._under_way = _UnderWay(session, folder, manifest, files if crowded else _copied(files))
            self._saved(session.step)
            if crowded:
                self._finish(wait=True)

    def finished(self, step: int) -> None:
        self._finish(wait=False)

    def wait(self) -> None:
        with self._stages("checkpoint"):
            self._finish(wait=True)

    def _files(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Part]]:
        session, (weights, moments) = self._session, self._spread.parts(state)
        if session.world.writes:  # what no rank shards: frozen parameters, and buffers that are saved
            held = session.model.state_dict()
            whole = {**dict(session.model.named_parameters()), **dict(session.model.named_buffers())}
            others = (name for name in whole if name in held and name not in self._spread.sharded)
            weights |= {name: Part(whole[name].detach()) for name in others}
        rank, ranks = session.world.rank, self._spread.ranks
        if rank >= ranks:
            return {}
        return {file_name(rank, ranks, "model-"): weights, f"{STATE}/{file_name(rank, ranks)}": moments}

    def _begin(self, size: int, everywhere: Mapping[str, Tensor]) -> Path:
        session = self._session
        # Of a start that was killed, a rank may still write for seconds: not into this folder.
        folder = begin_checkpoint(self._folder, session.step, size + self._small, unique=str(time.time_ns()))
        with disk_faults(self._folder, f"cannot write checkpoint-{session.step}"):
            (folder / STATE).mkdir()
            save_small_files(session.model, session.tokenizer, folder)
            save_file(storable(everywhere), folder / TENSORS)
        return folder

    def _finish(self, *, wait: bool) -> None:
        one, world = self._under_way, self._session.world
        if one is None:
            return
        while world.total(not one.ended(1.0 if wait else 0.0))[0]:  # heartbeat.py sees that ranks do not hang
            if not wait:
                return
        self._under_way = None
        try:
            files = one.written.result()
        except BaseException:
            shutil.rmtree(one.folder, ignore_errors=True)  # where the disk is full, all of it is in the way
            raise
        others: dict[str, Any] = {}
        for told in world.joined([json.dumps(files)]):
            others |= json.loads(told)
        path = Path(
            world.on_writer(lambda: str(finish_checkpoint(one.folder, one.manifest, others, keep=one.keep, beside=one.beside)))
        )
        self._tell(one.step, path, bytes_of(path) if world.writes else 0, time.perf_counter() - one.began)


def _copied(files: Files) -> Files:
    """Into host memory."""
    return {
        file: {name: part._replace(tensor=part.tensor.to("cpu", copy=True)) for name, part in its.items()}
        for file, its in files.items()
    }
