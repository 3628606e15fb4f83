"""Checkpoints that the run does not wait for: copied beside the kernels, written by a process of their own.

    with CheckpointWriter(run, device, say=...) as writer:
        for ...:
            snapshot.hold()                                  # the update of the weights waits for their copy; on the device
            (optimizer)
            snapshot = writer.snapshot(adapter, state)       # queues copies on a side stream
            writer.write(snapshot, keep=3, best_step=None)   # or writer.drop(snapshot)
            for written in writer.finished(): ...            # every step: hands over what is copied, tells what is written

Nothing above waits for the device or the disk, but for one thing: there is memory for two checkpoints (for one only, where
two would take over 2 GB), so a snapshot waits while that many are still on their way to the disk. The process writes one at a
time, in the order of the snapshots, by the protocol of checkpoint.py. If it fails or dies, the next call of any method says so.

It is for runs that train an adapter. Full fine-tuning saves with `save_checkpoint`, and waits: its weights and moments are
gigabytes that may not fit into main memory a second time, and how they are split into files is known to transformers only.
Do not call `save_checkpoint` or `clean_leftovers` before `wait()` has returned: they remove what is half-written.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol, Self

import torch

from pronghorn.errors import EnvironmentFault, PronghornError
from pronghorn.train.checkpoint.checkpoint import TENSORS, TrainState, manifest_of, refuse_foreign, what_resumes
from pronghorn.train.checkpoint.checkpoint_image import Image, TensorFile
from pronghorn.train.checkpoint.checkpoint_process import END, write_image
from pronghorn.train.step.health import refused_checkpoint

PROCESS = "pronghorn.train.checkpoint.checkpoint_process"
# Up to here two images, so that a snapshot need not wait for the disk. An 8B model with r=16 everywhere takes 0.5 GB each.
TWO_IMAGES_UP_TO = 2_000_000_000
_PATIENCE_S = 5.0  # for a process that was told to end, or that has closed its pipe
# How long it may be stopped (SIGSTOP, a debugger), and how long it may be silent beside the time that its bytes take on the
# slowest disk there is. Then it is killed, and the run ends; the checkpoint before stays.
STOPPED_S, SILENT_S, SLOWEST_DISK = 30.0, 300.0, 1_000_000
_LOOK_S = 1.0  # between two looks at it


class ModelFiles(Protocol):
    """model.export.AdapterFiles, or anything like it."""

    @property
    def name(self) -> str: ...  # of the file with the tensors
    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...  # by stored name; copied anew for every snapshot
    @property
    def metadata(self) -> Mapping[str, str] | None: ...
    @property
    def small(self) -> Mapping[str, bytes]: ...  # all other files


@dataclass(frozen=True)
class Written:
    step: int
    path: Path
    bytes: int
    seconds: float  # that the process took, beside the run


@dataclass(eq=False)
class Snapshot:
    """The run as it was at one step, on its way to main memory."""

    step: int
    event: torch.cuda.Event | None  # None: already there
    _image: Image
    _job: dict[str, Any]

    def hold(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` (by default the current one) wait, on the device, until all is copied. Call it before queueing
        the next change of the tensors: the next optimizer update, not the next forward."""
        if self.event is not None:
            self.event.wait(stream)

    def copied(self) -> bool:
        return self.event is None or self.event.query()


