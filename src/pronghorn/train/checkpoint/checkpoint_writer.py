"""Checkpoints that the run does not wait for: copied beside the kernels, written by a thread.

    with CheckpointWriter(run, device, say=...) as writer:
        for ...:
            snapshot.hold()                                  # the update of the weights waits for their copy; on the device
            (optimizer)
            snapshot = writer.snapshot(adapter, state)       # queues copies on a side stream
            writer.write(snapshot, keep=3, best_step=None)   # or writer.drop(snapshot)
            for written in writer.finished(): ...            # every step: tells what is written

Nothing above waits for the device or the disk, but for one thing: there is memory for two checkpoints (for one only, where
two would take over 2 GB), so a snapshot waits while that many are still on their way to the disk. The thread writes one at a
time, in the order of the snapshots, by the protocol of checkpoint.py; what it raises, the next call of any method raises.
safetensors writes and hashlib reads without Python's lock. A kill takes the thread along: what is half-written then has a
temporary name, which the next start removes.

It is for runs that train an adapter. Full fine-tuning saves with `save_checkpoint`, and waits: its weights and moments are
gigabytes that may not fit into main memory a second time, and how they are split into files is known to transformers only.
Do not call `save_checkpoint` or `clean_leftovers` before `wait()` has returned: they remove what is half-written.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from pronghorn.errors import EnvironmentFault, PronghornError
from pronghorn.kernels.runtime.host_memory import pin, unpin
from pronghorn.train.checkpoint import checkpoint
from pronghorn.train.checkpoint.checkpoint import TENSORS, TrainState
from pronghorn.train.run.run_folder import readable_bytes
from pronghorn.train.step.health import not_finite, refused_checkpoint

# Up to here two copies, so that a snapshot need not wait for the disk. An 8B model with r=16 everywhere takes 0.5 GB each.
TWO_COPIES_UP_TO = 2_000_000_000
# How long the run waits for a checkpoint, beside the time that its bytes take on the slowest disk there is.
SILENT_S, SLOWEST_DISK = 300.0, 1_000_000
_PATIENCE_S = 5.0  # for a thread that was told to end
_ALIGNED = 64  # bytes, for every tensor


class ModelFiles(Protocol):
    """model.export.AdapterFiles, or anything like it."""

    @property
    def name(self) -> str: ...  # of the file with the tensors
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...  # by stored name; copied anew for every snapshot
    @property
    def metadata(self) -> Mapping[str, str] | None: ...
    @property
    def small(self) -> Mapping[str, bytes]: ...  # all other files


@dataclass(frozen=True)
class Written:
    step: int
    path: Path
    bytes: int
    seconds: float  # that the thread took, beside the run


class Copy:
    """Host memory for the tensors of one checkpoint, pinned for CUDA; used again for every next one."""

    def __init__(self, device: torch.device, say: Callable[[str], None]) -> None:
        self._device, self._say = device, say
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._memory: Tensor | None = None
        self._pinned = False
        self._shapes: list[Any] = []
        self._sources: list[Tensor] = []  # kept until they are copied: their memory must not be used for others
        self._largest: Tensor | None = None  # absolute value in what was taken, in host memory; NaN if one is NaN
        self._event: torch.cuda.Event | None = None
        self.places: list[dict[str, Tensor]] = []  # the copies, by name, of each file

    @property
    def size(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, files: Sequence[Mapping[str, Tensor]]) -> torch.cuda.Event | None:
        """Start to copy; on CUDA, returns the event of its end without waiting for anything, except when the memory has to
        be allocated first: the first time, or when tensors have other names or shapes than the last time."""
        self.settle()
        self._fit(files)
        self._sources = [tensor.detach() for file in files for tensor in file.values()]
        if self._stream is None:
            self._copy()
            self._sources = []
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._copy()
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(self._stream)
        return self._event

    def settle(self) -> None:
        """Wait for the copy, and let go of what was copied."""
        if self._event is not None:
            self._event.synchronize()
        self._event = None
        self._sources = []

    def not_finite(self) -> list[str]:
        """Names of the tensors that hold NaN or infinity, once it is settled. The device has looked; the host reads one number,
        and only if that is not finite all of them."""
        if self._largest is None or all(map(math.isfinite, self._largest.tolist())):
            return []
        return [name for places in self.places for name in not_finite(places)]

    def free(self) -> None:
        self.settle()
        if self._pinned and self._memory is not None:
            unpin(self._memory, self._device)
        self._memory, self._pinned, self._shapes, self.places = None, False, [], []

    def _copy(self) -> None:
        places = (place for file in self.places for place in file.values())
        with torch.no_grad():
            for place, source in zip(places, self._sources, strict=True):
                place.copy_(source, non_blocking=True)
            self._largest = _largest(self._sources, pinned=self._stream is not None)

    def _fit(self, files: Sequence[Mapping[str, Tensor]]) -> None:
        shapes = [[(name, tensor.dtype, tensor.shape) for name, tensor in file.items()] for file in files]
        if shapes == self._shapes:
            return
        size = sum(_aligned(tensor.nbytes) for file in files for tensor in file.values())
        if self._memory is None or size > self._memory.nbytes:
            self.free()
            self._memory = self._allocate(size)
        end, self.places = 0, []
        for file in files:
            self.places.append({})
            for name, tensor in file.items():
                place = self._memory[end : end + tensor.nbytes]
                self.places[-1][name] = place.view(tensor.dtype).view(tensor.shape)
                end += _aligned(tensor.nbytes)
        self._shapes = shapes

    def _allocate(self, size: int) -> Tensor:
        try:
            memory = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise EnvironmentFault(
                f"not enough host RAM to copy the checkpoint: it needs {readable_bytes(size)}",
                why=str(error).split("\n", 1)[0],
                fix="free host RAM, then run the same command again",
            ) from error
        if self._stream is not None and size:
            try:
                pin(memory, "save less often")
                self._pinned = True
            except EnvironmentFault as fault:  # without it, copies are right as well, but the run waits for them
                self._say(f"checkpoints: {fault.what} ({fault.why}); copies are slower")
                # CUDA keeps the error for whoever asks next, which would be some kernel of the run: ask now.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)
        return memory


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _largest(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor | None:
    """One a device (moments may be paged into host memory), on the host, once the stream is there. Everything is read once:
    0.2 ms for the 0.5 GB of an 8B model's adapter and moments (computed, at 3 TB/s). Quantized moments are whole numbers."""
    of_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            of_device.setdefault(tensor.device, []).append(tensor)
    if not of_device:
        return None
    found = torch.empty(len(of_device), pin_memory=pinned)
    for place, members in zip(found, of_device.values(), strict=True):
        norms = torch._foreach_norm(members, float("inf"))
        place.copy_(torch.stack([norm.float() for norm in norms]).amax(), non_blocking=True)
    return found


