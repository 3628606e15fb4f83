"""Several ranks, as `torchrun` (or Slurm, or Kubernetes) starts them: one process each, joined by torch.distributed.

Sums of tensors go over NCCL where every rank of a machine has a GPU of its own, and over gloo otherwise; numbers and texts go
over gloo, as bytes of JSON. A rank that fails leaves its message in the store that all of them found each other by and ends;
the others' next reduction then fails, and they end with the exit code of the first. A rank that was killed leaves no message.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pronghorn.errors import CommandError, EndedElsewhere, EnvironmentFault, PronghornError
from pronghorn.train.world import Pending, World

T = TypeVar("T")
# For a rank that waits while another one works alone (answers to held-out rows). A rank that ended is noticed at once.
PATIENCE = timedelta(hours=2)
ALSO = timedelta(seconds=5)  # in which rank 0 would fail in the same way
SMALL = 1 << 18  # elements: smaller tensors are summed together


# torch 2.13 warns of the old name, which earlier versions have alone.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def join() -> Ranks:
    """Finds the other ranks by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    backend = "gloo"
    if torch.cuda.is_available():
        local, on_this_machine = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        torch.cuda.set_device(local % torch.cuda.device_count())
        if on_this_machine <= torch.cuda.device_count():
            backend = "cpu:gloo,cuda:nccl"
    try:
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(minutes=5))))
        dist.init_process_group(backend, store=PrefixStore("pronghorn", store), rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            what="the ranks did not find each other",
            why=str(error).split("\n", 1)[0],
            fix="check RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start with torchrun",
        ) from error
    return Ranks(store, rank, size, backend)


class Ranks(World):
    """`with join() as world:` until the run is over."""

    def __init__(self, store: Any, rank: int, size: int, backend: str) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self._store = store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()  # an error of another rank at the very end is everybody's
        finally:
            with suppress(RuntimeError):  # the store may be gone with rank 0
                self._leave(error)
            if dist.is_initialized():
                dist.destroy_process_group()

    def _leave(self, error: BaseException | None) -> None:
        """Tells the others why. Where all ranks fail in the same way, one of them shows it."""
        if error is None:
            return
        what, code = f"{type(error).__name__}: {error}", 1
        if isinstance(error, PronghornError):
            what, code = error.what, error.exit_code
        follows = isinstance(error, EndedElsewhere)
        last = json.dumps({"what": what, "exit_code": code, "follows": follows})
        self._store.set(self._key(self.rank), last)
        if dist.is_initialized():
            dist.destroy_process_group()  # from here on the others notice
        if self.rank and isinstance(error, PronghornError) and not follows:
            self._store.wait([self._key(0)], ALSO)
            if self._store.get(self._key(0)).decode() == last:
                raise EndedElsewhere(what, exit_code=code, told=True) from error

    # ---- reductions ------------------------------------------------------------------------------------------------------

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        with self.together():
            kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
            for tensor in tensors:
                if tensor.numel() >= SMALL and tensor.is_contiguous():
                    dist.all_reduce(tensor)
                else:
                    kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
            for members in kinds.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in members])
                dist.all_reduce(flat)
                for tensor, part in zip(members, flat.split([tensor.numel() for tensor in members]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def total(self, *numbers: float) -> tuple[float, ...]:
        with self.together():
            sums = torch.tensor(numbers, dtype=torch.float64)
            dist.all_reduce(sums)
            return tuple(sums.tolist())

    def largest(self, number: int) -> int:
        with self.together():
            found = torch.tensor(number)
            dist.all_reduce(found, dist.ReduceOp.MAX)
            return int(found)

    def joined(self, rows: list[str]) -> list[str]:
        return [row for rank in range(self.size) for row in self.sent_by(rank, lambda: rows)]

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        with self.together():
            if not self._staged(whole):
                return _Begun(self, dist.all_gather_into_tensor(whole, part, async_op=True))
            there = torch.empty_like(whole, device="cpu")
            dist.all_gather_into_tensor(there, part.cpu())
            whole.copy_(there)
        return Pending()

    def scatter_sum(self, part: Tensor, whole: Tensor) -> Pending:
        with self.together():
            if not self._staged(whole):
                return _Begun(self, _reduce_scatter(part, whole, async_op=True))
            there = torch.empty_like(part, device="cpu")
            _reduce_scatter(there, whole.cpu())
            part.copy_(there)
        return Pending()

    def _staged(self, tensor: Tensor) -> bool:
        """Whether it goes by way of the host: ranks that share a GPU have gloo alone, which knows no such sums on it."""
        return tensor.is_cuda and self.backend == "gloo"

    def wait(self) -> None:
        self.largest(0)

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
            dist.broadcast(length, rank)
            if self.rank != rank:
                data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, rank)
        result: T = json.loads(data.numpy().tobytes())
        return result

    # ---- when a rank is gone -----------------------------------------------------------------------------------------------

    def _key(self, rank: int) -> str:
        return f"ended-{rank}"

    @contextmanager
    def together(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
            self.waited += time.perf_counter() - began
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch has no kind of its own for gloo's "connection closed by peer"
            raise self._ended_elsewhere(str(error)) from error

    def _ended_elsewhere(self, why: str) -> EndedElsewhere:
        with suppress(RuntimeError):
            for rank in range(self.size):
                if rank != self.rank and self._store.check([self._key(rank)]):
                    left = json.loads(self._store.get(self._key(rank)))
                    if not left["follows"]:
                        return EndedElsewhere(f"rank {rank} ended: {left['what']}", exit_code=left["exit_code"], told=True)
        cause = re.sub(r"^\[[^]]*\] *", "", why.split("\n", 1)[0]).split(". ")[0]  # without a place in gloo's source
        return EndedElsewhere("another rank ended without a message, as a killed process does", why=cause)


class _Begun(Pending):
    def __init__(self, ranks: Ranks, work: Any) -> None:
        self._ranks, self._work = ranks, work

    def wait(self) -> None:
        with self._ranks.together():
            self._work.wait()
