"""Few rows times a group's NF4 weights, which are dequantized in registers: decoding, and short prompts.

B = rows (at most FEW), D = width of the input, O = rows of all the linears together, R = LoRA columns, S = splits of D.

    y_BO = x W^T + (x A^T)(sB)^T + bias,  or h + multiplier * y          x_ext = [x | x A^T] as in lora_linear.py

For few rows the weights' bytes are the time. A W in 16 bits that is written and read costs 4.5 bytes a value with its bits, the
bits alone 0.52; then some ten instructions a value are the bound (nf4.py). Values are rounded to the rows' dtype as those that
`nf4_dequantize` writes, products are summed in fp32, so both ways differ by the order of a sum.

    products    [O, B] of one of S parts of D: W is the left operand, 64 outputs at a time              program = outputs, split
    finish      adds the parts in their order, the adapters, bias and residual, and rounds once         program = outputs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.quant.nf4 import BLOCK, NF4Tensor, nf4_dequantize_reference
from pronghorn.kernels.quant.nf4_levels import nf4_shuffled_levels
from pronghorn.kernels.runtime.dispatch import KERNELS_ARE_INTERPRETED, address, jit, processor_count, tl, triton, use_triton

FEW = 64  # rows: above, a GEMM's own time hides more of the dequantization (predicted)
FIELDS = 9  # of a job
_reads: ContextVar[bool] = ContextVar("_reads", default=False)


@contextmanager
def reading_bits(wanted: bool) -> Iterator[None]:
    """Whether groups multiply few rows so within. Backward needs W in 16 bits, and training keeps its bits at any size."""
    token = _reads.set(wanted)
    try:
        yield
    finally:
        _reads.reset(token)


class Tile(NamedTuple):
    outputs: int  # of a program: Hopper's tensor cores take at least 64
    blocks: int  # of 64 columns at a time, where they divide D
    warps: int
    stages: int


# For `python -m benchmarks.ops --sweep nf4_rows`. The first has 56 registers for 16 rows and 96 for 64 (compiled for 9.0), and
# none spills on any chip; the third spills 8 bytes on 12.0.
CONFIGS = [Tile(64, 1, 4, 3), Tile(64, 2, 8, 3), Tile(64, 2, 4, 3), Tile(32, 2, 4, 3), Tile(64, 1, 4, 5)]


def _config() -> Tile:
    return CONFIGS[0]


def nf4_rows_reference(
    x_ext: Tensor, weights: Sequence[NF4Tensor], sB_OR: Tensor, bias_O: Tensor | None = None, h_BO: Tensor | None = None,
    multiplier: float = 1.0,
) -> Tensor:  # fmt: skip
    """The definition, of weights rounded to x's dtype. For tests."""
    D = weights[0].shape[1]
    W_OD = torch.cat([nf4_dequantize_reference(weight, x_ext.dtype) for weight in weights])
    y_BO = torch.nn.functional.linear(x_ext[:, :D], W_OD, bias_O) + x_ext[:, D:] @ sB_OR.T
    return y_BO if h_BO is None else h_BO + multiplier * y_BO


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _products_kernel(
    x, x_row, jobs, code, sums, B, all_outputs, split_blocks, JOBS: tl.constexpr, FIELDS: tl.constexpr,
    NESTED: tl.constexpr, SHUFFLE: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """jobs: [JOBS, FIELDS] int64, see NF4Rows. BLOCKS blocks of 64 columns at a time."""
    program, split = tl.program_id(0), tl.program_id(1)
    number = program * 0
    for i in tl.static_range(1, JOBS):
        number += (program >= tl.load(jobs + i * FIELDS)).to(tl.int32)
    job = jobs + number * FIELDS
    packed = tl.multiple_of(tl.load(job + 1).to(tl.pointer_type(tl.uint8)), 16)
    first, outputs, row_blocks = tl.load(job + 2).to(tl.int32), tl.load(job + 3).to(tl.int32), tl.load(job + 4).to(tl.int32)
    if NESTED:
        absmax = tl.load(job + 5).to(tl.pointer_type(tl.uint8))
    else:
        absmax = tl.load(job + 5).to(tl.pointer_type(tl.float32))
    nested_absmax = tl.load(job + 6).to(tl.pointer_type(tl.float32))
    nested_code = tl.load(job + 7).to(tl.pointer_type(tl.float32))
    offset = tl.load(job + 8).to(tl.pointer_type(tl.float32))
    begin = (program - tl.load(job).to(tl.int32)) * OUTPUTS
    row, group = tl.arange(0, ROWS), tl.arange(0, OUTPUTS * BLOCKS)
    there = begin + group // BLOCKS < outputs
    start = (begin + group // BLOCKS).to(tl.int64) * row_blocks + group % BLOCKS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    last = tl.minimum((split + 1) * split_blocks, row_blocks)
    for at in tl.range(split * split_blocks, last, BLOCKS, num_stages=STAGES):
        block = start + at
        scale = tl.load(absmax + block, mask=there, other=0)
        if NESTED:
            largest = tl.load(nested_absmax + block // 256, mask=there, other=0.0)
            scale = tl.load(nested_code + scale.to(tl.int32)) * largest + tl.load(offset)
        if SHUFFLE:
            place = block[:, None] * 8 + tl.arange(0, 8)[None, :]
            words = tl.load(packed.to(tl.pointer_type(tl.int32)) + place, mask=there[:, None], other=0)
            levels = nf4_shuffled_levels(code, words)
        else:
            place = block[:, None] * 32 + tl.arange(0, 32)[None, :]
            pair = tl.load(packed + place, mask=there[:, None], other=0).to(tl.int32)
            levels = tl.reshape(tl.join(tl.load(code + (pair >> 4)), tl.load(code + (pair & 15))), (OUTPUTS * BLOCKS, 64))
        weights = tl.reshape((levels * scale[:, None]).to(x.dtype.element_ty), (OUTPUTS, BLOCKS * 64))
        column = at * 64 + tl.arange(0, BLOCKS * 64)
        xs = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], mask=(row < B)[:, None], other=0.0)
        total = tl.dot(weights, tl.trans(xs), total)
    output = begin + tl.arange(0, OUTPUTS)
    place = (split * all_outputs + first + output).to(tl.int64)[:, None] * ROWS + row[None, :]
    tl.store(sums + place, total, mask=(output < outputs)[:, None])


@jit
def _finish_kernel(
    sums, x, x_row, D, sB, sB_row, bias, h, h_row, y, y_row, multiplier, B, outputs, R, S,
    HAS_BIAS: tl.constexpr, HAS_H: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    mine, there = output < outputs, row < B
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for split in range(0, S):
        place = (split * outputs + output).to(tl.int64)[:, None] * ROWS + row[None, :]
        total += tl.load(sums + place, mask=mine[:, None], other=0.0)
    for first in range(0, R, 16):
        column = first + tl.arange(0, 16)
        xa = tl.load(x + row.to(tl.int64)[:, None] * x_row + D + column[None, :], mask=there[:, None], other=0.0)
        b = tl.load(sB + output.to(tl.int64)[:, None] * sB_row + column[None, :], mask=mine[:, None], other=0.0)
        total = tl.dot(b, tl.trans(xa), total)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=mine, other=0.0).to(tl.float32)[:, None]
    both = mine[:, None] & there[None, :]
    if HAS_H:
        before = tl.load(h + row.to(tl.int64)[None, :] * h_row + output[:, None], mask=both, other=0.0)
        total = before.to(tl.float32) + multiplier * total
    tl.store(y + row.to(tl.int64)[None, :] * y_row + output[:, None], total.to(y.dtype.element_ty), mask=both)


# ---- a group's weights -----------------------------------------------------------------------------------------------------


class NF4Rows:
    """A row of the table: number of the job's first program, address of packed, first output, outputs, D / 64, addresses of
    absmax, nested_absmax, nested_code and offset. It is built when an address changes: run once before a capture."""

    def __init__(self, weights: Sequence[NF4Tensor]) -> None:
        self.weights, self._addresses, self._table = list(weights), [-1], torch.empty(0)
        self.D, self.O = weights[0].shape[1], sum(weight.shape[0] for weight in weights)

    @staticmethod
    def covers(weights: Sequence[Any]) -> bool:
        """Whether a group's weights can be read so: all in NF4, in whole words, no block across the end of a row."""
        stored = [weight for weight in weights if isinstance(weight, NF4Tensor)]
        if len(stored) != len(weights) or len({weight.nested for weight in stored}) != 1:
            return False
        return all(weight.shape[1] % BLOCK == 0 and address(weight.packed) % 16 == 0 for weight in stored)

    @staticmethod
    def few(x_ext: Tensor) -> bool:
        return _reads.get() and len(x_ext) <= FEW and x_ext.dtype in (torch.bfloat16, torch.float16) and use_triton(x_ext)

    def __call__(
        self, x_ext: Tensor, sB_OR: Tensor, bias_O: Tensor | None = None, out: Tensor | None = None,
        h_BO: Tensor | None = None, multiplier: float = 1.0,
    ) -> Tensor:  # fmt: skip
        """`out` may be h. Rows of x_ext, sB, h and out may be strided."""
        B, R, device, tile = len(x_ext), sB_OR.shape[1], x_ext.device, _config()
        out = x_ext.new_empty(B, self.O) if out is None else out
        blocks, programs = self.D // BLOCK, sum(triton.cdiv(weight.shape[0], tile.outputs) for weight in self.weights)
        step = tile.blocks if blocks % tile.blocks == 0 else 1
        parts = max(1, min(-(-4 * processor_count(device) // programs), blocks // 8, 16))
        split_blocks = -(-blocks // (parts * step)) * step
        splits, rows = triton.cdiv(blocks, split_blocks), max(16, int(triton.next_power_of_2(B)))
        sums = torch.empty(splits, self.O, rows, dtype=torch.float32, device=device)
        first = self.weights[0]
        _products_kernel[(programs, splits)](
            x_ext, x_ext.stride(0), self._jobs(device, tile.outputs), first.code, sums, B, self.O, split_blocks,
            JOBS=len(self.weights), FIELDS=FIELDS, NESTED=first.nested, SHUFFLE=not KERNELS_ARE_INTERPRETED,
            OUTPUTS=tile.outputs, ROWS=rows, BLOCKS=step, STAGES=tile.stages, num_warps=tile.warps, enable_fp_fusion=False,
        )  # fmt: skip
        h, bias = out if h_BO is None else h_BO, sums if bias_O is None else bias_O
        _finish_kernel[(triton.cdiv(self.O, 64),)](
            sums, x_ext, x_ext.stride(0), self.D, sB_OR, sB_OR.stride(0), bias, h, h.stride(0), out,
            out.stride(0), multiplier, B, self.O, R, splits, HAS_BIAS=bias_O is not None, HAS_H=h_BO is not None,
            OUTPUTS=64, ROWS=rows, num_warps=4,
        )  # fmt: skip
        return out

    def _jobs(self, device: torch.device, tile: int) -> Tensor:
        now = [tile, *(address(weight.packed) for weight in self.weights)]
        if now != self._addresses:
            rows, programs, outputs = [], 0, 0
            for weight in self.weights:
                scales = (weight.absmax, weight.nested_absmax, weight.nested_code, weight.offset)
                parts = [0 if part is None else address(part) for part in scales]
                rows.append([programs, address(weight.packed), outputs, weight.shape[0], self.D // BLOCK, *parts])
                programs, outputs = programs + triton.cdiv(weight.shape[0], tile), outputs + weight.shape[0]
            self._addresses, self._table = now, torch.tensor(rows, dtype=torch.int64, device=device)
        return self._table
