"""The gated activation of an MLP (gated_mlp.py), fused with the adapters' GEMMs that read it.

    forward     a = act(gate) * up                       out = [a | a A^T]
    backward    dgu = [da up act'(gate) | da act(gate)], and, added to sums in fp32,
                dA of down     += dyb^T a                a is recomputed and never written
                dB^T of gate   += xa_gate^T dgate
                dB^T of up     += xa_up^T dup
                and optionally dgu sB (gated_lora_thin.py)

Gate and up stand side by side in a row: gu = [gate | up]. dyb = dy sB is the gradient of down's a A^T, xa = x A^T
of gate and up. T = packed tokens, F = MLP width, G = 2F, R = rank, at most `MOST_RANK`. Rows may be
strided (last dimension contiguous). a, dgate and dup are rounded to gu's dtype before they are multiplied, as for separate
GEMMs; the sums are fp32.

Bound by memory: backward moves 5 F values a token, the activation's backward and two separate GEMMs 9 F; forward 3 F instead of
4 F. Sums have a fixed order: each program sums its rows, a second kernel sums the programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.gemm.mm import mm, mm_accumulate_
from pronghorn.kernels.lora.gated_lora_thin import COLUMNS as THIN_COLUMNS
from pronghorn.kernels.lora.gated_lora_thin import WIDTH, ThinSums, _store_thin, _thin_mm, _thin_weight
from pronghorn.kernels.mlp.gated_mlp import (
    Kind,
    _activation,
    _activation_torch,
    _wide_halves,
    gated_activation_forward,
    gated_activation_reference,
)
from pronghorn.kernels.runtime.dispatch import (
    HOPPER,
    KERNELS_ARE_INTERPRETED,
    Chip,
    chip_of,
    is_gpu,
    jit,
    processor_count,
    tl,
    triton,
    use_triton,
)

MOST_RANK = 64  # of each adapter: the sums of three are in registers


def why_not(*ranks: int) -> str:
    """Why adapters of these ranks need separate GEMMs; empty if they can be fused."""
    largest = max(ranks, default=0)
    return f"rank {largest} exceeds {MOST_RANK}" if largest > MOST_RANK else ""


def why_not_thin(gu_TG: Tensor, down_rank: int, gate: slice | None, up: slice | None) -> str:
    """Why dgu sB needs a separate GEMM; empty if the kernel that makes dgu can make it too. `gate` and `up`: columns of
    their adapters in sB."""
    if _thin_tile() is None:
        return "it is not requested"
    if gu_TG.dtype != torch.bfloat16 or not use_triton(gu_TG):
        return "its fp16 partial sums are precise enough for bf16 only, and it needs a kernel"
    if gate is None or up is None or gate == up:
        return "gate and up do not both have an adapter"
    ranks = down_rank, gate.stop - gate.start, up.stop - up.start
    if max(ranks) > WIDTH // 2 or ranks[1] != ranks[2] or max(gate.stop, up.stop) > WIDTH:
        return f"ranks {ranks} exceed {WIDTH // 2}, or those of gate and up differ"
    return ""


def gated_lora_reference(gu_TG: Tensor, kind: Kind, A_RF: Tensor) -> Tensor:
    """[a | a A^T], as two separate ops compute it."""
    a_TF = gated_activation_reference(gu_TG, kind)
    return torch.cat([a_TF, a_TF @ A_RF.to(a_TF.dtype).T], dim=1)


class Tile(NamedTuple):
    """Rows and columns of one step of a program, its warps, the stages of its loads (all but one are in flight while one is
    computed), and programs per multiprocessor, which sets the registers of each. `ranks_first`: whether the tensor cores
    accumulate [R, columns] or [columns, R]."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int
    ranks_first: bool = True

    @property
    def registers(self) -> int | None:
        """Limit per thread; None: no limit."""
        most = 65536 // (self.programs * self.warps * 32) // 8 * 8
        return most if most < 255 else None


