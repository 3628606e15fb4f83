"""Host memory that a GPU reaches by itself: page-locked, so that copies run beside kernels and kernels may read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.errors import EnvironmentFault


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
