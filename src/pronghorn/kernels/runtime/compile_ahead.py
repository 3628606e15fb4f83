"""Compiles all Triton kernels of a piece of work in parallel, before it runs.

Triton compiles a kernel at its first launch, so the first step on a machine waits for some twenty compilations of 0.2 to 0.5 s,
one after the other, while other cores are idle. `compile_ahead` runs the work once with every launch replaced by a compilation
in a thread (most of it is outside Python's lock, in LLVM and ptxas). The disk cache is used as usual. The launcher's C code is
compiled too: up to Triton 3.6 every signature has its own, 0.2 s each at the first launch.

The kernels write nothing in that run. So the work must not depend on their results for where it reads or writes, must keep
nothing of them, and must run again afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import triton
from triton.runtime.driver import driver

from pronghorn.kernels.runtime.work import launched

_pools: list[_Compilers] = []
_modes: list[Any] = []  # Triton's AsyncCompileMode, for the launches of all threads: autograd has one of its own
_elsewhere: list[Callable[[Kernel, partial[Any], dict[str, Any]], Any]] = []  # replaces a launch (benchmarks)


class Kernel(triton.JITFunction):  # type: ignore[misc]
    """The result of `dispatch.jit`: launched as `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Profilers show it as `pronghorn__norm__rms_norm__forward_kernel`: many are called `_forward_kernel`."""
        place = function.__module__.replace("pronghorn.kernels.", "pronghorn.").replace(".", "__")
        super().__init__(function, repr=lambda _: f"{place}__{function.__name__.lstrip('_')}")

    def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> Any:
        kwargs.setdefault("enable_fp_fusion", True)  # the default today, which Triton 3.10 is to change; nf4.py asks for False
        if _elsewhere:
            return _elsewhere[-1](self, partial(super().run, *args, grid=grid, warmup=True, **kwargs), kwargs)
        if not _modes:
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        compilation = partial(super().run, *args, grid=grid, warmup=True, **kwargs)
        return copy_context().run(_submitted, _modes[-1], compilation)


def _submitted(mode: Any, compilation: Callable[[], Any]) -> Any:
    """In its own context: Triton's mode belongs to a thread, which must leave it itself."""
    mode.__enter__()
    kernel = compilation()
    if isinstance(kernel, triton.FutureKernel) and kernel.future is not None and kernel.future.done():
        kernel.result(ignore_errors=True)  # the next layer then finds it at once, without hashing its source
    return kernel


@contextmanager
def without_launches() -> Iterator[None]:
    """Kernels are neither compiled nor launched, but counted."""
    _elsewhere.append(lambda kernel, compilation, options: launched(compilation.args))
    try:
        yield
    finally:
        _elsewhere.pop()


class _Compilers(ThreadPoolExecutor):
    def submit(self, compilation: Callable[..., Any], /, *args: object, **options: object) -> Future[Any]:
        return super().submit(_with_launcher, partial(compilation, *args, **options))


def _with_launcher(compilation: Callable[[], Any]) -> Any:
    kernel = compilation()
    with suppress(Exception):  # its error is raised at launch
        driver.active.launcher_cls(kernel.src, kernel.metadata)  # its result is on disk, for the first launch
    return kernel


def submit(compilation: Callable[[], Any]) -> bool:
    """For other than Triton kernels: compiles in a thread, if kernels are being compiled ahead."""
    if not _pools:
        return False
    ThreadPoolExecutor.submit(_pools[-1], compilation)  # its error is raised at launch
    return True


def compile_ahead(work: Callable[[], None]) -> None:
    """A kernel that does not compile raises its error at launch."""
    with _Compilers(min(32, os.cpu_count() or 1)) as pool:
        _modes.append(triton.AsyncCompileMode(pool, ignore_errors=True))
        _pools.append(pool)
        try:
            work()
        finally:
            _pools.pop()
            copy_context().run(_modes.pop().__exit__, None, None, None)  # waits for all
