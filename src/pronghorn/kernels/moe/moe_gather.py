"""Token rows sorted by expert, and beside them the adapters' x A^T.

T = tokens, D = width, K = experts a token, S = T * K sorted rows, E = experts, R = rank (see routing.py, grouped_lora.py).

    out[s] = [ x_t | x_t A_e^T ]       t = order[s] // K, e = the expert of row s; without A: [ x_t ]

Backward sums a token's rows: moe_combine.py without weights. Bound by memory: each token is read K times, mostly from L2, and
each row written once; the adapter's GEMM is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.moe.grouped_gemm import Tile, expert_tile, grouped_linear_reference, precision_of, sorted_rows
from pronghorn.kernels.runtime.add_dot import EXACT_INNER, add_dot
from pronghorn.kernels.runtime.dispatch import Chip, chip_of, jit, tl, triton, use_triton

BLOCK = 2048  # columns a program of the plain copy: 16 bytes for each of 256 threads in bf16


def gather_rows_reference(
    x_TD: Tensor, order_S: Tensor, K: int, offsets_E1: Tensor | None = None, A_ERD: Tensor | None = None
) -> Tensor:
    rows_SD = sorted_rows(x_TD, order_S, K)
    if offsets_E1 is None or A_ERD is None:
        return rows_SD
    return torch.cat([rows_SD, grouped_linear_reference(rows_SD, A_ERD, offsets_E1)], dim=1)


@jit
def _gather_kernel(x, x_row, order, out, out_row, K, D: tl.constexpr, BLOCK: tl.constexpr):
    PARTS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // PARTS
    column = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    token = (tl.load(order + row) // K).to(tl.int64)
    values = tl.load(x + token * x_row + column, mask=column < D)
    tl.store(out + row.to(tl.int64) * out_row + column, values, mask=column < D)


@jit
def _gather_lora_kernel(
    x, x_row, order, A, A_e, A_r, A_d, out, out_row, offsets, K, D, R: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, R_BLOCK: tl.constexpr, INNER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert, first, end, _ = expert_tile(offsets, tl.program_id(0), 1, E, E_BLOCK, ROWS)
    if first >= end:
        return
    row = first + tl.arange(0, ROWS)
    inside = (row < end)[:, None]
    token = tl.load(order + tl.minimum(row, end - 1)) // K
    inner, rank = tl.arange(0, INNER), tl.arange(0, R_BLOCK)
    x += token.to(tl.int64)[:, None] * x_row + inner[None, :]
    out += row.to(tl.int64)[:, None] * out_row
    A += expert.to(tl.int64) * A_e + (rank % R).to(tl.int64)[None, :] * A_r + inner.to(tl.int64)[:, None] * A_d
    sums = tl.zeros((ROWS, R_BLOCK), tl.float32)
    for d in range(0, D, INNER):
        if EVEN:
            values = tl.load(x)
            thin = tl.load(A)
            tl.store(out + (d + inner)[None, :], values, mask=inside)
        else:
            there = d + inner < D
            values = tl.load(x, mask=there[None, :], other=0.0)
            thin = tl.load(A, mask=there[:, None], other=0.0)
            tl.store(out + (d + inner)[None, :], values, mask=inside & there[None, :])
        sums = add_dot(sums, values, thin, PRECISION)
        x += INNER
        A += INNER * A_d
    tl.store(out + (D + rank)[None, :], sums.to(out.dtype.element_ty), mask=inside & (rank < R)[None, :])


CONFIGS = [Tile(64, 16, 128, 4, 3), Tile(64, 16, 128, 4, 4), Tile(32, 16, 256, 4, 3), Tile(128, 16, 64, 4, 4)]


def _lora_tile(dtype: torch.dtype, chip: Chip) -> Tile:
    """64 rows: enough programs (S / 64 + E) to fill a GPU, and A, R x D a program, is read from L2."""
    if dtype == torch.float32:
        return Tile(32, 16, EXACT_INNER, 4, 2)
    return CONFIGS[0] if chip.large else CONFIGS[0]._replace(stages=2)


def gather_rows(
    x_TD: Tensor, order_S: Tensor, K: int, offsets_E1: Tensor | None = None, A_ERD: Tensor | None = None, *,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fills `out` [S, D], or [S, D + R] where there is an A, and returns it. A may have any strides: for a gradient it is the
    transpose of sB."""
    (_, D), S, R = x_TD.shape, len(order_S), 0 if A_ERD is None else A_ERD.shape[1]
    rows = torch.empty(S, D + R, dtype=x_TD.dtype, device=x_TD.device) if out is None else out
    if not use_triton(x_TD):
        return rows.copy_(gather_rows_reference(x_TD, order_S, K, offsets_E1, A_ERD))
    if offsets_E1 is None or A_ERD is None:
        block = min(BLOCK, triton.next_power_of_2(D))
        _gather_kernel[(S * triton.cdiv(D, block),)](
            x_TD, x_TD.stride(0), order_S, rows, rows.stride(0), K, D=D, BLOCK=block, num_warps=4 if block <= 1024 else 8
        )
        return rows
    E, tile = len(A_ERD), _lora_tile(x_TD.dtype, chip_of(x_TD.device))
    _gather_lora_kernel[(triton.cdiv(S, tile.rows) + E,)](
        x_TD, x_TD.stride(0), order_S, A_ERD, *A_ERD.stride(), rows, rows.stride(0), offsets_E1, K, D, R=R, E=E,
        E_BLOCK=triton.next_power_of_2(E), ROWS=tile.rows, R_BLOCK=max(16, triton.next_power_of_2(R)), INNER=tile.inner,
        EVEN=D % tile.inner == 0, PRECISION=precision_of(x_TD.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return rows
