"""Gathers the adapters' gradients from their accumulation buffers into the parameters' own layout, all in one launch.

During a step, the GEMMs of lora_linear.py accumulate dA [R, D] and dB^T [R, O] of a whole group of linears. Before the update
each adapter's part is copied out:

    target = scale * source        A.grad from its rows of dA; columns times the norm's weight where x = norm(h) and h was used
    target = scale * source^T      B.grad from its block of dB^T

At r=16 on all linears of a 16-layer model that is 224 jobs in one launch, instead of a transpose and an addition for each
adapter and micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, use_triton

TILE = 2048  # values a program
FIELDS = 8
_FIELDS = tl.constexpr(FIELDS)


@dataclass(frozen=True, slots=True, eq=False)
class GatherJob:
    """target = scale * source (or its transpose) * weight of each column. The target is contiguous, the source's rows may be
    strided."""

    source: Tensor
    target: Tensor
    scale: float = 1.0
    transposed: bool = False
    weight: Tensor | None = None  # one for each of the target's columns
    one_plus: bool = False  # the weight is 1 + weight


def multi_gather_reference(job: GatherJob) -> Tensor:
    value = (job.source.T if job.transposed else job.source) * job.scale
    if job.weight is not None:
        value = value * (job.weight.to(value.dtype) + (1.0 if job.one_plus else 0.0))
    return value.to(job.target.dtype)


@jit
def _kernel(jobs, scales, tiles, source_like, target_like, weight_like, TILE: tl.constexpr):
    """jobs: [J, 8] int64 of (source, its row stride, target, values, target's columns, transposed, weight or 0, one_plus);
    tiles: [P, 2] int32 of (job, number of the tile in it). The `like` pointers only carry dtypes."""
    program = tl.program_id(0)
    number = tl.load(tiles + program * 2).to(tl.int64)
    job = jobs + number * _FIELDS
    value = tl.load(tiles + program * 2 + 1).to(tl.int64) * TILE + tl.arange(0, TILE)
    source = tl.load(job).to(tl.pointer_type(source_like.dtype.element_ty))
    stride = tl.load(job + 1)
    target = tl.load(job + 2).to(tl.pointer_type(target_like.dtype.element_ty))
    inside = value < tl.load(job + 3)
    columns = tl.load(job + 4)
    row = value // columns
    column = value % columns
    place = tl.where(tl.load(job + 5) != 0, column * stride + row, row * stride + column)
    result = tl.load(source + place, mask=inside, other=0.0).to(tl.float32) * tl.load(scales + number)
    weight = tl.load(job + 6)
    if weight != 0:
        weights = weight.to(tl.pointer_type(weight_like.dtype.element_ty))
        result *= tl.load(weights + column, mask=inside, other=0.0).to(tl.float32) + tl.load(job + 7).to(tl.float32)
    tl.store(target + value, result.to(target_like.dtype.element_ty), mask=inside)


class GatherTable:
    """All jobs of a model. The table on the device is built once: neither source nor target may move."""

    def __init__(self, jobs: Sequence[GatherJob]) -> None:
        self.jobs = list(jobs)
        self._table = self._build() if self.jobs else None

    def _build(self) -> tuple[Tensor, Tensor, Tensor] | None:
        kinds = {(job.source.dtype, job.target.dtype) for job in self.jobs}
        weights = {job.weight.dtype for job in self.jobs if job.weight is not None}
        if not use_triton(self.jobs[0].target) or len(kinds) > 1 or len(weights) > 1:
            return None
        rows, tiles = [], []
        for number, job in enumerate(self.jobs):
            weight = 0 if job.weight is None else job.weight.data_ptr()
            rows.append(
                (
                    job.source.data_ptr(),
                    job.source.stride(0),
                    job.target.data_ptr(),
                    job.target.numel(),
                    job.target.shape[1],
                    int(job.transposed),
                    weight,
                    int(job.one_plus),
                )
            )
            tiles += [(number, tile) for tile in range(-(-job.target.numel() // TILE))]
        device = self.jobs[0].target.device
        return (
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor([job.scale for job in self.jobs], dtype=torch.float32, device=device),
            torch.tensor(tiles, dtype=torch.int32, device=device),
        )

    @torch.no_grad()
    def run(self) -> None:
        if self._table is None:
            for job in self.jobs:
                job.target.copy_(multi_gather_reference(job))
            return
        table, scales, tiles = self._table
        first = self.jobs[0]
        weight = next((job.weight for job in self.jobs if job.weight is not None), first.source)
        _kernel[(len(tiles),)](table, scales, tiles, first.source, first.target, weight.detach(), TILE=TILE, num_warps=4)
