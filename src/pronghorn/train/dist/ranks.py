"""Several ranks, as launch.py, `torchrun`, Slurm or Kubernetes starts them: a process each, joined by torch.distributed.

Sums of tensors go over NCCL where every rank of a machine has a GPU of its own, and over gloo otherwise; numbers and texts go
over gloo, as bytes of JSON. A rank that fails leaves its message in the store that all of them found each other by and ends;
the others end with it, with the same exit code. A rank that was killed, is stopped or hangs is found by heartbeat.py.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pronghorn.errors import CommandError, EndedElsewhere, EnvironmentFault, HealthStop, Interrupted, PronghornError
from pronghorn.train.dist.folder_store import PLACE, FolderStore, tell
from pronghorn.train.dist.heartbeat import Peer, Watch
from pronghorn.train.dist.world import Pending, World

T = TypeVar("T")
# torch's own limit for a collective. It cannot tell a rank that hangs from one that works alone (answers to held-out rows) while
# the others wait for it over gloo; heartbeat.py can. Over NCCL they wait at most while rank 0 saves.
PATIENCE, NCCL_PATIENCE = timedelta(hours=2), timedelta(minutes=30)
MEETING = timedelta(minutes=5)
LOOK = timedelta(seconds=1)  # between two looks at whether there is still something to wait for
ALSO = 5.0  # seconds in which rank 0 would fail in the same way
SAVED = 600.0  # seconds for rank 0 to save where all stop: an agent kills what is left 30 s after the first rank has ended
SMALL = 1 << 18  # elements: smaller tensors are summed together


# torch 2.13 warns of the old names, which earlier versions have alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join() -> Ranks:
    """Finds the other ranks in the folder that launch.py made, or by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    place = os.environ.get(PLACE, "")
    try:
        store, torch_store, rank, size = _in_folder(place) if place else _over_tcp()
        peers = _peers(store, rank, size)
        backend = "cpu:gloo,cuda:nccl" if all_different([peer.gpu for peer in peers]) else "gloo"
        dist.init_process_group(backend, store=torch_store, rank=rank, world_size=size, timeout=PATIENCE)
        _limit_nccl(dist.group.WORLD, backend)
    except (RuntimeError, ValueError, OSError) as error:
        variables = "check RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start with torchrun"
        raise EnvironmentFault(
            what="the ranks could not connect to each other",
            why=str(error).split("\n", 1)[0],
            fix=f"set TMPDIR to a folder on a local disk; {place} is on none, or is full" if place else variables,
        ) from error
    return Ranks(store, rank, peers, backend)


def _limit_nccl(group: Any, backend: str) -> None:
    """A host that waits for its GPU uses CPU, as one that works does, so heartbeat.py cannot see a collective of NCCL that does
    not end."""
    if "nccl" in backend:
        group._get_backend(torch.device("cuda"))._set_default_timeout(NCCL_PATIENCE)


def _in_folder(place: str) -> tuple[Any, Any, int, int]:
    torch_store = FileStore(f"{place}/torch", -1)  # -1: whoever made the folder removes it
    return FolderStore(place), torch_store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _over_tcp() -> tuple[Any, Any, int, int]:
    rank, size, here = (int(os.environ.get(name, "-1")) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if rank == 0 and size in (here, 1) and not _has_agent():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, port), family=family).detach()  # torch would listen on all interfaces
        store = TCPStore(address, port, size, is_master=True, timeout=MEETING, multi_tenant=True, master_listen_fd=listening)
    else:
        store, rank, size = next(iter(rendezvous("env://", timeout=MEETING)))
    return store, PrefixStore("pronghorn", store), rank, size


