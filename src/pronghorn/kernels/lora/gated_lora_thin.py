"""dgu sB, the gradient of x A^T of gate and up, as a by-product of the kernel that makes dgu (gated_lora.py).

A separate GEMM reads all of dgu, 537 MB at T = 16,384 and F = 8192, for a result of 2 MB. A program of that kernel holds ROWS
rows of one block of columns, of gate and of up, and computes their part of dgu sB: [ROWS, WIDTH]. A second kernel adds the
blocks in order:

    sums [blocks, T, WIDTH] in fp16, powers [blocks, T] in one byte, dgu sB = the sum over blocks of 2^(power - 141) sums

In fp32 the parts would be half of what the GEMM reads; in bf16 a gradient would be rounded twice. fp16 has three more bits, and
a power of two per row and block scales the row's largest value to 2^14 to 2^15, so everything down to 2^-28 of it keeps 11
bits. Rounded to bf16, the sum's error is at most a twentieth larger than with one rounding
(tests/kernels/test_gated_lora_thin.py).

T = packed tokens, F = MLP width, G = 2F, R = columns of sB: gate's adapter has rows 0 to F, up's F to 2F, each in columns of
its own within the first WIDTH; everything else in sB is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton

WIDTH = 32  # two adapters' ranks, each at most 16
COLUMNS = 64  # of a block, as gated_lora.py takes them
ROWS, TOGETHER = 8, 8  # of the second kernel


class ThinSums(NamedTuple):
    """The parts of dgu sB, one for each block of columns."""

    sums_BTW: Tensor
    powers_BT: Tensor

    @classmethod
    def empty(cls, blocks: int, T: int, device: torch.device) -> ThinSums:
        """134 and 2 MB for 128 blocks of 16,384 rows."""
        return cls(torch.empty(blocks, T, WIDTH, dtype=torch.float16, device=device),
                   torch.empty(blocks, T, dtype=torch.uint8, device=device))  # fmt: skip

    def add_up(self, out_TR: Tensor) -> None:
        """dgu sB; columns from WIDTH on become zero."""
        blocks, T = self.powers_BT.shape
        R = out_TR.shape[1]
        _add_blocks_kernel[(triton.cdiv(T, ROWS),)](
            self.sums_BTW, self.powers_BT, out_TR, out_TR.stride(0), T, COUNT=blocks, R=R, R_BLOCK=triton.next_power_of_2(R),
            WIDTH=WIDTH, ROWS=ROWS, TOGETHER=TOGETHER, num_warps=1,
        )  # fmt: skip


@jit
def _thin_weight(sB, sB_row, column, F: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of sB that belong to a program's columns, [COLUMNS, WIDTH]: the same for all its rows."""
    rank = tl.arange(0, WIDTH)
    return tl.load(sB + column.to(tl.int64)[:, None] * sB_row + rank[None, :], mask=(column < F)[:, None] & (rank < R)[None, :],
                   other=0.0)  # fmt: skip


@jit
def _thin_mm(dgate, dup, sB_gate, sB_up, NARROW: tl.constexpr):
    """One sum for both adapters: in the columns of one, the other's sB is zero."""
    if not NARROW:
        dgate, dup = dgate.to(tl.float32), dup.to(tl.float32)
        sB_gate, sB_up = sB_gate.to(tl.float32), sB_up.to(tl.float32)
    total = tl.dot(dgate, sB_gate, input_precision="ieee")
    return tl.dot(dup, sB_up, total, input_precision="ieee")


@jit
def _store_thin(sums, powers, total, row, left, WIDTH: tl.constexpr):
    """Rows times 2^(141 - power). power: exponent bits of the row's largest value, 127 for 1 to 2; at least 15, so that both
    factors are normal fp32 numbers: zeros stay zeros, inf and NaN (255) stay what they are."""
    rank = tl.arange(0, WIDTH)
    largest = tl.max(tl.abs(total), axis=1)
    power = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - power) << 23).to(tl.float32, bitcast=True)
    scaled = (total * factor[:, None]).to(tl.float16)
    tl.store(sums + row[:, None] * WIDTH + rank[None, :], scaled, mask=(row < left)[:, None])
    tl.store(powers + row, power.to(tl.uint8), mask=row < left)


@jit
def _add_blocks_kernel(
    sums, powers, out, out_row, T, COUNT: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A program adds all COUNT blocks of ROWS rows, TOGETHER at a time: their loads are in flight together, 8 of 16 bytes a
    thread, if the program is one warp (with four, a thread gets 40 registers instead of 64 and waits after every second)."""
    row, rank, every = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, R_BLOCK)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(0, COUNT, TOGETHER):
        for one in tl.static_range(TOGETHER):
            inside = (row < T) & (start + one < COUNT)
            place = row.to(tl.int64) + (start + one) * T
            power = tl.load(powers + place, mask=inside, other=15).to(tl.int32)
            factor = ((power - 14) << 23).to(tl.float32, bitcast=True)
            part = tl.load(sums + place[:, None] * WIDTH + rank[None, :], mask=inside[:, None], other=0.0)
            total += part.to(tl.float32) * factor[:, None]
    target = out + row.to(tl.int64)[:, None] * out_row
    beyond = (row < T)[:, None] & ((every >= WIDTH) & (every < R))[None, :]
    tl.store(target + every[None, :], tl.zeros([ROWS, R_BLOCK], out.dtype.element_ty), mask=beyond)
    tl.store(target + rank[None, :], total.to(out.dtype.element_ty), mask=(row < T)[:, None] & (rank < R)[None, :])