# For `python -m benchmarks.ops --sweep gated_lora`. At rank 16 in bf16 none spills but (32, 64, 4, 3, 4),
# (32, 128, 8, 4, 2) and (16, 128, 4, 3, 4), 16 bytes each (SiLU, compiled for sm_90 by Triton 3.6).
BACKWARD_CONFIGS = [Tile(*config) for config in (
    (32, 128, 8, 3, 2, False), (32, 128, 8, 3, 2), (32, 128, 8, 2, 2), (32, 128, 8, 4, 2), (32, 64, 4, 3, 4, False),
    (32, 64, 4, 2, 4), (32, 64, 4, 3, 4), (32, 64, 4, 3, 3), (16, 128, 8, 4, 3), (16, 128, 4, 3, 4), (64, 64, 4, 3, 2, False),
    (32, 128, 4, 3, 2),
)]  # fmt: skip
# With dgu sB: 29.2 instructions a value and 179 registers in the first, 28.4 to 32.9 in the others (31 of BACKWARD_CONFIGS[0]
# without it); only the last spills, 40 bytes. 64 rows are what the tensor cores' large instruction takes: (32, 128, 8, 3, 2)
# would be 44. In a 1B step of 148 to 150 ms the first saves 0.3 to 0.6 ms, the others nothing, up to 1.8 more
# (docs/log/2026-11-16-llama-1b-variants.md).
THIN_CONFIGS = [Tile(*config) for config in (
    (64, THIN_COLUMNS, 4, 3, 2, False), (64, 64, 4, 2, 2, False), (64, 128, 8, 2, 1, False), (64, 128, 8, 3, 1, False),
    (32, 128, 4, 3, 2, False), (64, 64, 4, 2, 3, False),
)]  # fmt: skip
FORWARD_CONFIGS = [Tile(*config) for config in (
    (32, 128, 4, 3, 4), (32, 128, 4, 2, 4), (32, 64, 4, 3, 6), (32, 64, 4, 4, 6), (16, 128, 4, 3, 7), (64, 64, 8, 3, 2),
    (64, 128, 8, 3, 2),
)]  # fmt: skip


def _backward_tile(rank: int, itemsize: int, chip: Chip = HOPPER) -> Tile:
    """At rank 16: 48 KB of loads are under way for each of two programs, 31 instructions a value, 128 registers. With the ranks
    first it is 28 and 126, and yet a 1B step takes 0.6 ms more (docs/log/2026-11-16-llama-1b-variants.md). Higher ranks
    have larger sums, so fewer columns: 162 registers at rank 32, 111 at 64, where other chips than
    Hopper take more than 128. fp32 does not use tensor cores."""
    if itemsize > 2:
        return Tile(16, 64, 4, 2, 3, False)
    if rank > 32:
        return Tile(32, 64, 8, 3, 2 if chip == HOPPER else 1)
    return Tile(32, 64, 4, 3, 3, False) if rank > 16 else BACKWARD_CONFIGS[0]


def _thin_tile() -> Tile | None:
    """For the kernel that also makes dgu sB; None: a separate GEMM does."""
    return THIN_CONFIGS[0]


def _forward_tile(rank: int, itemsize: int, chip: Chip = HOPPER) -> Tile:
    """32 rows, so that 16,384 are 512 programs: four on each of 128 multiprocessors, 40 KB of loads under way for each. Rank 64
    takes all of 128 registers on Hopper, and elsewhere a few more."""
    if itemsize > 2:
        return Tile(16, 64, 4, 2, 4)
    return Tile(32, 128, 4, 2, 4 if chip == HOPPER else 3) if rank > 32 else FORWARD_CONFIGS[0]


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _short_sigmoid(power):
    """1 / (1 + 2^power), 0 or 1 at the ends. Exact exp and division take nine more instructions a value, for digits that 16
    bits do not show.

    Declared impure, so that the compiler computes it once: it would otherwise recompute everything in the layout of the GEMM
    operands to avoid shared memory (43 instructions a value backward instead of 28, and 33 instead of 14 forward).
    """
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f", [power], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _act(gate, GELU: tl.constexpr, NARROW: tl.constexpr):
    """act(gate) and its derivative: gated_mlp.py's formulas, or, for 16-bit results, shorter ones."""
    if not NARROW:
        activated, derivative = _activation(gate, GELU)
    elif GELU:
        near = tl.minimum(tl.maximum(gate, -10.0), 10.0)
        square = near * near
        sigmoid = _short_sigmoid(near * (-2.302208198144325 - 0.10294323838002349 * square))  # times -log2(e)
        sigmoid = tl.where(gate > -10.0, sigmoid, 0.0)
        activated = gate * sigmoid
        slope = near * (1.5957691216057308 + 0.21406446446698404 * square)
        derivative = sigmoid + slope * sigmoid * (1.0 - sigmoid)
    else:
        sigmoid = _short_sigmoid(gate * -1.4426950408889634)
        activated = gate * sigmoid
        derivative = sigmoid + activated * (1.0 - sigmoid)
    return activated, derivative


