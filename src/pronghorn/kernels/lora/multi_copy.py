"""Copies many fp32 matrices, each scaled, into half-precision matrices with strided rows, in one launch.

After an optimizer step the adapters' A and sB go into the buffers of lora_linear.py: 448 small matrices for a 32-layer model
with seven adapters a layer. Separate copies would be 448 launches; here a table on the device lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, use_triton

TILE = 2048  # values a program: 16 a thread with 4 warps, 8 kB read


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """target = source * scale. The source is a contiguous matrix, the target's rows may be strided."""

    source: Tensor
    target: Tensor
    scale: float


@jit
def _copy_kernel(jobs, scales, tiles, source_like, target_like, TILE: tl.constexpr):
    """jobs: [J, 5] int64 of (source address, target address, values, columns, target row stride); tiles: [P, 2] int32 of
    (job, number of the tile in it). The two `like` pointers only carry the dtypes."""
    program = tl.program_id(0)
    number = tl.load(tiles + program * 2).to(tl.int64)
    job = jobs + number * 5
    value = tl.load(tiles + program * 2 + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    source = tl.load(job).to(tl.pointer_type(source_like.dtype.element_ty))
    target = tl.load(job + 1).to(tl.pointer_type(target_like.dtype.element_ty))
    inside = value < tl.load(job + 2)
    columns = tl.load(job + 3)
    scaled = tl.load(source + value, mask=inside).to(tl.float32) * tl.load(scales + number)
    place = (value // columns) * tl.load(job + 4) + value % columns
    tl.store(target + place, scaled.to(target_like.dtype.element_ty), mask=inside)


class CopyTable:
    """The jobs of one group, or of all the groups of a model, run together.

    The table holds addresses. Every run compares them (0.1 ms of host time for 448 jobs) and rebuilds the table if a
    parameter moved, so loading a checkpoint or reassigning `.data` is safe; a captured CUDA graph keeps the old ones.
    """

    def __init__(self, jobs: Sequence[CopyJob]) -> None:
        self.jobs = list(jobs)
        self._addresses: list[int] = []
        self._table: tuple[Tensor, Tensor, Tensor] | None = None  # None: these jobs are copied one by one

    def run(self) -> None:
        if not self.jobs:
            return
        now = self._addresses_now()
        if now != self._addresses:
            self._addresses, self._table = now, self._build()
        if self._table is not None:
            jobs, scales, tiles = self._table
            first = self.jobs[0]
            _copy_kernel[(len(tiles),)](jobs, scales, tiles, first.source.detach(), first.target, TILE=TILE, num_warps=4)
            return
        with torch.no_grad():
            for job in self.jobs:
                job.target.copy_(job.source * job.scale)

    def _addresses_now(self) -> list[int]:
        return [job.source.data_ptr() for job in self.jobs]

    def _build(self) -> tuple[Tensor, Tensor, Tensor] | None:
        first = self.jobs[0]
        kinds = {(job.source.dtype, job.target.dtype, job.source.device, job.target.device) for job in self.jobs}
        plain = all(job.source.is_contiguous() for job in self.jobs) and first.source.dtype != torch.float64
        if not (use_triton(first.target) and plain and len(kinds) == 1):
            return None
        rows = [
            (job.source.data_ptr(), job.target.data_ptr(), job.source.numel(), job.source.shape[1], job.target.stride(0))
            for job in self.jobs
        ]
        tiles = [(i, tile) for i, job in enumerate(self.jobs) for tile in range(-(-job.source.numel() // TILE))]
        return (
            torch.tensor(rows, dtype=torch.int64, device=first.target.device),
            torch.tensor([job.scale for job in self.jobs], dtype=torch.float32, device=first.target.device),
            torch.tensor(tiles, dtype=torch.int32, device=first.target.device),
        )