class CheckpointWriter:
    def __init__(self, run: Path, device: torch.device, *, say: Callable[[str], None]) -> None:
        """Only starts the process, 1 ms. From the thread that lives as long as the run: the process dies with it."""
        self._run, self._owner = run, os.getpid()
        self._waiting: deque[Snapshot] = deque()  # to be handed over, oldest first
        self._in_flight: Snapshot | None = None
        self._taken: list[Snapshot] = []  # neither handed over nor dropped
        self._done: list[Written] = []
        self._broken: PronghornError | None = None
        self._looked = self._stopped_for = self._silent_for = 0.0
        self._process: _Process | None = None
        self._closed = False
        try:
            self._process = _Process()
        except (AttributeError, OSError) as error:  # not Linux, or no process to be had
            say(f"checkpoints are written by the training process, which waits for each one: {error}")
        memories: list[int | None] = [*self._process.memories] if self._process else [None, None]
        self._images = [Image(device, memory, say) for memory in memories]

    def snapshot(self, model: ModelFiles, state: TrainState) -> Snapshot:
        """The tensors' values at this point of the current stream; `state` must not be changed afterwards."""
        if self._closed:
            raise RuntimeError("the checkpoint writer is closed")
        self._advance()
        refuse_foreign([model.name, *model.small])
        manifest = manifest_of(state)
        image = self._free_image()
        files = [TensorFile(model.name, model.tensors, model.metadata), TensorFile(TENSORS, state.tensors)]
        event = image.take(model.small, files)
        job = {
            "run": str(self._run),
            "image": self._images.index(image),
            "size": image.layout.size,
            "files": image.layout.files,
            "manifest": manifest,
        }
        snapshot = Snapshot(state.step, event, image, job)
        self._taken.append(snapshot)
        return snapshot

    def write(self, snapshot: Snapshot, *, keep: int, best_step: int | None, values: Mapping[str, Any] | None = None) -> None:
        """As `save_checkpoint` would, as soon as it is copied and the one before is written. `values`: what is known only now,
        in plain JSON."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; the newest checkpoint is always kept")
        if snapshot not in self._taken or snapshot in self._waiting:
            raise ValueError(f"the snapshot of step {snapshot.step} is already written or dropped")
        snapshot._job.update(keep=keep, best_step=best_step)
        snapshot._job["manifest"]["values"] |= values or {}
        self._waiting.append(snapshot)
        self._advance()

    def drop(self, snapshot: Snapshot) -> None:
        """It is not to be written; its memory is free for the next."""
        if snapshot in self._waiting:
            raise ValueError(f"the snapshot of step {snapshot.step} is already being written")
        self._taken.remove(snapshot)

    def finished(self) -> list[Written]:
        """What is on disk since the last call. Raises the writer's EnvironmentFault, or says that it died."""
        self._advance()
        return self._hand_out()

    def wait(self) -> list[Written]:
        """Until everything is on disk that `write` was called for."""
        self._drain()
        return self._hand_out()

    def close(self) -> None:
        """End the process. What is not written yet is lost: `wait()` before, or leave by the `with`, which waits."""
        if os.getpid() != self._owner:  # a forked data worker that unwinds has no say over its parent's process
            return
        self._closed, self._in_flight = True, None
        self._waiting.clear()
        self._taken.clear()
        if self._process is not None:
            self._process.end()
            self._process = None
        for image in self._images:
            with contextlib.suppress(RuntimeError):  # CUDA's, when it is CUDA that has failed
                image.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`finished()` tells afterwards what was written meanwhile."""
        if os.getpid() != self._owner:
            return
        try:
            if kind is None:
                self._drain()
            elif issubclass(kind, Exception):
                # What went wrong in the run is what to report. RuntimeError: also CUDA's, when the copy itself has failed.
                with contextlib.suppress(PronghornError, RuntimeError):
                    self._drain()
        finally:
            self.close()

    def _drain(self) -> None:
        while self._waiting or self._in_flight:
            self._advance(wait=True)
        self._advance()

    def _advance(self, *, wait: bool = False) -> None:
        """One thing further: take in the answer about the one in flight, hand over the next."""
        if self._closed:
            return
        if self._broken:
            raise self._broken
        if self._process is not None:
            while wait and self._in_flight and not self._process.has_answer(_LOOK_S):
                self._watch(self._process)
            if self._process.has_answer():
                self._take_in(self._process)
            elif self._in_flight and time.monotonic() > self._looked + _LOOK_S:
                self._watch(self._process)
        if self._waiting and not self._in_flight and (wait or self._waiting[0].copied()):
            self._hand_over(self._waiting.popleft())

    def _hand_over(self, snapshot: Snapshot) -> None:
        snapshot._image.settle()
        self._taken.remove(snapshot)
        if broken := snapshot._image.not_finite():
            raise refused_checkpoint(snapshot.step, broken, str(self._run))
        if self._process is None:
            assert snapshot._image.memory is not None
            self._note(write_image(snapshot._job, snapshot._image.memory))
            return
        self._in_flight = snapshot
        self._looked, self._stopped_for, self._silent_for = time.monotonic(), 0.0, 0.0
        try:
            self._process.send(snapshot._job)
        except OSError:
            raise self._death(self._process) from None

    def _watch(self, process: _Process) -> None:
        """No answer yet. A look counts for two seconds at most: a machine that slept is no fault of the writer's."""
        assert self._in_flight is not None
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 2 * _LOOK_S), now
        self._silent_for += passed
        self._stopped_for = self._stopped_for + passed if process.is_stopped() else 0.0
        step, size = self._in_flight.step, self._in_flight._job["size"]
        if self._stopped_for >= STOPPED_S:
            why = f"it was stopped by a signal (SIGSTOP) or a debugger for {STOPPED_S:.0f} s"
        elif self._silent_for >= SILENT_S + size / SLOWEST_DISK:
            why = f"it has not responded for {self._silent_for:.0f} s; check whether the disk responds"
        else:
            return
        process.kill()
        self._in_flight = None
        self._broken = EnvironmentFault(
            f"the checkpoint writer process hangs; checkpoint-{step} is not written",
            where=str(self._run),
            why=why,
            fix=what_resumes(self._run),
        )
        raise self._broken

    def _take_in(self, process: _Process) -> None:
        try:
            answer = process.receive()
        except (EOFError, OSError):
            raise self._death(process) from None
        self._in_flight = None
        if "bug" in answer:
            raise RuntimeError(f"the checkpoint writer failed:\n{answer['bug']}")
        if "fault" in answer:
            raise EnvironmentFault(**answer["fault"])
        self._note(answer["written"])

    def _note(self, written: dict[str, Any]) -> None:
        self._done.append(Written(**written | {"path": Path(written["path"])}))

    def _hand_out(self) -> list[Written]:
        done, self._done = self._done, []
        return done

    def _free_image(self) -> Image:
        """Waits only if every image is on its way to the disk."""
        while True:
            in_use = [snapshot._image for snapshot in [*self._taken, *([self._in_flight] if self._in_flight else [])]]
            size = max(image.layout.size for image in self._images)
            usable = self._images if 2 * size <= TWO_IMAGES_UP_TO else self._images[:1]
            free = next((image for image in usable if image not in in_use), None)
            if free is not None:
                return free
            if not (self._in_flight or self._waiting):
                raise RuntimeError("no memory for another snapshot: earlier snapshots are neither written nor dropped")
            self._advance(wait=True)

    def _death(self, process: _Process) -> EnvironmentFault:
        """Also for every later call: this writer will not write again."""
        step = self._in_flight.step if self._in_flight else None
        self._in_flight = None
        doing = f" while writing checkpoint-{step}, which is removed" if step is not None else ""
        self._broken = EnvironmentFault(
            f"the checkpoint writer process died{doing}",
            where=str(self._run),
            why=process.last_words(),
            fix=f"if it ran out of memory, free host RAM; then {what_resumes(self._run)}",
        )
        return self._broken


