"""CUDA graphs that share one memory pool.

Functions captured together (a forward, then its backward) share what the first leaves for the second. The next capture reuses
memory that no tensor holds, so only one such sequence may be in progress at a time.
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
    """One per process: cuBLAS allocates 33.5 MB for every stream it ever ran on and never frees them."""
    return torch.cuda.Stream(device)


class Graphs:
    def __init__(self, device: torch.device, *, failed: Callable[[Exception], None]) -> None:
        """`failed`: called with the error of a failed capture, after which nothing is captured. It may raise."""
        self.captures = device.type == "cuda"  # until a capture fails
        self.tried = False  # whether the kernels of whatever is captured next ran once
        self._failed = failed
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
            self._stream = _capture_stream(torch.cuda.current_device() if device.index is None else device.index)

    def forget(self) -> None:
        """After the graphs are gone: torch refuses their pool to the next capture."""
        self.tried = False
        if self.captures:
            self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def captured(self, *works: Work) -> list[Work]:
        """Replays of the captured functions; the functions themselves if capture is impossible.

        The first time, they run once eagerly: kernels compile, libraries allocate workspaces, and errors show outside the
        capture. Later shapes use the same kernels, and an eager run beside the first graph's memory would need twice as much.
        If one needs a new kernel, its capture fails and is repeated after an eager run. So is the first: on an H200 the first
        capture of a process failed after one eager run, for unknown reasons, and no later one did.
        """
        if not self.captures:
            return list(works)
        if self.tried:
            try:
                return self.capture(works)
            except RuntimeError as error:
                raise_if_out_of_memory(error)
        for last in (False, True):
            torch.cuda.empty_cache()  # blocks of another stream, which this one cannot use
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
        finally:  # failed work may have launched kernels that add to sums, which are cleared next
            torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self, works: Sequence[Work]) -> list[Work]:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # of the eager run; the graph allocates from its own pool
        replays: list[Work] = []
        for work in works:
            graph = torch.cuda.CUDAGraph()
            # thread_local: a global capture would forbid the loader's threads to pin memory
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    work()
            except BaseException:
                # torch goes on recording allocations into this pool, and refuses it to the next capture.
                self._pool = torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]
                raise
            replays.append(graph.replay)
        return replays


def first_line(error: BaseException) -> str:
    """The first line of the first error: a broken capture ends with a second one that only refers to it."""
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