@dataclass(eq=False)
class Snapshot:
    """The run as it was at one step, on its way to main memory."""

    step: int
    event: torch.cuda.Event | None  # None: already there
    model: ModelFiles
    manifest: dict[str, Any]
    copy: Copy
    keep: int = 0
    beside: tuple[int | None, ...] = ()  # steps whose checkpoints stay beside those kept
    written: Future[Written] = field(default_factory=Future)

    def hold(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make `stream` (by default the current one) wait, on the device, until all is copied. Call it before queueing
        the next change of the tensors: the next optimizer update, not the next forward."""
        if self.event is not None:
            self.event.wait(stream)

    def copied(self) -> bool:
        return self.event is None or self.event.query()


class CheckpointWriter:
    def __init__(self, run: Path, device: torch.device, *, say: Callable[[str], None]) -> None:
        self._run, self._owner = run, os.getpid()
        self._copies = [Copy(device, say) for _ in range(2)]
        self._taken: list[Snapshot] = []  # neither handed over nor dropped
        self._in_flight: deque[Snapshot] = deque()  # handed over, oldest first
        self._done: list[Written] = []
        self._hung: EnvironmentFault | None = None
        self._closed = False
        self._queue: SimpleQueue[Snapshot | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def snapshot(self, model: ModelFiles, state: TrainState) -> Snapshot:
        """The tensors' values at this point of the current stream; `state` must not be changed afterwards."""
        if self._closed:
            raise RuntimeError("the checkpoint writer is closed")
        self._collect()
        checkpoint.refuse_foreign([model.name, *model.small])
        manifest, copy = checkpoint.manifest_of(state), self._free_copy()
        taken = Snapshot(state.step, copy.take([model.tensors, state.tensors]), model, manifest, copy)
        self._taken.append(taken)
        return taken

    def write(
        self,
        snapshot: Snapshot,
        *,
        keep: int,
        best_step: int | None,
        stable_step: int | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        """As `save_checkpoint` would, as soon as it is copied and the one before is written. `values`: what is known only now,
        in plain JSON."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; the newest checkpoint is always kept")
        if snapshot not in self._taken:
            raise ValueError(f"the snapshot of step {snapshot.step} is already written or dropped")
        self._taken.remove(snapshot)
        if snapshot.event is None:
            self._require_finite(snapshot)
        snapshot.keep, snapshot.beside = keep, (best_step, stable_step)
        snapshot.manifest["values"] |= values or {}
        self._in_flight.append(snapshot)
        self._queue.put(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """It is not to be written; its memory is free for the next."""
        if snapshot not in self._taken:
            raise ValueError(f"the snapshot of step {snapshot.step} is already being written")
        self._taken.remove(snapshot)

    def finished(self) -> list[Written]:
        """What is on disk since the last call. Raises what the thread raised."""
        self._collect()
        done, self._done = self._done, []
        return done

    def wait(self) -> list[Written]:
        """Until everything is on disk that `write` was called for."""
        while self._in_flight:
            self._wait_for_oldest()
        return self.finished()

    def close(self) -> None:
        """End the thread. What is not written yet is lost: `wait()` before, or leave by the `with`, which waits."""
        if os.getpid() != self._owner:  # a forked data worker that unwinds has no say over its parent's checkpoints
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)
        self._taken.clear()
        self._in_flight.clear()
        for copy in self._copies:
            with contextlib.suppress(RuntimeError):  # CUDA's, when it is CUDA that has failed
                copy.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """`finished()` tells afterwards what was written meanwhile."""
        if os.getpid() != self._owner:
            return
        try:
            if kind is None:
                self._done = self.wait()
            elif issubclass(kind, Exception):
                # What went wrong in the run is what to report. RuntimeError: also CUDA's, when the copy itself has failed.
                with contextlib.suppress(PronghornError, RuntimeError):
                    self._done = self.wait()
        finally:
            self.close()

    def _collect(self) -> None:
        if self._hung and not self._closed:
            raise self._hung
        while self._in_flight and self._in_flight[0].written.done():
            self._done.append(self._in_flight.popleft().written.result())

    def _wait_for_oldest(self) -> None:
        self._collect()
        if not self._in_flight:
            return
        oldest = self._in_flight[0]
        patience = SILENT_S + oldest.copy.size / SLOWEST_DISK
        try:
            oldest.written.exception(patience)
        except TimeoutError:
            self._hung = EnvironmentFault(
                f"checkpoint-{oldest.step} is not written",
                where=str(self._run),
                why=f"the disk has not responded for {patience:.0f} s",
                fix=f"check the disk; then {checkpoint.what_resumes(self._run)}",
            )
        self._collect()

    def _free_copy(self) -> Copy:
        """Waits only if every copy is on its way to the disk."""
        while True:
            in_use = [snapshot.copy for snapshot in (*self._taken, *self._in_flight)]
            size = max(copy.size for copy in self._copies)
            usable = self._copies if 2 * size <= TWO_COPIES_UP_TO else self._copies[:1]
            free = next((copy for copy in usable if copy not in in_use), None)
            if free is not None:
                return free
            if not self._in_flight:
                raise RuntimeError("no memory for another snapshot: earlier snapshots are neither written nor dropped")
            self._wait_for_oldest()

    def _require_finite(self, snapshot: Snapshot) -> None:
        if broken := snapshot.copy.not_finite():
            raise refused_checkpoint(snapshot.step, broken, str(self._run))

    # The thread

    def _work(self) -> None:
        """At the run's own priority: a lower one would make the run wait for whoever holds Python's lock and has no core."""
        while (snapshot := self._queue.get()) is not None and not (self._closed or self._hung):
            try:
                snapshot.written.set_result(self._write(snapshot))
            except BaseException as error:  # noqa: BLE001  (the run raises it)
                snapshot.written.set_exception(error)

    def _write(self, snapshot: Snapshot) -> Written:
        snapshot.copy.settle()
        self._require_finite(snapshot)
        began, model, (weights, state) = time.perf_counter(), snapshot.model, snapshot.copy.places

        def fill(folder: Path) -> None:
            for name, content in model.small.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            save_file(weights, folder / model.name, dict(model.metadata) if model.metadata else None)
            save_file(state, folder / TENSORS)

        tensors = sum(tensor.nbytes for tensor in (*weights.values(), *state.values()))
        needed, keep, stay = tensors + sum(map(len, model.small.values())), snapshot.keep, snapshot.beside
        path = checkpoint.write_checkpoint(self._run, snapshot.manifest, fill, keep=keep, beside=stay, needed_bytes=needed)
        written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return Written(snapshot.step, path, written, time.perf_counter() - began)
