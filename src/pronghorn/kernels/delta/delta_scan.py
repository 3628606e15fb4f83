"""Triton kernels of the delta rule that forward needs (delta_rule.py has the formulas and the letters).

    _pairs_kernel       program = chunk and key head: G and P of its value heads
    _inverse_kernel     program = chunk and value head, one warp: R, from blocks of 16 x 16
    _scan_kernel        program = document, value head and V block: goes through the document's chunks, M in registers;
                        writes o or, for backward, D and the state before each chunk

R of a diagonal block of 16 by doubling: with the inverse X of each diagonal block of size h, that of size 2 h is X - X A' X,
where A' is A between the two halves. Products are of inverses only; the geometric series of A has powers up to 1e18 for equal
keys. Below the diagonal R_ij = -R_ii (sum over j <= k < i of A_ik R_kj): 40 products of 16 x 16 instead of 640 (ten of 64 x 64).

The kernels that carry a state from chunk to chunk hold everything transposed: M^T [V block, K], and rows of a chunk as columns.
So the first operand of each product has fewer than 64 rows. With 64, Triton 3.6 takes Hopper's asynchronous products there,
whose results in these loops are wrong on an H200 (2026-11-18: errors of 0.9, illegal addresses; the same kernels with two warps,
which cannot use them, are right). Programs are numbered so that neighbours read the same rows.
"""

from __future__ import annotations

from pronghorn.kernels.runtime.add_dot import add_dot
from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def dot(a, b):
    """In float32 exact products, as accurate as plain torch's."""
    if a.dtype == tl.float32 and a.shape[1] <= 64:
        return add_dot(0.0, a, b, "ieee")
    return tl.dot(a, b, input_precision="ieee")


@jit
def tile(x, x_row, first, rows, column, width, SKIPPED: tl.constexpr = 0, ROWS: tl.constexpr = 64):
    """[rows of a chunk, columns]; zeros outside. ROWS of them, after the first SKIPPED."""
    row = SKIPPED + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(x + (first + row).to(tl.int64)[:, None] * x_row + column[None, :], mask=inside, other=0.0)


@jit
def tile_transposed(x, x_row, first, rows, column, width):
    """[columns, rows of a chunk]; zeros outside."""
    row = tl.arange(0, 64)
    inside = (column < width)[:, None] & (row < rows)[None, :]
    return tl.load(x + (first + row).to(tl.int64)[None, :] * x_row + column[:, None], mask=inside, other=0.0)


@jit
def put_tile(x, x_row, first, rows, column, width, values, SKIPPED: tl.constexpr = 0, ROWS: tl.constexpr = 64):
    row = SKIPPED + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = x + (first + row).to(tl.int64)[:, None] * x_row + column[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)


@jit
def put_transposed(x, x_row, first, rows, column, width, values):
    row = tl.arange(0, 64)
    inside = (column < width)[:, None] & (row < rows)[None, :]
    place = x + (first + row).to(tl.int64)[None, :] * x_row + column[:, None]
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)


@jit
def of_rows(x, first, rows, head, N, SKIPPED: tl.constexpr = 0, ROWS: tl.constexpr = 64):
    """x [T, N] of a chunk's rows; zeros behind them."""
    row = SKIPPED + tl.arange(0, ROWS)
    return tl.load(x + (first + row).to(tl.int64) * N + head, mask=row < rows, other=0.0)


@jit
def running(g):
    """G, rounded once: multiples of 1 / 256 are added exactly, and what is left is small. A head that forgets fast has G of
    1,000 after 64 rows, where one rounding is 6e-5 of a weight. Not tl.cumsum: beside tl.sum it failed to compile in some
    versions of Triton."""
    row = tl.arange(0, 64)
    coarse = tl.floor(g * 256) / 256
    before = row[:, None] >= row[None, :]
    total = tl.sum(tl.where(before, coarse[None, :], 0.0), 1)
    return total + tl.sum(tl.where(before, (g - coarse)[None, :], 0.0), 1)


@jit
def decays_of(decays, first, rows, head, N):
    """(G, G of the last row) from memory."""
    last = tl.minimum(rows, 64) - 1
    row = first + tl.minimum(tl.arange(0, 64), last).to(tl.int64)
    return tl.load(decays + row * N + head), tl.load(decays + (first + last).to(tl.int64) * N + head)


@jit
def between(G):
    """E: the difference before exp, because e^-G may overflow."""
    row = tl.arange(0, 64)
    return tl.exp(tl.where(row[:, None] >= row[None, :], G[:, None] - G[None, :], float("-inf")))


