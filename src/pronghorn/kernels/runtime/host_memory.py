"""Pinned host memory, which copies beside kernels need, and its device addresses: kernels use it in place, over the link.

A GPU accesses page-locked host memory at the link's rate: 128 bytes a warp are one request, and some hundred programs have more
requests in flight than its latency needs (one microsecond at 55 GB/s is 55 KB; AdamW's update has some megabytes). A kernel
that touches every number once gains nothing from copying it to the device first.

On Linux the device sees registered memory at the host's address. Elsewhere it may not (Windows, WSL), so the driver is asked:
Triton passes every kernel the device address of a tensor, and rejects one that is not pinned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import EnvironmentFault
from pronghorn.kernels.runtime.dispatch import jit, tl, use_triton


@jit
def _address_kernel(memory, address):
    tl.store(address, memory.to(tl.int64))


def device_shift(memory: torch.Tensor, device: torch.device) -> int:
    """Offset of pinned memory's device address from its host address, usually 0. Synchronizes."""
    address = torch.zeros((), dtype=torch.int64, device=device)
    if not use_triton(address):
        return 0
    _address_kernel[(1,)](memory, address)
    return int(address) - memory.data_ptr()


def pin(memory: Tensor, otherwise: str) -> None:
    """By registration: torch's own pinned memory is rounded up to a power of two (20 GB would take 32).
    `otherwise`: what to change in the recipe where the memory is not to be had."""
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if error:
        raise EnvironmentFault(
            what=f"cannot pin {memory.nbytes / 1e9:.1f} GB of host RAM",
            why=f"CUDA error {error}",
            fix=f"free host RAM or raise the locked-memory limit (ulimit -l); or {otherwise}",
        )


def unpin(memory: Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies under way still use it
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(memory.data_ptr())
