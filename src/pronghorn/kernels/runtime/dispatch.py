"""Chooses how an op runs: Triton on a GPU, plain torch elsewhere.

`jit`, `triton` and `tl` exist on every machine, so that kernel files import everywhere; the kernels themselves are only
called where `use_triton` says so. With TRITON_INTERPRET=1 set both when this file is imported and when an op is called,
the Triton kernels run on CPU tensors through Triton's interpreter: slow, and meant for tests.

`CHIPS` is the only place that knows what a GPU offers: tiles are chosen by `chip_of(device)`. Within `as_on(chip)` every op
behaves as on that chip, wherever its tensors are: for compiling kernels without the chip (benchmarks/compile_for.py).

Within `dry_run(target)` ops on torch's meta device take the path of the target's chip, allocate what they would allocate there
and launch nothing: memory is planned this way (memory/dry_run.py). Code that asks whether a tensor is on a GPU calls `is_gpu`;
code that compares addresses calls `address`, because meta tensors have none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from pronghorn.kernels.runtime.work import launched

triton: Any
tl: Any
try:
    import triton as _triton
    import triton.language as _tl

    triton, tl = _triton, _tl
    HAS_TRITON = True
except ImportError:  # CPU-only builds and platforms without Triton: names that decorators and constants can use
    triton = SimpleNamespace(cdiv=lambda x, y: -(-x // y), next_power_of_2=lambda n: 1 << max(0, n - 1).bit_length())
    tl = SimpleNamespace(constexpr=lambda value: value)
    HAS_TRITON = False

_said: set[str] = set()


class Chip(NamedTuple):
    """Resources of a multiprocessor, from the tables in NVIDIA's CUDA programming guide."""

    capability: tuple[int, int]
    gpus: str
    shared: int  # bytes of shared memory per program
    all_shared: int  # and all of them together; each takes 1 KB more than it asks for
    warps: int  # of all of them together

    @property
    def sm(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    @property
    def large(self) -> bool:
        """Whether shared memory holds tiles of 128 x 256 in three stages (144 KB), from which these chips' tensor cores
        read."""
        return self.shared >= 200 * 1024


CHIPS = {
    chip.capability: chip
    for chip in (
        Chip((8, 0), "A100", 163 * 1024, 164 * 1024, 64),
        Chip((8, 6), "RTX 3090, A10", 99 * 1024, 100 * 1024, 48),
        Chip((8, 9), "RTX 4090, L4, L40S", 99 * 1024, 100 * 1024, 48),
        Chip((9, 0), "H100, H200", 227 * 1024, 228 * 1024, 64),
        Chip((10, 0), "B200", 227 * 1024, 228 * 1024, 64),
        Chip((12, 0), "RTX 5090, RTX PRO 6000", 99 * 1024, 100 * 1024, 48),
    )
}
HOPPER, BLACKWELL = CHIPS[9, 0], CHIPS[10, 0]
_SMALLEST = CHIPS[8, 6]


class Target(NamedTuple):
    """The GPU of a dry run."""

    chip: Chip
    flash4: bool = False  # whether flash-attn-4 is installed there
    processors: int = 132  # an H200's: how many partial sums there are depends on it, a thousandth of a layer's bytes


_as_on: list[Target] = []
_dry: list[Target] = []


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


# Triton decides at decoration time whether a kernel is compiled or interpreted, so the answer is kept from import.
KERNELS_ARE_INTERPRETED = HAS_TRITON and _interpreting()


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` with a type: the result is launched as `kernel[grid](...)`, or compiled ahead of that."""
    if not HAS_TRITON:
        return _NoKernel()
    if _interpreting():
        return triton.jit(function)
    from pronghorn.kernels.runtime.compile_ahead import Kernel  # needs Triton

    return Kernel(function)


class _NoKernel:
    """A kernel where there is no Triton: only dry runs launch it."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        assert _dry, "no Triton on this machine"
        return lambda *args, **kwargs: launched(args)


def compile_kernels(work: Callable[[], None]) -> None:
    """Compiles all kernels of this work in parallel; the work runs once without them."""
    if HAS_TRITON and not _interpreting():
        from pronghorn.kernels.runtime.compile_ahead import compile_ahead

        compile_ahead(work)


def compile_elsewhere(compilation: Callable[[], Any]) -> bool:
    """Whether kernels are being compiled ahead: then this runs in a thread, and nothing may be launched."""
    if not HAS_TRITON or _interpreting():
        return False
    from pronghorn.kernels.runtime.compile_ahead import submit

    return submit(compilation)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on this tensor runs through its Triton kernels; they compute in fp32, so float64 never does."""
    if tensor.dtype == torch.float64:
        return False
    if tensor.is_meta:
        return bool(_dry)
    if tensor.is_cuda or (_as_on and not _dry):
        return HAS_TRITON
    return KERNELS_ARE_INTERPRETED and _interpreting() and tensor.device.type == "cpu"


def say_once(text: str) -> None:
    """One line on stderr, once per process: every fallback is reported, but not by every layer."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)


def keeps_graph() -> bool:
    """Whether the running backward keeps the graph (`retain_graph=True`), so that saved tensors must stay intact. False where
    torch cannot tell; a second backward then raises."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is not None and bool(asked())


@cache
def _capability_of(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def cuda_capability(device: torch.device | str) -> tuple[int, int]:
    """(9, 0) on Hopper; (0, 0) without CUDA, so that comparisons with a minimum fail."""
    device = torch.device(device)
    if _as_on:
        return _as_on[-1].chip.capability
    if device.type != "cuda":
        return 0, 0
    return _capability_of(torch.cuda.current_device() if device.index is None else device.index)


def on_gpu(device: torch.device | str) -> bool:
    return bool(_as_on) or torch.device(device).type == "cuda"


def is_gpu(tensor: torch.Tensor) -> bool:
    """Whether this tensor is on a GPU, or on `meta` in a dry run for one."""
    return tensor.is_cuda or (tensor.is_meta and bool(_dry))


def address(tensor: torch.Tensor) -> int:
    """Where its first element lies. On `meta`, where every address is 0: numbers that differ as addresses would."""
    if not tensor.is_meta:
        return tensor.data_ptr()
    return int(tensor.untyped_storage()._cdata) * 256 + int(tensor.storage_offset()) * tensor.element_size()


def chip_of(device: torch.device | str) -> Chip:
    """An unknown chip counts as the newest known one that is not newer. The interpreter uses small tiles."""
    capability = cuda_capability(device)
    return CHIPS[max((known for known in CHIPS if known <= capability), default=_SMALLEST.capability)]


def pretended() -> Target | None:
    """The target of `as_on` or `dry_run`."""
    return _as_on[-1] if _as_on else None


@contextmanager
def as_on(chip: Chip) -> Iterator[None]:
    """Ops launch what they would launch on this chip; the kernels cannot run (benchmarks/compile_for.py)."""
    _as_on.append(Target(chip))
    try:
        yield
    finally:
        _as_on.pop()


@contextmanager
def dry_run(target: Target) -> Iterator[None]:
    """Ops on `meta` allocate what they allocate on this target, and launch nothing."""
    launches: Any = nullcontext
    if HAS_TRITON and not _interpreting():
        from pronghorn.kernels.runtime.compile_ahead import without_launches as launches
    _as_on.append(target)
    _dry.append(target)
    try:
        with launches():
            yield
    finally:
        _dry.pop()
        _as_on.pop()


def dry() -> bool:
    return bool(_dry)


@cache
def _processors_of(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processor_count(device: torch.device | str) -> int:
    """Multiprocessors of the GPU, for fixed-size grids; 2 for the interpreter, so that tests cover more than one."""
    device = torch.device(device)
    if device.type != "cuda":
        return _as_on[-1].processors if _dry else 100 if _as_on else 2
    return _processors_of(torch.cuda.current_device() if device.index is None else device.index)