@jit
def _pairs_kernel(
    q, q_row, k, k_row, g, P, decays, chunks, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    HEADS: tl.constexpr = N // GROUP
    slot, key_head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        row = tl.arange(0, 64)
        found = tl.zeros([64, 64], tl.float32)
        for block in tl.range(0, K, BK, num_stages=1, loop_unroll_factor=1):
            down = block + tl.arange(0, BK)
            keys = tile(k + key_head * K, k_row, first, rows, down, K)
            found += dot(tile(q + key_head * K, q_row, first, rows, down, K), tl.trans(keys))
        for head in range(key_head * GROUP, (key_head + 1) * GROUP):
            G = running(of_rows(g, first, rows, head, N))
            tl.store(decays + (first + row).to(tl.int64) * N + head, G, mask=row < rows)
            put_tile(P + head * 64, N * 64, first, rows, row, 64, found * between(G))


@jit
def _block_of_A(pairs, G_i, G_j, beta_i, DIAGONAL: tl.constexpr):
    """16 x 16; of one on the diagonal, what is below it."""
    row = tl.arange(0, 16)
    difference = G_i[:, None] - G_j[None, :]
    if DIAGONAL:
        difference = tl.where(row[:, None] > row[None, :], difference, float("-inf"))
    return beta_i[:, None] * pairs * tl.exp(difference)


@jit
def _inverse_of_block(A, PRECISION: tl.constexpr):
    """(I + A)^-1, 16 x 16."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -A, 0.0))
    for level in tl.static_range(1, 4):
        across = (i >> level == (j >> level) + 1) & (i >> (level + 1) == j >> (level + 1))
        left = tl.dot(inverse, tl.where(across, A, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(left, inverse, input_precision=PRECISION)
    return inverse


@jit
def _below(R_i, sums, PRECISION: tl.constexpr):
    return -tl.dot(R_i, sums, input_precision=PRECISION)


@jit
def _inverse_kernel(
    k, k_row, decays, beta, R, chunks, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0) // N, tl.program_id(0) % N
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        zero = tl.zeros([16, 16], tl.float32)
        k00, k10, k11, k20, k21, k22, k30, k31, k32, k33 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
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
        # G of rows behind the chunk is 0, which would overflow in exp(G_i - G_j): the last row's instead.
        last = tl.load(decays + (first + tl.minimum(rows, 64) - 1).to(tl.int64) * N + head)
        row = tl.arange(0, 16)
        G0 = tl.where(row < rows, of_rows(decays, first, rows, head, N, 0, 16), last)
        G1 = tl.where(16 + row < rows, of_rows(decays, first, rows, head, N, 16, 16), last)
        G2 = tl.where(32 + row < rows, of_rows(decays, first, rows, head, N, 32, 16), last)
        G3 = tl.where(48 + row < rows, of_rows(decays, first, rows, head, N, 48, 16), last)
        b1, b2 = of_rows(beta, first, rows, head, N, 16, 16), of_rows(beta, first, rows, head, N, 32, 16)
        b3 = of_rows(beta, first, rows, head, N, 48, 16)
        R00 = _inverse_of_block(_block_of_A(k00, G0, G0, of_rows(beta, first, rows, head, N, 0, 16), True), PRECISION)
        R11 = _inverse_of_block(_block_of_A(k11, G1, G1, b1, True), PRECISION)
        R22 = _inverse_of_block(_block_of_A(k22, G2, G2, b2, True), PRECISION)
        R33 = _inverse_of_block(_block_of_A(k33, G3, G3, b3, True), PRECISION)
        A10, A20, A30 = (
            _block_of_A(k10, G1, G0, b1, False),
            _block_of_A(k20, G2, G0, b2, False),
            _block_of_A(k30, G3, G0, b3, False),
        )
        A21, A31, A32 = (
            _block_of_A(k21, G2, G1, b2, False),
            _block_of_A(k31, G3, G1, b3, False),
            _block_of_A(k32, G3, G2, b3, False),
        )
        R10 = _below(R11, tl.dot(A10, R00, input_precision=PRECISION), PRECISION)
        R21 = _below(R22, tl.dot(A21, R11, input_precision=PRECISION), PRECISION)
        R32 = _below(R33, tl.dot(A32, R22, input_precision=PRECISION), PRECISION)
        sums = tl.dot(A20, R00, input_precision=PRECISION)
        R20 = _below(R22, tl.dot(A21, R10, sums, input_precision=PRECISION), PRECISION)
        sums = tl.dot(A31, R11, input_precision=PRECISION)
        R31 = _below(R33, tl.dot(A32, R21, sums, input_precision=PRECISION), PRECISION)
        sums = tl.dot(A31, R10, tl.dot(A30, R00, input_precision=PRECISION), input_precision=PRECISION)
        R30 = _below(R33, tl.dot(A32, R20, sums, input_precision=PRECISION), PRECISION)
        own, c0, c1 = R + head * 64, tl.arange(0, 16), 16 + tl.arange(0, 16)
        c2, c3 = 32 + tl.arange(0, 16), 48 + tl.arange(0, 16)
        put_tile(own, N * 64, first, rows, c0, 64, R00, 0, 16)
        put_tile(own, N * 64, first, rows, c1, 64, zero, 0, 16)
        put_tile(own, N * 64, first, rows, c2, 64, zero, 0, 16)
        put_tile(own, N * 64, first, rows, c3, 64, zero, 0, 16)
        put_tile(own, N * 64, first, rows, c0, 64, R10, 16, 16)
        put_tile(own, N * 64, first, rows, c1, 64, R11, 16, 16)
        put_tile(own, N * 64, first, rows, c2, 64, zero, 16, 16)
        put_tile(own, N * 64, first, rows, c3, 64, zero, 16, 16)
        put_tile(own, N * 64, first, rows, c0, 64, R20, 32, 16)
        put_tile(own, N * 64, first, rows, c1, 64, R21, 32, 16)
        put_tile(own, N * 64, first, rows, c2, 64, R22, 32, 16)
        put_tile(own, N * 64, first, rows, c3, 64, zero, 32, 16)
        put_tile(own, N * 64, first, rows, c0, 64, R30, 48, 16)
        put_tile(own, N * 64, first, rows, c1, 64, R31, 48, 16)
        put_tile(own, N * 64, first, rows, c2, 64, R32, 48, 16)
        put_tile(own, N * 64, first, rows, c3, 64, R33, 48, 16)


@jit
def of_program(N: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """(document, head, columns of V): the blocks of a head follow each other, and the heads of a document."""
    number = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    return number // (N * BLOCKS), number // BLOCKS % N, number % BLOCKS * BV + tl.arange(0, BV)


@jit
def _scan_kernel(
    q, q_row, k, k_row, v, v_row, decays, beta, P, R, o, o_row, D, states, bounds, initial, final, places, skip, scale,
    N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, DELTA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Pointers that a variant does not use may be any: o without OUTPUT, D and states with it, those of HAS_...,
    R with DELTA off, skip with DELTA."""
    document, head, across = of_program(N, V, BV)
    down, row = tl.arange(0, KP), tl.arange(0, 64)
    inside = (across < V)[:, None] & (down < K)[None, :]
    own = head.to(tl.int64) * K * V + down[None, :] * V + across[:, None]  # of a state [N, K, V]
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    M = tl.zeros([BV, KP], tl.float32)
    if HAS_INITIAL:
        M = tl.load(initial + tl.load(places + document).to(tl.int64) * N * K * V + own, mask=inside, other=0.0)
    for first in tl.range(start, end, 64, num_stages=STAGES):
        rows = end - first
        keys = tile(k + head // GROUP * K, k_row, first, rows, down, K)
        values = tile_transposed(v + head * V, v_row, first, rows, across, V).to(tl.float32)
        G, last = decays_of(decays, first, rows, head, N)
        b = of_rows(beta, first, rows, head, N)
        state = M.to(keys.dtype)
        new = b[None, :] * values
        if DELTA:
            inverse = tile(R + head * 64, N * 64, first, rows, row, 64)
            new = b[None, :] * (values - tl.exp(G)[None, :] * dot(state, tl.trans(keys)))
            new = dot(new.to(keys.dtype), tl.trans(inverse))
        if OUTPUT:
            queries = tile(q + head // GROUP * K, q_row, first, rows, down, K)
            seen = tile(P + head * 64, N * 64, first, rows, row, 64)
            out = tl.exp(G)[None, :] * dot(state, tl.trans(queries)) + dot(new.to(keys.dtype), tl.trans(seen))
            out *= scale
            if not DELTA:
                out += tl.load(skip + head).to(tl.float32) * values
            put_transposed(o + head * V, o_row, first, rows, across, V, out)
        else:
            slot = (first // 64 + document).to(tl.int64)
            tl.store(states + slot * N * K * V + own, state, mask=inside)
            put_transposed(D + head * V, N * V, first, rows, across, V, new)
        M = tl.exp(last) * M + dot((tl.exp(last - G)[None, :] * new).to(keys.dtype), keys)
    if HAS_FINAL:  # noqa: SIM102 (known to the compiler, the other is not)
        if end > start:
            tl.store(final + tl.load(places + document).to(tl.int64) * N * K * V + own, M, mask=inside)
