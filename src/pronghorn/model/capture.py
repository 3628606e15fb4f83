"""CUDA graphs of pieces of work that are replayed for ever, all out of one memory pool.

Works that are captured together (a forward, then its backward) share what the first leaves for the second. Memory that no
tensor holds after a capture is taken again by the next one: of several such sequences only one may be under way at a time.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence

import torch

from pronghorn.errors import EnvironmentFault

Work = Callable[[], None]


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One for all runs of a process: cuBLAS keeps 33.5 MB for every stream that ever multiplied, and never gives them back."""
    return torch.cuda.Stream(device)


class Graphs:
    def __init__(self, device: torch.device, *, failed: Callable[[Exception], None]) -> None:
        """`failed`: told why a capture did not work; from then on works are not captured any more. It may raise."""
        self.captures = device.type == "cuda"  # until a capture fails
        self.tried = False  # whether the kernels of whatever is captured next ran once
        self._failed = failed
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            self._stream = _capture_stream(torch.cuda.current_device() if device.index is None else device.index)

    def captured(self, *works: Work) -> list[Work]:
        """A graph's replay of each; the works themselves where capture is not possible.

        The first time, they run once before: kernels are compiled, libraries get their workspaces, and whatever is wrong is
        not blamed on the capture. Later shapes need the same kernels, and a trial beside the first graph's memory would need
        twice of it; should one meet a kernel that is not there yet, its capture fails, and is repeated after a trial. So is the
        first: on an H200 the first capture of a process failed after one trial, for whatever reason, and no later one did.
        """
        if not self.captures:
            return list(works)
        if self.tried:
            try:
                return self.capture(works)
            except RuntimeError as error:
                raise_if_out_of_memory(error)
        for last in (False, True):
            torch.cuda.empty_cache()  # blocks of another stream, which a trial on this one cannot use: else both are held
            for work in works:
                self.attempt(work)
            try:
                return self.capture(works)
            except (RuntimeError, EnvironmentFault) as error:
                raise_if_out_of_memory(error)
                if last or isinstance(error, EnvironmentFault):
                    self.captures = False
                    self._failed(error)
                    break
        return list(works)

    def attempt(self, work: Work) -> None:
        """Once, on the stream that captures."""
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # work that ends with an error has launched some of it, which may add to sums that are cleared next
            torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, works: Sequence[Work]) -> list[Work]:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # what a trial used; the graph takes as much out of its own pool
        replays: list[Work] = []
        for work in works:
            graph = torch.cuda.CUDAGraph()
            # thread_local: the loader's threads pin memory meanwhile, which a global capture would forbid them
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                work()
            replays.append(graph.replay)
        return replays


def first_line(error: BaseException) -> str:
    """Of the error that came first: a capture that breaks ends with another, which only says that one came before. CUDA's and
    Triton's have many lines."""
    while before := error.__cause__ or (None if error.__suppress_context__ else error.__context__):
        error = before
    return str(error).strip().split("\n")[0]


def raise_if_out_of_memory(error: BaseException) -> None:
    """A capture that ran out of memory may end with another error, which hides it."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(seen)) from error
        seen = seen.__cause__ or seen.__context__
