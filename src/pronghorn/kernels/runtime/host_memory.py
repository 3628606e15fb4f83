"""Where a kernel finds pinned host memory: tensors of it are used in place, over the link, without a copy of them anywhere.

A GPU reads and writes page-locked memory of the host as its own, at the rate of the link: 128 bytes a warp are one request, and
with some hundred programs under way there are more of them in flight than its latency needs (one microsecond at 55 GB/s are 55
KB; the update of AdamW has some megabytes). Who works on every number once, and has nothing else to do meanwhile, gains nothing
from copying it to the device first.

On Linux the device sees registered memory under the host's own address. Elsewhere it may not (Windows, and so WSL), so the
driver is asked: Triton hands every kernel the device's address of a tensor, and refuses one that is not pinned.
"""

from __future__ import annotations

import torch

from pronghorn.kernels.runtime.dispatch import jit, tl, use_triton


@jit
def _address_kernel(memory, address):  # type: ignore[no-untyped-def]
    tl.store(address, memory.to(tl.int64))


def device_shift(memory: torch.Tensor, device: torch.device) -> int:
    """Bytes from the host's address of pinned memory to the device's: 0 as a rule. Waits for the device."""
    address = torch.zeros((), dtype=torch.int64, device=device)
    if not use_triton(address):
        return 0
    _address_kernel[(1,)](memory, address)
    return int(address) - memory.data_ptr()
