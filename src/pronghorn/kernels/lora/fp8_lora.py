"""Adapters inside an FP8 GEMM at bf16 precision: each number is the sum of two FP8 numbers.

    v = hi + lo        hi = e4m3(v), lo = e4m3(v - hi): 3 + 1 + 4 bits together, as many as bf16 has
    u v = u_hi v_hi + u_lo v_hi + u_hi v_lo + (u_lo v_lo, at most 2^-8 of it: left out)

so the rank-R product (x A^T)(sB)^T is 3R more columns of the frozen one, [hi | lo | hi] against [hi | hi | lo]:

    forward     [x8 | 3R of x A^T] . [q | 3R of sB]^T        at 8B shapes, r = 16: 1 to 4 % more columns
    backward    [dy8 | 3R of dy sB] . [q ; 3R of A]

A second GEMM would read and write all of y once more (gate and up of 8B at 16,384 tokens, H200: 0.9 ms beside an FP8 GEMM of
3 ms, computed from its rate). These columns share the scale of their row: of x's row and of the weight's output channel. So
each of the R has a factor that moves from one side to the other, and rows of x keep headroom (`bound`, see fp8_cast.py):

    forward     c_r  = max_o |sB_or| / scale_o / 448         so that sB / (scale c) fits; within [1/16, 64]
                bound = max_r c_r |A_r|_2                     so that x A^T c fits, whatever x is
    backward    c'_r = 1 / (4 |sB_r / scale|_2)               within max_d |A_rd| / [448, 16], so that A / c' fits
                bound' = max_r c'_r |sB_r / scale|_2          at most 16, so that dy sB c' fits

Headroom costs no precision until values fall below 2^-6 of their scale: at the limits 64 and 16 a typical value of x or dy is
still eight times that. Larger adapters, with values 64 times the weight's largest, saturate.

T = packed tokens, O = output width, D = input width, R = rank, a multiple of 16, E = 3R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels.quant.fp8_cast import E4M3, E4M3_MAX
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

LEAST, MOST = 1 / 16, 64.0  # of the forward factor
MOST_BOUND = 16.0  # of the backward pass
REACH = 0.25  # target of bound', if A allows it
A_LEAST = 16.0  # least place of A's largest value; 448 is the most
TINY = 2.0**-60
TILE = 4096  # values of A or sB that a program holds in registers


# ---- plain torch -----------------------------------------------------------------------------------------------------------


def split_reference(values: Tensor) -> tuple[Tensor, Tensor]:
    """(hi, lo) in e4m3; saturates at 448."""
    values = values.float().clamp(-E4M3_MAX, E4M3_MAX)
    hi = values.to(E4M3)
    return hi, (values - hi.float()).to(E4M3)


@dataclass(frozen=True, slots=True, eq=False)
class SplitJob:
    """One group of linears: from A and sB in bf16 to their columns and rows in FP8."""

    A_RD: Tensor
    sB_OR: Tensor
    scale_O: Tensor  # of the frozen weight
    columns_OE: Tensor  # e4m3 [O, 3R]: sB
    rows_ED: Tensor  # e4m3 [3R, D]: A
    factors_2R: Tensor  # fp32: c, c'
    bounds_2: Tensor  # fp32: bound, bound'


def split_reference_job(job: SplitJob) -> None:
    A_RD, b_OR = job.A_RD.float(), job.sB_OR.float() / job.scale_O[:, None]
    R = len(A_RD)
    c_R = (b_OR.abs().amax(0) * (1 / E4M3_MAX)).clamp(LEAST, MOST)
    a_R, reach_R = A_RD.abs().amax(1), b_OR.square().sum(0).sqrt()
    c_back_R = torch.minimum(torch.maximum(REACH / reach_R.clamp_min(TINY), a_R * (1 / E4M3_MAX)), a_R * (1 / A_LEAST))
    c_back_R = c_back_R.clamp_min(TINY)
    job.factors_2R.copy_(torch.stack([c_R, c_back_R]))
    job.bounds_2[0] = (c_R * A_RD.square().sum(1).sqrt()).max()
    job.bounds_2[1] = (c_back_R * reach_R).max().clamp_max(MOST_BOUND)
    for target, values in ((job.columns_OE.T, (b_OR / c_R).T), (job.rows_ED, A_RD / c_back_R[:, None])):
        hi, lo = split_reference(values)
        target[:R], target[R : 2 * R], target[2 * R :] = hi, hi, lo


def _extend_torch(xa_TR: Tensor, scale_T: Tensor, factor_R: Tensor, out_TE: Tensor) -> None:
    R = xa_TR.shape[1]
    hi, lo = split_reference(xa_TR.float() * factor_R * (1 / scale_T)[:, None])
    out_TE[:, :R], out_TE[:, R : 2 * R], out_TE[:, 2 * R :] = hi, lo, hi


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _split(values, like):
    """NaN stays NaN: it compares as neither too large nor too small.

    hi is rounded to e4m3's three bits (steps of 2^-9 at least) in float32, by adding and subtracting 1.5 * 2^23 steps. A cast
    to e4m3 and back gives the same value, but ptxas (CUDA 12.9, sm_90) then merges the casts of two pairs and reads the first
    result from an unwritten register.
    """
    values = tl.where(values > 448.0, 448.0, values)
    values = tl.where(values < -448.0, -448.0, values)
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    shift = tl.maximum(power * 0.125, 0.001953125) * 12582912.0
    hi = (values + shift) - shift
    return hi.to(like.dtype.element_ty), (values - hi).to(like.dtype.element_ty)


@jit
def _extend_kernel(xa, xa_row, scale, factor, out, out_row, T, R: tl.constexpr, R_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, R_BLOCK)
    inside = (row < T)[:, None] & (column < R)[None, :]
    value = tl.load(xa + row[:, None] * xa_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factor + column, mask=column < R, other=0.0)[None, :]
    row_scale = tl.load(scale + row, mask=row < T, other=1.0)
    hi, lo = _split(value * tl.div_rn(row_scale * 0.0 + 1.0, row_scale)[:, None], out)
    target = out + row[:, None] * out_row + column[None, :]
    tl.store(target, hi, mask=inside)
    tl.store(target + R, lo, mask=inside)
    tl.store(target + 2 * R, hi, mask=inside)


@jit
def _take_b(sB, sB_row, scale, row, column, outputs, R):
    """sB / scale of some output channels."""
    inside = (row < outputs)[:, None] & (column < R)[None, :]
    value = tl.load(sB + row.to(tl.int64)[:, None] * sB_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return value / tl.load(scale + row, mask=row < outputs, other=1.0)[:, None]


@jit
def _take_a(A, A_row, row, column, R, D):
    inside = (row < R)[:, None] & (column < D)[None, :]
    return tl.load(A + row[:, None] * A_row + column[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def _split_kernel(
    jobs, like, like8, R_BLOCK: tl.constexpr, STEP: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
    MOST_BOUND: tl.constexpr, REACH: tl.constexpr, A_LEAST: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """One group a program. A row of `jobs`: addresses of A, sB, scale, columns, rows, factors, bounds; row strides of A, sB,
    columns, rows; O, D, R. All but O are multiples of 16. The two `like` pointers only carry the dtypes."""
    job = jobs + tl.program_id(0) * 14
    A = tl.load(job).to(tl.pointer_type(like.dtype.element_ty))
    sB = tl.load(job + 1).to(tl.pointer_type(like.dtype.element_ty))
    scale = tl.load(job + 2).to(tl.pointer_type(tl.float32))
    columns = tl.load(job + 3).to(tl.pointer_type(like8.dtype.element_ty))
    rows = tl.load(job + 4).to(tl.pointer_type(like8.dtype.element_ty))
    factors, bounds = tl.load(job + 5).to(tl.pointer_type(tl.float32)), tl.load(job + 6).to(tl.pointer_type(tl.float32))
    A_row, sB_row, columns_row, rows_row = tl.load(job + 7), tl.load(job + 8), tl.load(job + 9), tl.load(job + 10)
    outputs, D, R = tl.load(job + 11).to(tl.int32), tl.load(job + 12).to(tl.int32), tl.load(job + 13).to(tl.int32)
    A, sB, columns, rows = tl.multiple_of(A, 16), tl.multiple_of(sB, 16), tl.multiple_of(columns, 16), tl.multiple_of(rows, 16)
    A_row, sB_row = tl.multiple_of(A_row, 16), tl.multiple_of(sB_row, 16)
    columns_row, rows_row = tl.multiple_of(columns_row, 16), tl.multiple_of(rows_row, 16)
    D, R = tl.multiple_of(D, 16), tl.multiple_of(R, 16)
    rank, step = tl.arange(0, R_BLOCK), tl.arange(0, STEP)
    b_largest, b_squares = tl.zeros([R_BLOCK], tl.float32), tl.zeros([R_BLOCK], tl.float32)
    a_largest, a_squares = tl.zeros([R_BLOCK], tl.float32), tl.zeros([R_BLOCK], tl.float32)
    for first in range(0, outputs, STEP):
        value = _take_b(sB, sB_row, scale, first + step, rank, outputs, R)
        b_largest, b_squares = tl.maximum(b_largest, tl.max(tl.abs(value), 0)), b_squares + tl.sum(value * value, 0)
    for first in range(0, D, STEP):
        value = _take_a(A, A_row, rank, first + step, R, D)
        a_largest, a_squares = tl.maximum(a_largest, tl.max(tl.abs(value), 1)), a_squares + tl.sum(value * value, 1)
    factor = tl.minimum(tl.maximum(b_largest * 0.002232142857142857, LEAST), MOST)
    b_norm = tl.sqrt_rn(b_squares)
    factor_back = tl.maximum(REACH / tl.maximum(b_norm, TINY), a_largest * 0.002232142857142857)
    factor_back = tl.maximum(tl.minimum(factor_back, a_largest * (1 / A_LEAST)), TINY)
    tl.store(factors + rank, factor, mask=rank < R)
    tl.store(factors + R + rank, factor_back, mask=rank < R)
    tl.store(bounds, tl.max(factor * tl.sqrt_rn(a_squares), 0))
    tl.store(bounds + 1, tl.minimum(tl.max(factor_back * b_norm, 0), MOST_BOUND))
    for first in range(0, outputs, STEP):
        row = first + step
        hi, lo = _split(_take_b(sB, sB_row, scale, row, rank, outputs, R) / factor[None, :], like8)
        target = columns + row.to(tl.int64)[:, None] * columns_row + rank[None, :]
        inside = (row < outputs)[:, None] & (rank < R)[None, :]
        tl.store(target, hi, mask=inside)
        tl.store(target + R, hi, mask=inside)
        tl.store(target + 2 * R, lo, mask=inside)
    for first in range(0, D, STEP):
        column = first + step
        hi, lo = _split(_take_a(A, A_row, rank, column, R, D) / factor_back[:, None], like8)
        target = rows + rank.to(tl.int64)[:, None] * rows_row + column[None, :]
        inside = (rank < R)[:, None] & (column < D)[None, :]
        tl.store(target, hi, mask=inside)
        tl.store(target + R * rows_row, hi, mask=inside)
        tl.store(target + 2 * R * rows_row, lo, mask=inside)


def fp8_extend(xa_TR: Tensor, scale_T: Tensor, factor_R: Tensor, out_TE: Tensor) -> None:
    """Fills the LoRA columns of x8 (or dy8): [hi | lo | hi] of xa * factor / scale."""
    T, R = xa_TR.shape
    if not use_triton(xa_TR):
        _extend_torch(xa_TR, scale_T, factor_R, out_TE)
        return
    block = triton.next_power_of_2(R)
    rows = max(1, 2048 // block)
    _extend_kernel[(triton.cdiv(T, rows),)](
        xa_TR, xa_TR.stride(0), scale_T, factor_R, out_TE, out_TE.stride(0), T, R=R, R_BLOCK=block, ROWS=rows, num_warps=4
    )


class SplitTable:
    """The jobs of one group, or of all the groups of a model, run together: after each refresh of A and sB (multi_copy.py).

    As there, the table holds addresses, is rebuilt if one moved, and is copied to the device on its first run, which must come
    before a CUDA graph is captured.
    """

    def __init__(self, jobs: Sequence[SplitJob]) -> None:
        self.jobs = list(jobs)
        self._addresses: list[int] = []
        self._table: Tensor | None = None  # None: one by one, in plain torch

    def run(self) -> None:
        if not self.jobs:
            return
        now = [t.data_ptr() for job in self.jobs for t in (job.A_RD, job.sB_OR, job.columns_OE, job.rows_ED)]
        if now != self._addresses:
            self._addresses, self._table = now, self._build()
        if self._table is None:
            for job in self.jobs:
                split_reference_job(job)
            return
        block = triton.next_power_of_2(max(len(job.A_RD) for job in self.jobs))
        _split_kernel[(len(self.jobs),)](
            self._table, self.jobs[0].A_RD, self.jobs[0].columns_OE, R_BLOCK=block, STEP=max(16, TILE // block), LEAST=LEAST,
            MOST=MOST, MOST_BOUND=MOST_BOUND, REACH=REACH, A_LEAST=A_LEAST, TINY=TINY, num_warps=8,
        )  # fmt: skip

    def _build(self) -> Tensor | None:
        first = self.jobs[0]
        if not use_triton(first.A_RD) or len({(t.dtype, t.device) for job in self.jobs for t in (job.A_RD, job.sB_OR)}) != 1:
            return None
        rows = []
        for job in self.jobs:
            tensors = (job.A_RD, job.sB_OR, job.scale_O, job.columns_OE, job.rows_ED, job.factors_2R, job.bounds_2)
            strided = (job.A_RD, job.sB_OR, job.columns_OE, job.rows_ED)
            sizes = (job.sB_OR.shape[0], job.A_RD.shape[1], job.A_RD.shape[0])
            rows.append([*(t.data_ptr() for t in tensors), *(t.stride(0) for t in strided), *sizes])
        if any(row[i] % 16 for row in rows for i in (0, 1, 3, 4, 7, 8, 9, 10, 12, 13)):
            return None
        return torch.tensor(rows, dtype=torch.int64, device=first.A_RD.device)
