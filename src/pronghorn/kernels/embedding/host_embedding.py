"""Rows of a matrix in pinned host memory, gathered by the GPU over the host link.

    out_TD = weight_VD[ids_T]          T = tokens, D = model width, V = vocabulary

Frozen embeddings are read a few rows at a time: 16,384 tokens of an 8B model are 134 MB of 1.05 GB, 2.4 ms over a link of
55 GB/s. So where memory is short, the matrix can stay on the host. The kernel reads it in place (pinned memory has a device
address) and can be captured in a CUDA graph.

`seen_by_gpu` returns pinned memory as a CUDA tensor, which any torch operation reads over the link.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.host_memory import device_shift

BLOCK = 4096  # columns a program: four 16-byte loads a thread at 4 warps, all in flight together
WARPS = 4


def host_embedding_reference(weight_VD: Tensor, ids_T: Tensor) -> Tensor:
    return weight_VD[ids_T]


@jit
def _kernel(weight, ids, out, D: tl.constexpr, BLOCK: tl.constexpr):
    PARTS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    token = (program // PARTS).to(tl.int64)
    column = (program % PARTS) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    values = tl.load(weight + row * D + column, mask=column < D)
    tl.store(out + token * D + column, values, mask=column < D)


def host_embedding(weight_VD: Tensor, ids_T: Tensor) -> Tensor:
    """The rows, on the ids' device. No gradient: the matrix is frozen. Ids must be rows of it."""
    if not use_triton(ids_T):
        return torch.nn.functional.embedding(ids_T, weight_VD)
    D, flat_T = weight_VD.shape[1], ids_T.reshape(-1)
    out_TD = torch.empty(len(flat_T), D, dtype=weight_VD.dtype, device=ids_T.device)
    block = min(BLOCK, triton.next_power_of_2(D))
    _kernel[(len(flat_T) * triton.cdiv(D, block),)](weight_VD, flat_T, out_TD, D=D, BLOCK=block, num_warps=WARPS)
    return out_TD.view(*ids_T.shape, D)


class _Address:
    """Memory at a device address, in numba's array interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def seen_by_gpu(host: Tensor) -> Tensor:
    """A contiguous tensor in pinned memory, as one of the current GPU: the same bytes, which must outlive it."""
    assert host.is_contiguous()
    address = host.data_ptr() + device_shift(host, torch.device("cuda"))
    flat = torch.as_tensor(_Address(address, host.nbytes), device="cuda")
    return flat.view(host.dtype).view(host.shape)
