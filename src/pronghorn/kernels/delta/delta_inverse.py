"""R = (I + A)^-1 of each chunk of the delta rule, from blocks of 16 x 16 (delta_rule.py has the formulas and the letters).

A diagonal block by doubling: with the inverse X of each of its diagonal blocks of size h, that of size 2 h is X - X A' X, where
A' is A between the two halves. Products are of inverses only; the geometric series of A has powers up to 1e18 for equal keys.
Below the diagonal R_ij = -R_ii (sum over j <= k < i of A_ik R_kj): 40 products of 16 x 16, where doubling the whole chunk takes
10 of 64 x 64, as much work as 640. One warp a program.
"""

from __future__ import annotations

from pronghorn.kernels.delta.delta_scan import dot, of_rows, put_tile, tile
from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def _decays(decays, first, rows, head, N: tl.constexpr, SKIPPED: tl.constexpr):
    """G of 16 rows; of those behind the chunk that of its last row, so that no difference is positive."""
    row = first + tl.minimum(SKIPPED + tl.arange(0, 16), tl.minimum(rows, 64) - 1).to(tl.int64)
    return tl.load(decays + row * N + head)


@jit
def _block(pairs, decays, beta, first, rows, head, N: tl.constexpr, BELOW: tl.constexpr, ACROSS: tl.constexpr):
    """16 x 16 of A; on the diagonal what is below it."""
    row = tl.arange(0, 16)
    G_i, G_j = _decays(decays, first, rows, head, N, 16 * BELOW), _decays(decays, first, rows, head, N, 16 * ACROSS)
    difference = G_i[:, None] - G_j[None, :]
    if BELOW == ACROSS:
        difference = tl.where(row[:, None] > row[None, :], difference, float("-inf"))
    return of_rows(beta, first, rows, head, N, 16 * BELOW, 16)[:, None] * pairs * tl.exp(difference)


@jit
def _put(R, first, rows, head, N: tl.constexpr, BELOW: tl.constexpr, ACROSS: tl.constexpr, values):
    put_tile(R + head * 64, N * 64, first, rows, 16 * ACROSS + tl.arange(0, 16), 64, values, 16 * BELOW, 16)


@jit
def _times(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def _inverse_of_block(A, PRECISION: tl.constexpr):
    """(I + A)^-1 of 16 x 16."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -A, 0.0))
    for level in tl.static_range(1, 4):
        across = (i >> level == (j >> level) + 1) & (i >> (level + 1) == j >> (level + 1))
        inverse -= _times(_times(inverse, tl.where(across, A, 0.0), PRECISION), inverse, PRECISION)
    return inverse


@jit
def _inverse_kernel(
    k, k_row, decays, beta, R, chunks, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """R is zero before. k10 are the products of the second 16 keys and the first, A10 and R10 their blocks."""
    slot, head = tl.program_id(0) // N, tl.program_id(0) % N
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        k00 = tl.zeros([16, 16], tl.float32)
        k10, k11, k20, k21, k22, k30, k31, k32, k33 = k00, k00, k00, k00, k00, k00, k00, k00, k00
        keys = k + head // GROUP * K
        for block in tl.range(0, K, BK, num_stages=1, loop_unroll_factor=1):
            down = block + tl.arange(0, BK)
            k0, k1 = tile(keys, k_row, first, rows, down, K, 0, 16), tile(keys, k_row, first, rows, down, K, 16, 16)
            k2, k3 = tile(keys, k_row, first, rows, down, K, 32, 16), tile(keys, k_row, first, rows, down, K, 48, 16)
            k00 += dot(k0, tl.trans(k0))
            k10 += dot(k1, tl.trans(k0))
            k11 += dot(k1, tl.trans(k1))
            k20 += dot(k2, tl.trans(k0))
            k21 += dot(k2, tl.trans(k1))
            k22 += dot(k2, tl.trans(k2))
            k30 += dot(k3, tl.trans(k0))
            k31 += dot(k3, tl.trans(k1))
            k32 += dot(k3, tl.trans(k2))
            k33 += dot(k3, tl.trans(k3))
        R00 = _inverse_of_block(_block(k00, decays, beta, first, rows, head, N, 0, 0), PRECISION)
        R11 = _inverse_of_block(_block(k11, decays, beta, first, rows, head, N, 1, 1), PRECISION)
        R22 = _inverse_of_block(_block(k22, decays, beta, first, rows, head, N, 2, 2), PRECISION)
        R33 = _inverse_of_block(_block(k33, decays, beta, first, rows, head, N, 3, 3), PRECISION)
        A21, A31 = _block(k21, decays, beta, first, rows, head, N, 2, 1), _block(k31, decays, beta, first, rows, head, N, 3, 1)
        A32 = _block(k32, decays, beta, first, rows, head, N, 3, 2)
        R10 = -_times(R11, _times(_block(k10, decays, beta, first, rows, head, N, 1, 0), R00, PRECISION), PRECISION)
        R21 = -_times(R22, _times(A21, R11, PRECISION), PRECISION)
        R32 = -_times(R33, _times(A32, R22, PRECISION), PRECISION)
        sums = _times(_block(k20, decays, beta, first, rows, head, N, 2, 0), R00, PRECISION)
        R20 = -_times(R22, sums + _times(A21, R10, PRECISION), PRECISION)
        R31 = -_times(R33, _times(A31, R11, PRECISION) + _times(A32, R21, PRECISION), PRECISION)
        sums = _times(_block(k30, decays, beta, first, rows, head, N, 3, 0), R00, PRECISION) + _times(A31, R10, PRECISION)
        _put(R, first, rows, head, N, 0, 0, R00)
        _put(R, first, rows, head, N, 1, 0, R10)
        _put(R, first, rows, head, N, 1, 1, R11)
        _put(R, first, rows, head, N, 2, 0, R20)
        _put(R, first, rows, head, N, 2, 1, R21)
        _put(R, first, rows, head, N, 2, 2, R22)
        _put(R, first, rows, head, N, 3, 0, -_times(R33, sums + _times(A32, R20, PRECISION), PRECISION))
        _put(R, first, rows, head, N, 3, 1, R31)
        _put(R, first, rows, head, N, 3, 2, R32)
        _put(R, first, rows, head, N, 3, 3, R33)