class _Process:
    """checkpoint_process.py, running, with a pipe to it."""

    def __init__(self) -> None:
        """AttributeError where there is no shared memory of this kind, OSError where there is no process to be had."""
        self.memories = [os.memfd_create(f"checkpoint-{number}") for number in range(2)]  # a file, and empty: no memory yet
        # as long as the process; in memory, since TMPDIR may be full, missing or a file
        self._errors: IO[bytes] = os.fdopen(os.memfd_create("checkpoint-errors"), "w+b")
        self._pipe: Connection[Any, Any]
        self._pipe, theirs = Pipe()
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)  # it must find what we have found
        descriptors = [theirs.fileno(), *self.memories]
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", PROCESS, *(str(number) for number in (os.getpid(), *descriptors))],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=descriptors,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C goes to the whole group of the terminal: not to this one
            )
        except OSError:
            self._release()
            raise
        finally:
            theirs.close()
        self.pid = self._popen.pid

    def send(self, job: dict[str, Any] | str) -> None:
        self._pipe.send_bytes(json.dumps(job).encode())

    def has_answer(self, within: float = 0.0) -> bool:
        """Or the news of its death."""
        try:
            return self._pipe.poll(within)
        except OSError:
            return True

    def receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        return answer

    def is_stopped(self) -> bool:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state in ("T", "t")
        return False

    def kill(self) -> None:
        self._popen.kill()

    def last_words(self) -> str:
        code = self._end_of(self._popen)
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
        return f"{how}: {text.splitlines()[-1]}" if text else how

    def end(self) -> None:
        with contextlib.suppress(OSError):  # dead already
            self.send(END)
        self._end_of(self._popen)
        self._release()

    def _release(self) -> None:
        self._pipe.close()
        self._errors.close()
        for memory in self.memories:
            os.close(memory)

    @staticmethod
    def _end_of(popen: subprocess.Popen[bytes]) -> int:
        try:
            return popen.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            return popen.wait()