def _has_agent() -> bool:
    """torchrun, which keeps the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _peers(store: Any, rank: int, size: int) -> list[Peer]:
    """Schedulers show a process all GPUs of its machine, or its own one."""
    gpu, host = "", socket.gethostname()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        gpu = f"{host} {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    store.set(f"peer-{rank}", json.dumps(Peer(gpu, host, f"{host} {os.environ.get('GROUP_RANK', '')}")))
    return [Peer(*json.loads(peer)) for peer in store.multi_get([f"peer-{other}" for other in range(size)])]


def all_different(gpus: Sequence[str]) -> bool:
    """Whether every rank has a GPU that no other has."""
    return all(gpus) and len(set(gpus)) == len(gpus)


class Ranks(World):
    """`with join() as world:` until the run is over."""

    _group: dist.ProcessGroup | None = None  # all ranks

    def __init__(self, store: Any, rank: int, peers: Sequence[Peer], backend: str) -> None:
        self.rank, self.size, self.backend = rank, len(peers), backend
        self.captures = self.ordered = "nccl" in backend  # NCCL has one stream; gloo has threads
        self._store, self._given_up = store, False
        self._before_parting: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._watch = Watch(store, rank, peers, agent=isinstance(store, FolderStore) or _has_agent())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        raised = error
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
            error = self._ended_elsewhere(str(error))  # a collective of FSDP2, which knows no `together`
        try:
            if error is None:
                self.wait()  # an error of another rank at the very end is everybody's
        finally:
            try:
                with suppress(RuntimeError):  # the store may be gone with rank 0
                    self._leave(error)
            finally:
                self._watch.leave()
                self._disconnect()
                self._watch.outlast(ALSO)
        if error is not None and error is not raised:
            raise error from raised

    def _disconnect(self) -> None:
        """From here on the others notice. A sum that was given up is left behind."""
        while self._before_parting:
            if (work := self._before_parting.pop()()) is not None:
                work()
        if dist.is_initialized() and not self._given_up:
            dist.destroy_process_group()

    def _leave(self, error: BaseException | None) -> None:
        """Tells the others why. Where all ranks fail in the same way, one of them shows it."""
        if error is None or isinstance(error, EndedElsewhere):
            if error is not None and not error.told:
                tell()
            return
        what, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, PronghornError):
            what, code = error.what, error.exit_code
        last = json.dumps({"what": what, "exit_code": code})
        self._store.set(f"ended-{self.rank}", last)
        together = self.rank > 0 and isinstance(error, (HealthStop, Interrupted))  # as all decided, of which one has to save
        if not together:
            self._watch.failed(what, code)
            self._disconnect()
        as_writer = (
            self.rank and isinstance(error, PronghornError) and self._last_of_writer(SAVED if together else ALSO) == last
        )
        if as_writer and not self._watch.leads():
            raise EndedElsewhere(what, exit_code=code, told=True) from error
        tell()

    def _last_of_writer(self, patience: float) -> str:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if self._store.check(["ended-0"]):
                return str(self._store.get("ended-0").decode())
            if patience == SAVED and self._watch.verdict(0.0):  # it is gone, or something worse came up
                break
            time.sleep(0.1)
        return ""

    # ---- reductions ------------------------------------------------------------------------------------------------------

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        if self.captures and torch.cuda.is_current_stream_capturing():  # nothing runs now, so nobody is waited for
            self._add_up(tensors)
            return
        self._computed(*tensors)
        with self.together(step=True):
            self._add_up(tensors)

    def _add_up(self, tensors: Sequence[Tensor]) -> None:
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel() >= SMALL and tensor.is_contiguous():
                self._sum(tensor)
            else:
                kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for members in kinds.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in members])
            self._sum(flat)
            for tensor, part in zip(members, flat.split([tensor.numel() for tensor in members]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def total(self, *numbers: float) -> tuple[float, ...]:
        with self.together():
            sums = torch.tensor(numbers, dtype=torch.float64)
            self._sum(sums)
            return tuple(sums.tolist())

    def largest(self, number: int) -> int:
        with self.together():
            found = torch.tensor(number)
            self._sum(found, dist.ReduceOp.MAX)
            return int(found)

    def _sum(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        if tensor.is_cuda and self.captures:  # on the stream that works, and not on one of torch's own
            dist.all_reduce(tensor, how, group=self._group)
        else:
            self.finish(dist.all_reduce(tensor, how, group=self._group, async_op=True), tensor)

    def finish(self, work: dist.Work, tensor: Tensor) -> None:
        """Waits for what was begun with `async_op`, or, over NCCL, lets the stream wait; and no longer than the run goes on."""
        if tensor.is_cuda and self.captures:
            work.wait()
            return
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error it ended with; none where it ended between the timeout and this look
                    return
                self._check()

    def _check(self) -> None:
        try:
            self._watch.check()
        except EndedElsewhere as ended:
            self._given_up = True
            atexit.register(os._exit, ended.exit_code)  # not with the thread of gloo's that is still in the collective
            atexit.register(sys.stdout.flush)
            raise

    def joined(self, rows: list[str]) -> list[str]:
        return [row for rank in range(self.size) for row in self.sent_by(rank, lambda: rows)]

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        self._computed(part)
        with self.together():
            if not self._staged(whole):
                return _Begun(self, _all_gather(whole, part, group=self._group, async_op=True), whole)
            there = torch.empty_like(whole, device="cpu")
            self.finish(_all_gather(there, part.cpu(), group=self._group, async_op=True), there)
            whole.copy_(there)
        return Pending()

    def scatter_sum(self, part: Tensor, whole: Tensor) -> Pending:
        self._computed(whole)
        with self.together():
            if not self._staged(whole):
                return _Begun(self, _reduce_scatter(part, whole, group=self._group, async_op=True), part)
            there = torch.empty_like(part, device="cpu")
            self.finish(_reduce_scatter(there, whole.cpu(), group=self._group, async_op=True), there)
            part.copy_(there)
        return Pending()

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        width = rows.shape[1]
        self._computed(rows)
        with self.together():
            content = (rows.cpu() if self._staged(rows) else rows).contiguous()
            found = content.new_empty(sum(received), width)
            work = dist.all_to_all_single(found, content, list(received), list(sent), group=self._group, async_op=True)
            self.finish(work, found)
            return found.to(rows.device)

    def _staged(self, tensor: Tensor) -> bool:
        """Whether it goes by way of the host: ranks that share a GPU have gloo alone, which knows no such sums on it."""
        return tensor.is_cuda and self.backend == "gloo"

    def _computed(self, *tensors: Tensor) -> None:
        """What goes by way of the host waits for its GPU first: that is no waiting for others, however long it takes."""
        if any(self._staged(tensor) for tensor in tensors):
            torch.cuda.current_stream().synchronize()

    def wait(self) -> None:
        self.largest(0)

    def neighbours(self, size: int) -> World:
        return self if size == self.size else _Neighbours(self, size) if size > 1 else World()

    def before_parting(self, work: Callable[[], None]) -> None:
        self._before_parting.append(weakref.WeakMethod(work))

    # ---- what one rank does ----------------------------------------------------------------------------------------------

    @contextmanager
    def writer_first(self) -> Iterator[None]:
        if not self.writes:
            self.on_writer(lambda: None)
        yield
        if self.writes:
            self.on_writer(lambda: None)

    def require_same(self, facts: Callable[[], Mapping[str, str]]) -> None:
        mine = dict(facts())
        expected = self.on_writer(lambda: mine)
        told = self.joined(
            [
                f"rank {self.rank}: {name} {mine.get(name)}, on rank 0 {expected.get(name)}"
                for name in sorted(mine.keys() | expected.keys())
                if mine.get(name) != expected.get(name)
            ]
        )
        if told:
            raise CommandError(
                what="the ranks of this run differ",
                why="; ".join(told),
                fix="start every rank with the same recipe, files and versions",
            )

    def sent_by(self, rank: int, work: Callable[[], T]) -> T:
        content = work() if self.rank == rank else None
        data = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        with self.together():
            length = torch.tensor(len(data))
            self.finish(dist.broadcast(length, group=self._group, group_src=rank, async_op=True), length)
            if self.rank != rank:
                data = torch.empty(int(length), dtype=torch.uint8)
            self.finish(dist.broadcast(data, group=self._group, group_src=rank, async_op=True), data)
        result: T = json.loads(data.numpy().tobytes())
        return result

    # ---- when a rank is gone -----------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, *, step: bool = False) -> Iterator[None]:
        """Around what ranks do together. `step`: the run is past what may take long at its start."""
        began = time.perf_counter()
        try:
            with self._watch.waiting(step=step):
                yield
            self.waited += time.perf_counter() - began
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch has no kind of its own for gloo's "connection closed by peer"
            raise self._ended_elsewhere(str(error)) from error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise self._ended_elsewhere(str(error)) from error

    def _ended_elsewhere(self, why: str) -> EndedElsewhere:
        cause = re.sub(r"^\[[^]]*\] *", "", why.split("\n", 1)[0]).split(". ")[0]  # without a place in gloo's source
        return self._watch.broken(cause, ALSO)


class _Neighbours(Ranks):
    """A group of consecutive ranks, with a process group of its own; time waited and failures are those of all ranks."""

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._group = ranks, dist.new_subgroups(size, timeout=PATIENCE)[0]
        _limit_nccl(self._group, ranks.backend)
        self.rank, self.size, self.backend = ranks.rank % size, size, ranks.backend
        self.captures = self.ordered = ranks.captures
        self._before_parting = ranks._before_parting

    @contextmanager
    def together(self, *, step: bool = False) -> Iterator[None]:
        with self._ranks.together(step=step):
            yield

    def _check(self) -> None:
        self._ranks._check()


class _Begun(Pending):
    def __init__(self, ranks: Ranks, work: dist.Work | None, tensor: Tensor) -> None:
        self._ranks, self._work, self._tensor = ranks, work, tensor

    def wait(self) -> None:
        """A buffer made once: gloo writes its result into it, on every call."""
        work, self._work = self._work, None
        if work is not None:
            with self._ranks.together():
                self._ranks.finish(work, self._tensor)