@jit
def _adapter_rows(x, x_row, row, left, R: tl.constexpr, R_BLOCK: tl.constexpr):
    rank = tl.arange(0, R_BLOCK)
    return tl.load(x + row[:, None] * x_row + rank[None, :], mask=(row < left)[:, None] & (rank < R)[None, :], other=0.0)


@jit
def _zeros(COLUMNS: tl.constexpr, R_BLOCK: tl.constexpr, RANKS_FIRST: tl.constexpr):
    if RANKS_FIRST:
        total = tl.zeros([R_BLOCK, COLUMNS], tl.float32)
    else:
        total = tl.zeros([COLUMNS, R_BLOCK], tl.float32)
    return total


@jit
def _mm_add(thin, wide, total, RANKS_FIRST: tl.constexpr, NARROW: tl.constexpr):
    """total + thin^T wide (or its transpose)."""
    if not NARROW:
        thin, wide = thin.to(tl.float32), wide.to(tl.float32)
    if RANKS_FIRST:
        total = tl.dot(tl.trans(thin), wide, total, input_precision="ieee")
    else:
        total = tl.dot(tl.trans(wide), thin, total, input_precision="ieee")
    return total


@jit
def _store_sum(partial, total, column, F: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr, RANKS_FIRST: tl.constexpr):
    rank = tl.arange(0, R_BLOCK)
    if not RANKS_FIRST:
        total = tl.trans(total)
    tl.store(partial + rank[:, None] * F + column[None, :], total, mask=(rank < R)[:, None] & (column < F)[None, :])


