"""Our Triton kernels, and all those of a piece of work compiled at once, before it runs.

A kernel is compiled when it is first launched, so the first step on a machine waits for one compilation after the other, some
twenty of 0.2 to 0.5 s, while the other cores are idle. `compile_ahead` goes through the work once with every launch turned into
a compilation in a thread of its own (most of it is outside Python's lock, in LLVM and ptxas). Results of before, on disk, are
used as ever. The C code that launches a kernel is compiled with it: up to Triton 3.6 there is some for every signature, and it
would be made at the first launch, 0.2 s each.

What the kernels would have written is not there meanwhile. So the work is one whose other operations do not decide by it where
to read or write, which keeps nothing of it, and which runs again afterwards.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any

import triton
from triton.runtime.driver import driver

_pools: list[_Compilers] = []
_modes: list[Any] = []  # Triton's AsyncCompileMode, for the launches of all threads: autograd has one of its own
_elsewhere: list[Callable[[Kernel, Callable[[], Any], dict[str, Any]], Any]] = []  # what becomes of a launch: compile_for.py


class Kernel(triton.JITFunction):  # type: ignore[misc]
    """What `dispatch.jit` makes: launched as `kernel[grid](...)`."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kwargs.setdefault("enable_fp_fusion", True)  # the default today, which Triton 3.10 is to change; nf4.py asks for False
        if _elsewhere:
            return _elsewhere[-1](self, partial(super().run, *args, grid=grid, warmup=True, **kwargs), kwargs)
        if not _modes:
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        compilation = partial(super().run, *args, grid=grid, warmup=True, **kwargs)
        return copy_context().run(_submitted, _modes[-1], compilation)


def _submitted(mode: Any, compilation: Callable[[], Any]) -> Any:
    """In a context of its own: Triton's mode is one thread's, and is to be left by whoever entered it."""
    mode.__enter__()
    kernel = compilation()
    if isinstance(kernel, triton.FutureKernel) and kernel.future is not None and kernel.future.done():
        kernel.result(ignore_errors=True)  # found at once by the next layer, which else looks it up by its source
    return kernel


class _Compilers(ThreadPoolExecutor):
    def submit(self, compilation: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        return super().submit(_with_launcher, partial(compilation, *args, **options))


def _with_launcher(compilation: Callable[[], Any]) -> Any:
    kernel = compilation()
    with suppress(Exception):  # what is wrong with it is said when it is launched
        driver.active.launcher_cls(kernel.src, kernel.metadata)  # its result is on disk, for the first launch
    return kernel


def submit(compilation: Callable[[], Any]) -> bool:
    """For kernels that are not Triton's: a compilation in a thread of its own, if kernels are being compiled ahead."""
    if not _pools:
        return False
    ThreadPoolExecutor.submit(_pools[-1], compilation)  # what is wrong with it is said when it is launched
    return True


def compile_ahead(work: Callable[[], None]) -> None:
    """A kernel that cannot be compiled says so when it is launched."""
    with _Compilers(min(32, os.cpu_count() or 1)) as pool:
        _modes.append(triton.AsyncCompileMode(pool, ignore_errors=True))
        _pools.append(pool)
        try:
            work()
        finally:
            _pools.pop()
            copy_context().run(_modes.pop().__exit__, None, None, None)  # waits for all
