"""Which way an op runs: Triton on a GPU, plain torch elsewhere.

`jit`, `triton` and `tl` exist on every machine, so that kernel files import everywhere; the kernels themselves are only
called where `use_triton` says so. With TRITON_INTERPRET=1 set both when this file is imported and when an op is called,
the Triton kernels run on CPU tensors through Triton's interpreter: slow, and meant for tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

triton: Any
tl: Any
try:
    import triton as _triton
    import triton.language as _tl

    triton, tl = _triton, _tl
    HAS_TRITON = True
except ImportError:  # CPU-only builds and platforms without Triton: names that decorators and constants can use
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=lambda value: value)
    HAS_TRITON = False

_said: set[str] = set()


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


# Triton decides at decoration time whether a kernel is compiled or interpreted, so the answer is kept from import.
KERNELS_ARE_INTERPRETED = HAS_TRITON and _interpreting()


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit` with a type: the result is launched as `kernel[grid](...)`, or compiled ahead of that."""
    if not HAS_TRITON or _interpreting():
        return triton.jit(function)
    from pronghorn.kernels.compile_ahead import Kernel  # needs Triton

    return Kernel(function)


def compile_kernels(work: Callable[[], None]) -> None:
    """All kernels of this work at once, where there are any; the work itself is gone through without them."""
    if HAS_TRITON and not _interpreting():
        from pronghorn.kernels.compile_ahead import compile_ahead

        compile_ahead(work)


def compile_elsewhere(compilation: Callable[[], Any]) -> bool:
    """Whether kernels are being compiled ahead: then this is done in a thread, too, and nothing is to be launched."""
    if not HAS_TRITON or _interpreting():
        return False
    from pronghorn.kernels.compile_ahead import submit

    return submit(compilation)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on this tensor runs through its Triton kernels; they compute in fp32, so float64 never does."""
    if tensor.dtype == torch.float64:
        return False
    if tensor.is_cuda:
        return HAS_TRITON
    return KERNELS_ARE_INTERPRETED and _interpreting() and tensor.device.type == "cpu"


def say_once(text: str) -> None:
    """One line on stderr, once a process: a fallback is always told, and never in every layer."""
    if text not in _said:
        _said.add(text)
        print(text, file=sys.stderr, flush=True)


def keeps_graph() -> bool:
    """Whether the backward that runs now leaves the graph for another one (`retain_graph=True`): what forward left for it must
    stay as it is. Where torch cannot tell, it does not, and the second backward says so."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return asked is not None and bool(asked())


@cache
def _capability_of(index: int) -> tuple[int, int]:
    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def cuda_capability(device: torch.device | str) -> tuple[int, int]:
    """(9, 0) on Hopper; (0, 0) where the device is not a CUDA one, so that comparisons with a minimum just fail."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0, 0
    return _capability_of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _processors_of(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def processor_count(device: torch.device | str) -> int:
    """Multiprocessors of the GPU, for grids of a fixed size; 2 for the interpreter, so that tests see more than one."""
    device = torch.device(device)
    if device.type != "cuda":
        return 2
    return _processors_of(torch.cuda.current_device() if device.index is None else device.index)