@jit
def _backward_kernel(
    da, da_row, gu, gu_row, dgu, dgu_row, dyb, dyb_row, xa_gate, xa_up, xa_row, partial, sB, sB_row, thin_sums, thin_powers,
    T, rows, F: tl.constexpr, DOWN: tl.constexpr, DOWN_BLOCK: tl.constexpr, GATE: tl.constexpr, GATE_BLOCK: tl.constexpr,
    UP: tl.constexpr, UP_BLOCK: tl.constexpr, THIN: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STAGES: tl.constexpr, GELU: tl.constexpr, NARROW: tl.constexpr, RANKS_FIRST: tl.constexpr,
):  # fmt: skip
    """A program loops over `rows` rows of its columns, ROWS at a time. It writes its sums to partial [programs, DOWN + GATE +
    UP, F] and, if THIN > 0, its columns' part of dgu sB to thin_sums [blocks of columns, T, THIN] and thin_powers.

    DOWN, GATE, UP: the adapters' ranks, 0 for none. Neighbouring programs take neighbouring columns, so that whole rows are
    read at about the same time.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    first = tl.program_id(1).to(tl.int64) * rows
    count = tl.minimum(rows, T - tl.program_id(1) * rows)
    if DOWN > 0:
        total_down = _zeros(COLUMNS, DOWN_BLOCK, RANKS_FIRST)
    if GATE > 0:
        total_gate = _zeros(COLUMNS, GATE_BLOCK, RANKS_FIRST)
    if UP > 0:
        total_up = _zeros(COLUMNS, UP_BLOCK, RANKS_FIRST)
    if THIN > 0:
        sB_gate = _thin_weight(sB, sB_row, column, F, R, THIN)
        sB_up = _thin_weight(sB + F * sB_row, sB_row, column, F, R, THIN)
        thin_powers += tl.program_id(0).to(tl.int64) * T + first
        thin_sums += (tl.program_id(0).to(tl.int64) * T + first) * THIN
    for start in tl.range(0, count, ROWS, num_stages=STAGES):
        at, left = first + start, count - start
        inside = (row < left)[:, None] & (column < F)[None, :]
        source = gu + at * gu_row + row[:, None] * gu_row + column[None, :]
        grad = tl.load(da + at * da_row + row[:, None] * da_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + F, mask=inside, other=0.0).to(tl.float32)
        activated, derivative = _act(gate, GELU, NARROW)
        dgate = (grad * up * derivative).to(dgu.dtype.element_ty)
        dup = (grad * activated).to(dgu.dtype.element_ty)
        target = dgu + at * dgu_row + row[:, None] * dgu_row + column[None, :]
        tl.store(target, dgate, mask=inside)
        tl.store(target + F, dup, mask=inside)
        if DOWN > 0:
            thin = _adapter_rows(dyb + at * dyb_row, dyb_row, row, left, DOWN, DOWN_BLOCK)
            a = (activated * up).to(dgu.dtype.element_ty)
            total_down = _mm_add(thin, a, total_down, RANKS_FIRST, NARROW)
        if GATE > 0:
            thin_gate = _adapter_rows(xa_gate + at * xa_row, xa_row, row, left, GATE, GATE_BLOCK)
            total_gate = _mm_add(thin_gate, dgate, total_gate, RANKS_FIRST, NARROW)
        if UP > 0:
            thin_up = _adapter_rows(xa_up + at * xa_row, xa_row, row, left, UP, UP_BLOCK)
            total_up = _mm_add(thin_up, dup, total_up, RANKS_FIRST, NARROW)
        if THIN > 0:  # last, so that there is only one wait; earlier, it takes 1.3 more instructions a value
            total_thin = _thin_mm(dgate, dup, sB_gate, sB_up, NARROW)
            _store_thin(thin_sums + start * THIN, thin_powers + start, total_thin, row, left, THIN)
    partial += tl.program_id(1).to(tl.int64) * (DOWN + GATE + UP) * F
    if DOWN > 0:
        _store_sum(partial, total_down, column, F, DOWN, DOWN_BLOCK, RANKS_FIRST)
    if GATE > 0:
        _store_sum(partial + DOWN * F, total_gate, column, F, GATE, GATE_BLOCK, RANKS_FIRST)
    if UP > 0:
        _store_sum(partial + (DOWN + GATE) * F, total_up, column, F, UP, UP_BLOCK, RANKS_FIRST)


@jit
def _add_sums_kernel(
    partial, count, down, down_row, gate, up, gate_up_row, F: tl.constexpr, DOWN: tl.constexpr, GATE: tl.constexpr,
    UP: tl.constexpr, R_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds the `count` partial sums of some columns to the sums they belong to; program_id(1) says which of the three."""
    which = tl.program_id(1)
    rank, column = tl.arange(0, R_BLOCK), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.where(which == 0, DOWN, tl.where(which == 1, GATE, UP))
    before = tl.where(which == 0, 0, tl.where(which == 1, DOWN, DOWN + GATE))
    target = down
    if which == 1:
        target = gate
    if which == 2:
        target = up
    place = target + rank.to(tl.int64)[:, None] * tl.where(which == 0, down_row, gate_up_row) + column[None, :]
    inside = (rank < ranks)[:, None] & (column < F)[None, :]
    total = tl.zeros([R_BLOCK, COLUMNS], tl.float32)
    for program in tl.range(0, count, num_stages=3):
        row = program * (DOWN + GATE + UP) + before + rank
        total += tl.load(partial + row.to(tl.int64)[:, None] * F + column[None, :], mask=inside, other=0.0)
    tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)


