"""Gradients of LoRA adapters: GEMMs of a thin tensor with a wide one over all tokens, accumulated in fp32.

    total_SD += thin_TS^T wide_TD              dA: thin = dy sB, wide = x          dB^T: thin = x A^T, wide = dy
    total_SD += (rstd_T thin_TS)^T wide_TD     dA where x = norm(h) and wide is h (lora_linear.py)

T = packed tokens, S = ranks of a group's adapters, at most `MOST_RANKS`, D = width. Inputs have 16 bits; rows may be
strided (last dimension contiguous). rstd * thin is rounded to thin's dtype, but not written back.

Bound by memory: the wide tensor is read once, 64 MB at T = 16,384 and D = 2048. dA and dB of a group share one launch, and so
its ramp-up and tail. Sums have a fixed order: each program sums its rows, a second kernel sums the programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import (
    HOPPER,
    KERNELS_ARE_INTERPRETED,
    Chip,
    chip_of,
    jit,
    processor_count,
    tl,
    triton,
    use_triton,
)

MOST_RANKS = 64  # of all adapters of a group: their sums are in registers
MOST_JOBS = 2


class LoraGradJob(NamedTuple):
    """total_SD += thin_TS^T wide_TD, the rows of thin times rstd_T where it is given."""

    total_SD: Tensor
    thin_TS: Tensor
    wide_TD: Tensor
    rstd_T: Tensor | None = None


def lora_grad_gemm_reference(job: LoraGradJob) -> Tensor:
    """The increment of the total, in its dtype."""
    thin_TS = job.thin_TS if job.rstd_T is None else (job.thin_TS * job.rstd_T[:, None]).to(job.thin_TS.dtype)
    return thin_TS.to(job.total_SD.dtype).T @ job.wide_TD.to(job.total_SD.dtype)


def covered(job: LoraGradJob) -> bool:
    """Whether `lora_grad_gemm` supports it. Any number of tokens: before capture, kernels are compiled on few."""
    kinds = (job.thin_TS.dtype, job.wide_TD.dtype)
    if kinds not in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)) or job.total_SD.dtype != torch.float32:
        return False
    along = all(rows.stride(1) == 1 for rows in (job.total_SD, job.thin_TS, job.wide_TD))
    along = along and (job.rstd_T is None or job.rstd_T.is_contiguous())
    return use_triton(job.wide_TD) and 1 <= job.thin_TS.shape[1] <= MOST_RANKS and along


class Tile(NamedTuple):
    """Rows and columns of one step of a program, its warps, the stages of its loads (all but one are in flight while one is
    multiplied), and how many times the programs fill the GPU: more rounds write and read more partial sums."""

    rows: int
    columns: int
    warps: int
    stages: int
    rounds: int

    def fitted(self, chip: Chip) -> Tile:
        """Small chips pass the wide tile through registers (see `programs`), which do not hold four stages."""
        return self if chip.large else self._replace(stages=min(3, self.stages))

    def programs(self, ranks: int, chip: Chip = HOPPER) -> int:
        """Programs per multiprocessor, at least two: with little shared memory the wide tile goes through registers instead (33
        KB in all at most, compiled for 8.6 and 12.0 at 16 to 64 ranks)."""
        bytes_each = self.stages * self.rows * (self.columns + ranks) * 2 + 2048
        return max(2, min(chip.warps // self.warps, chip.all_shared // bytes_each))

    def registers(self, ranks: int, chip: Chip = HOPPER) -> int | None:
        """The most a thread may have; None where it may have all there are."""
        most = max(64, 65536 // (self.programs(ranks, chip) * self.warps * 32) // 8 * 8)
        return most if most < 255 else None


# For `python -m benchmarks.ops --sweep lora_grad_gemm`. Compiled for sm_90 by Triton 3.6 none spills at 16, 32 or 48 ranks.
CONFIGS = [Tile(*config) for config in (
    (64, 128, 4, 4, 1), (64, 128, 4, 3, 1), (64, 128, 4, 4, 2), (64, 128, 4, 3, 2), (64, 128, 4, 4, 3), (64, 256, 8, 2, 1),
    (32, 256, 8, 4, 1), (32, 128, 4, 4, 1), (128, 128, 8, 2, 1),
)]  # fmt: skip


def _tile(ranks: int) -> Tile:
    """Three programs per multiprocessor, 144 or 96 KB of the wide tensor in flight. A tile takes eight tensor-core
    instructions, 127 instructions of a warp in all at 16 ranks, 153 at 48, and 290 where thin is scaled. Memory delivers a tile
    in some 900 cycles, in which a multiprocessor issues as many for each of four warps."""
    return CONFIGS[1] if ranks > 16 else CONFIGS[0]


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _sum_rows(
    wide, wide_row, thin, thin_row, rstd, column, T, rows, D, S, S_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """A program's `rows` rows of a block of columns, ROWS at a time. As [columns, ranks]: the 64-row tensor-core instruction
    reads the wide tile from shared memory, without registers."""
    row, rank = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, S_BLOCK)
    first = tl.program_id(1).to(tl.int64) * rows
    count = tl.minimum(rows, T - tl.program_id(1) * rows)
    total = tl.zeros([COLUMNS, S_BLOCK], tl.float32)
    for start in tl.range(0, count, ROWS, num_stages=STAGES):
        at, there = first + start, row < count - start
        place = wide + at * wide_row + row[:, None] * wide_row + column[None, :]
        wide_tile = tl.load(place, mask=there[:, None] & (column < D)[None, :], other=0.0)
        place = thin + at * thin_row + row[:, None] * thin_row + rank[None, :]
        thin_tile = tl.load(place, mask=there[:, None] & (rank < S)[None, :], other=0.0)
        if rstd is not None:
            scale = tl.load(rstd + at + row, mask=there, other=0.0)
            thin_tile = (thin_tile.to(tl.float32) * scale[:, None]).to(thin_tile.dtype)
        if not NARROW:
            thin_tile, wide_tile = thin_tile.to(tl.float32), wide_tile.to(tl.float32)
        total = tl.dot(tl.trans(wide_tile), thin_tile, total, input_precision="ieee")
    return total


@jit
def _sums_kernel(
    wide, wide_row, thin, thin_row, rstd, wide_2, wide_2_row, thin_2, thin_2_row, rstd_2, partial, T, rows, D: tl.constexpr,
    S: tl.constexpr, D_2: tl.constexpr, S_2: tl.constexpr, S_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """program_id(0): a block of columns, the first job's and then the second's (D_2 is 0 where there is none), so that
    neighbours read whole rows at about the same time; program_id(1): a share of the rows. partial: for each share the
    first job's [S, D], then the second's."""
    block, blocks = tl.program_id(0), (D + COLUMNS - 1) // COLUMNS
    rank, column = tl.arange(0, S_BLOCK), block * COLUMNS + tl.arange(0, COLUMNS)
    partial += tl.program_id(1).to(tl.int64) * (S * D + S_2 * D_2)
    width, ranks = D, S
    if D_2 > 0 and block >= blocks:
        column, partial, width, ranks = column - blocks * COLUMNS, partial + S * D, D_2, S_2
    if (rstd is None) != (rstd_2 is None):  # two loops: unscaled thin bypasses the registers
        if block < blocks:
            total = _sum_rows(wide, wide_row, thin, thin_row, rstd, column, T, rows, D, S, S_BLOCK, ROWS, COLUMNS, STAGES,
                              NARROW)  # fmt: skip
        else:
            total = _sum_rows(wide_2, wide_2_row, thin_2, thin_2_row, rstd_2, column, T, rows, D_2, S_2, S_BLOCK, ROWS, COLUMNS,
                              STAGES, NARROW)  # fmt: skip
    else:  # one loop: for two equal ones Triton 3.6 would take twice the shared memory
        if D_2 > 0 and block >= blocks:
            wide, wide_row, thin, thin_row, rstd = wide_2, wide_2_row, thin_2, thin_2_row, rstd_2
        total = _sum_rows(wide, wide_row, thin, thin_row, rstd, column, T, rows, width, ranks, S_BLOCK, ROWS, COLUMNS, STAGES,
                          NARROW)  # fmt: skip
    place = partial + rank[:, None] * width + column[None, :]
    tl.store(place, tl.trans(total), mask=(rank < ranks)[:, None] & (column < width)[None, :])


@jit
def _add_partial_kernel(
    partial, total, total_row, total_2, total_2_row, T, rows, D: tl.constexpr, S: tl.constexpr, D_2: tl.constexpr,
    S_2: tl.constexpr, COLUMNS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of some columns of one rank (program_id(1)), SHARES at a time, to their total. Their number
    follows from T and rows: as an argument, some values would make Triton recompile."""
    rank, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place, width, before = total + rank.to(tl.int64) * total_row, D, rank * D
    if rank >= S:
        place, width, before = total_2 + (rank - S).to(tl.int64) * total_2_row, D_2, S * D + (rank - S) * D_2
    share, shares, inside = tl.arange(0, SHARES), tl.maximum(1, tl.cdiv(T, rows)), column < width
    found = tl.zeros([COLUMNS], tl.float32)
    for start in tl.range(0, shares, SHARES):
        source = partial + (start + share).to(tl.int64)[:, None] * (S * D + S_2 * D_2) + before + column[None, :]
        found += tl.sum(tl.load(source, mask=(start + share < shares)[:, None] & inside[None, :], other=0.0), axis=0)
    tl.store(place + column, tl.load(place + column, mask=inside, other=0.0) + found, mask=inside)