@jit
def _forward_kernel(
    gu, gu_row, A, A_row, out, out_row, T, F: tl.constexpr, R: tl.constexpr, R_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, GELU: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """A program goes along ROWS whole rows, COLUMNS at a time."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, rank = tl.arange(0, ROWS), tl.arange(0, R_BLOCK)
    left = T - tl.program_id(0) * ROWS
    gu += first * gu_row
    out += first * out_row
    total = tl.zeros([ROWS, R_BLOCK], tl.float32)
    for start in tl.range(0, F, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < left)[:, None] & (column < F)[None, :]
        source = gu + row[:, None] * gu_row + column[None, :]
        gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(source + F, mask=inside, other=0.0).to(tl.float32)
        A_RF = tl.load(A + rank[:, None] * A_row + column[None, :], mask=(rank < R)[:, None] & (column < F)[None, :], other=0.0)
        activated, _ = _act(gate, GELU, NARROW)
        a = (activated * up).to(out.dtype.element_ty)
        tl.store(out + row[:, None] * out_row + column[None, :], a, mask=inside)
        if not NARROW:
            a, A_RF = a.to(tl.float32), A_RF.to(tl.float32)
        total = tl.dot(a, tl.trans(A_RF), total, input_precision="ieee")
    target = out + row[:, None] * out_row + F + rank[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < left)[:, None] & (rank < R)[None, :])


# ---- raw functions -----------------------------------------------------------------------------------------------------------


def _narrow(dtype: torch.dtype) -> bool:
    """Whether to multiply in 16 bits, with shorter formulas whose error 16 bits do not show. The interpreter has neither PTX
    nor bf16 products."""
    return dtype != torch.float32 and not KERNELS_ARE_INTERPRETED


def _rank_block(rank: int) -> int:
    """Tensor cores take 16 at least."""
    return max(16, triton.next_power_of_2(rank)) if rank else 0


def gated_lora_forward(gu_TG: Tensor, kind: Kind, A_RF: Tensor, *, out_ext: Tensor) -> Tensor:
    """Fills out_ext [T, F + R] with [a | a A^T] and returns it. A: gu's dtype, its rows may be strided."""
    T, F, R = gu_TG.shape[0], gu_TG.shape[1] // 2, A_RF.shape[0]
    assert out_ext.shape == (T, F + R)
    if not use_triton(gu_TG):
        gate_TF, up_TF = _wide_halves(gu_TG)
        a_TF = out_ext[:, :F].copy_(_activation_torch(gate_TF, kind)[0] * up_TF)
        mm(a_TF, A_RF.T, out=out_ext[:, F:])
        return out_ext
    if gu_TG.dtype == torch.float32 and is_gpu(gu_TG):
        # fp32 sums of one program after the other's columns are 6 times as far from the truth as the library's (5e-7 and 8e-8
        # at F = 300), and fp32 is for looking closely.
        mm(gated_activation_forward(gu_TG, kind, out=out_ext[:, :F]), A_RF.T, out=out_ext[:, F:])
        return out_ext
    block = _rank_block(R)
    tile = _forward_tile(block, gu_TG.element_size(), chip_of(gu_TG.device))
    _forward_kernel[(triton.cdiv(T, tile.rows),)](
        gu_TG, gu_TG.stride(0), A_RF, A_RF.stride(0), out_ext, out_ext.stride(0), T, F=F, R=R, R_BLOCK=block, ROWS=tile.rows,
        COLUMNS=tile.columns, STAGES=tile.stages, GELU=kind == "gelu_tanh", NARROW=_narrow(gu_TG.dtype), num_warps=tile.warps,
        maxnreg=tile.registers,
    )  # fmt: skip
    return out_ext


class _Part(NamedTuple):
    """One adapter's GEMM: thin [T, R], transposed, times the wide operand, added to its sum [R, F]."""

    thin_TR: Tensor
    sum_RF: Tensor

    @property
    def rank(self) -> int:
        return self.thin_TR.shape[1]


def _part(thin_TR: Tensor | None, sums: Tensor | None, ranks: slice | None, outputs: slice) -> _Part | None:
    if thin_TR is None or sums is None or ranks is None:
        return None
    return _Part(thin_TR[:, ranks], sums[ranks, outputs])


def gated_lora_backward(
    da_TF: Tensor, gu_TG: Tensor, kind: Kind, *, dgu_out: Tensor, dyb_TR: Tensor | None = None, xa_TR: Tensor | None = None,
    gate_columns: slice | None = None, up_columns: slice | None = None, sums_down_RF: Tensor | None = None,
    sums_gate_up_RG: Tensor | None = None, sB_GR: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes dgu into the first 2F columns of dgu_out, which may be gu itself, and adds to the sums:

        sums_down      += dyb^T a
        sums_gate_up   += xa^T dgu, in the gate's ranks and columns and in the up's only

    `gate_columns` and `up_columns`: the columns of xa, and rows of its sums, of gate and of up; the same for one linear that
    makes both. None for an adapter that does not exist; dyb and its sums likewise.

    With sB (columns as xa's), the next R columns of dgu_out become dgu sB, where `why_not_thin` allows it.
    """
    F = da_TF.shape[1]
    down = _part(dyb_TR, sums_down_RF, slice(None), slice(0, F))
    gate = _part(xa_TR, sums_gate_up_RG, gate_columns, slice(0, F))
    up = _part(xa_TR, sums_gate_up_RG, up_columns, slice(F, 2 * F))
    if use_triton(gu_TG):
        _launch_backward(da_TF, gu_TG, kind, dgu_out, down, gate, up, sB_GR)
        return
    gate_TF, up_TF = _wide_halves(gu_TG)
    activated_TF, derivative_TF = _activation_torch(gate_TF, kind)
    a_TF = (activated_TF * up_TF).to(gu_TG.dtype)
    dgate_TF, dup_TF = dgu_out[:, :F], dgu_out[:, F : 2 * F]
    dgate_TF.copy_(da_TF * up_TF * derivative_TF)
    dup_TF.copy_(da_TF * activated_TF)
    for part, wide_TF in ((down, a_TF), (gate, dgate_TF), (up, dup_TF)):
        if part is not None:
            mm_accumulate_(part.sum_RF, part.thin_TR.T, wide_TF)
    if sB_GR is not None:
        mm(dgu_out[:, : 2 * F], sB_GR, out=dgu_out[:, 2 * F : 2 * F + sB_GR.shape[1]])


def _launch_backward(
    da_TF: Tensor, gu_TG: Tensor, kind: Kind, dgu_out: Tensor, down: _Part | None, gate: _Part | None, up: _Part | None,
    sB_GR: Tensor | None,
) -> None:  # fmt: skip
    T, F = da_TF.shape
    ranks = [0 if part is None else part.rank for part in (down, gate, up)]
    blocks = [_rank_block(rank) for rank in ranks]
    chip = chip_of(gu_TG.device)
    tile = (None if sB_GR is None else _thin_tile()) or _backward_tile(max(16, *blocks), gu_TG.element_size(), chip)
    rows = _rows_of_a_program(T, F, tile, processor_count(gu_TG.device))
    programs = max(1, triton.cdiv(T, rows))
    partial = torch.empty(programs, max(1, sum(ranks)), F, dtype=torch.float32, device=gu_TG.device)
    nothing = _Part(da_TF, partial[0])  # placeholder for a missing adapter, not read
    down, gate, up = down or nothing, gate or up or nothing, up or gate or nothing
    across = triton.cdiv(F, tile.columns)
    thin = None if sB_GR is None else ThinSums.empty(across, T, gu_TG.device)
    sB, sums, powers = (da_TF, partial, partial) if sB_GR is None or thin is None else (sB_GR, *thin)
    _backward_kernel[(across, programs)](
        da_TF, da_TF.stride(0), gu_TG, gu_TG.stride(0), dgu_out, dgu_out.stride(0), down.thin_TR, down.thin_TR.stride(0),
        gate.thin_TR, up.thin_TR, gate.thin_TR.stride(0), partial, sB, sB.stride(0), sums, powers, T, rows, F=F,
        DOWN=ranks[0], DOWN_BLOCK=blocks[0], GATE=ranks[1], GATE_BLOCK=blocks[1], UP=ranks[2], UP_BLOCK=blocks[2],
        THIN=0 if thin is None else WIDTH, R=sB.shape[1] if thin else 0, ROWS=tile.rows, COLUMNS=tile.columns,
        STAGES=tile.stages, GELU=kind == "gelu_tanh", NARROW=_narrow(gu_TG.dtype), RANKS_FIRST=tile.ranks_first,
        num_warps=tile.warps, maxnreg=tile.registers,
    )  # fmt: skip
    if thin is not None:
        thin.add_up(dgu_out[:, 2 * F : 2 * F + sB.shape[1]])
    if not sum(ranks):
        return
    block = max(blocks)
    columns = max(32, 2048 // block)
    _add_sums_kernel[(triton.cdiv(F, columns), 3)](
        partial, programs, down.sum_RF, down.sum_RF.stride(0), gate.sum_RF, up.sum_RF, gate.sum_RF.stride(0), F=F,
        DOWN=ranks[0], GATE=ranks[1], UP=ranks[2], R_BLOCK=block, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


def _rows_of_a_program(T: int, F: int, tile: Tile, processors: int) -> int:
    """Chosen so that two to four rounds of programs fill the GPU best: 99 % of 132 multiprocessors at F = 14,336, 97 % at
    8,192. More rounds would need larger partial sums, which are 19 and 13 MB there."""
    columns, places = triton.cdiv(F, tile.columns), processors * tile.programs
    rounds = max((2, 3, 4), key=lambda rounds: rounds * places // columns / rounds)  # the first of equals
    least = triton.cdiv(T, max(1, rounds * places // columns))
    return int(max(1, triton.cdiv(least, tile.rows)) * tile.rows)