# ---- raw functions -----------------------------------------------------------------------------------------------------------


def lora_grad_gemm(jobs: Sequence[LoraGradJob]) -> None:
    """One or two jobs over the same tokens and of one dtype, all of them `covered`."""
    first, second = jobs[0], jobs[-1]
    T, device = len(first.wide_TD), first.wide_TD.device
    assert 1 <= len(jobs) <= MOST_JOBS
    assert first.wide_TD.dtype == second.wide_TD.dtype
    for job in jobs:
        assert covered(job)
        assert len(job.wide_TD) == len(job.thin_TS) == T
        assert job.total_SD.shape == (job.thin_TS.shape[1], job.wide_TD.shape[1])
        assert job.rstd_T is None or job.rstd_T.shape == (T,)
    (S, D), (S_2, D_2) = first.total_SD.shape, second.total_SD.shape if len(jobs) > 1 else (0, 0)
    block = max(16, triton.next_power_of_2(max(S, S_2)))  # tensor cores take 16 at least
    chip = chip_of(device)
    tile = _tile(block).fitted(chip)
    columns = triton.cdiv(D, tile.columns) + triton.cdiv(D_2, tile.columns)
    rows = _rows_of_a_program(T, columns, tile, processor_count(device) * tile.programs(block, chip))
    shares = max(1, triton.cdiv(T, rows))
    partial = torch.empty(shares, S * D + S_2 * D_2, dtype=torch.float32, device=device)
    _sums_kernel[(columns, shares)](
        first.wide_TD, first.wide_TD.stride(0), first.thin_TS, first.thin_TS.stride(0), first.rstd_T, second.wide_TD,
        second.wide_TD.stride(0), second.thin_TS, second.thin_TS.stride(0), second.rstd_T, partial, T, rows, D=D, S=S, D_2=D_2,
        S_2=S_2, S_BLOCK=block, ROWS=tile.rows, COLUMNS=tile.columns, STAGES=tile.stages, NARROW=not KERNELS_ARE_INTERPRETED,
        num_warps=tile.warps, maxnreg=tile.registers(block, chip),
    )  # fmt: skip
    _add_partial_kernel[(triton.cdiv(max(D, D_2), 512), S + S_2)](
        partial, first.total_SD, first.total_SD.stride(0), second.total_SD, second.total_SD.stride(0), T, rows, D=D, S=S,
        D_2=D_2, S_2=S_2, COLUMNS=512, SHARES=16, num_warps=4,
        maxnreg=128,  # it needs 86; by default ptxas limits it to 32, with only two of the 16 loads in flight
    )  # fmt: skip


def _rows_of_a_program(T: int, columns: int, tile: Tile, places: int) -> int:
    """Chosen so that all programs fill the GPU in `rounds` rounds: at D = 2048, 12 shares of two jobs or 24 of one fill 97 % of
    132 multiprocessors."""
    shares = max(1, tile.rounds * places // columns)
    return int(max(1, triton.cdiv(triton.cdiv(T, shares), tile.rows)) * tile.rows)
