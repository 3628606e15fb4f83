"""Triton kernels of the delta rule that forward needs (delta_rule.py has the formulas and the letters).

    _chunk_kernel       program = chunk and value head: G, P and, for forward, R
    _scan_kernel        program = document, value head and V block: goes through the document's chunks, M in registers;
                        writes o or, for backward, D and the state before each chunk

R by doubling: with the inverse X of each diagonal block of size h, that of size 2 h is X - X A' X, where A' is A between the
two halves. Six levels, whose products are of inverses only; the geometric series of A has powers up to 1e18 for equal keys.
"""

from __future__ import annotations

from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def dot(a, b):
    """Exact products in float32; the parameter means nothing in 16 bits."""
    return tl.dot(a, b, input_precision="ieee")


@jit
def tile(x, x_row, first, rows, column, width):
    """[rows of a chunk, columns]; zeros outside."""
    row = tl.arange(0, 64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    return tl.load(x + (first + row).to(tl.int64)[:, None] * x_row + column[None, :], mask=inside, other=0.0)


@jit
def put_tile(x, x_row, first, rows, column, width, values):
    row = tl.arange(0, 64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = x + (first + row).to(tl.int64)[:, None] * x_row + column[None, :]
    tl.store(place, values.to(x.dtype.element_ty), mask=inside)


@jit
def of_rows(x, first, rows, head, N):
    """x [T, N] of a chunk's rows; zeros behind them."""
    row = tl.arange(0, 64)
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
def between_transposed(G):
    row = tl.arange(0, 64)
    return tl.exp(tl.where(row[:, None] <= row[None, :], G[None, :] - G[:, None], float("-inf")))


@jit
def _chunk_kernel(
    q, q_row, k, k_row, g, beta, P, R, decays, chunks, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    INVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot, head = tl.program_id(0), tl.program_id(1)
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        row = tl.arange(0, 64)
        i, j = row[:, None], row[None, :]
        G = running(of_rows(g, first, rows, head, N))
        tl.store(decays + (first + row).to(tl.int64) * N + head, G, mask=row < rows)
        qk, kk = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
        for block in tl.range(0, K, BK, num_stages=1, loop_unroll_factor=1):
            down = block + tl.arange(0, BK)
            keys = tile(k + head // GROUP * K, k_row, first, rows, down, K)
            qk += dot(tile(q + head // GROUP * K, q_row, first, rows, down, K), tl.trans(keys))
            if INVERSE:
                kk += dot(keys, tl.trans(keys))
        E = between(G)
        put_tile(P + head * 64, N * 64, first, rows, row, 64, qk * E)
        if INVERSE:
            A = kk * E * of_rows(beta, first, rows, head, N)[:, None]
            inverse = tl.where(i == j, 1.0, tl.where((i > j) & (i // 2 == j // 2), -A, 0.0))
            for level in range(1, 6):
                across = (i >> level == (j >> level) + 1) & (i >> (level + 1) == j >> (level + 1))
                left = tl.dot(inverse, tl.where(across, A, 0.0), input_precision=PRECISION)
                inverse -= tl.dot(left, inverse, input_precision=PRECISION)
            put_tile(R + head * 64, N * 64, first, rows, row, 64, inverse)


@jit
def _scan_kernel(
    q, q_row, k, k_row, v, v_row, decays, beta, P, R, o, o_row, D, states, bounds, initial, final, places, skip, scale,
    N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Pointers that a variant does not use may be any: o without OUTPUT, D and states with it, those of HAS_...,
    R with DELTA off, skip with DELTA."""
    document, head = tl.program_id(0), tl.program_id(1)
    across, down = tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, KP)
    inside = (down < K)[:, None] & (across < V)[None, :]
    own = head.to(tl.int64) * K * V + down[:, None] * V + across[None, :]  # of a state [N, K, V]
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    M = tl.zeros([KP, BV], tl.float32)
    if HAS_INITIAL:
        M = tl.load(initial + tl.load(places + document).to(tl.int64) * N * K * V + own, mask=inside, other=0.0)
    for first in tl.range(start, end, 64, num_stages=1):
        rows = end - first
        keys = tile(k + head // GROUP * K, k_row, first, rows, down, K)
        values = tile(v + head * V, v_row, first, rows, across, V)
        G, last = decays_of(decays, first, rows, head, N)
        b = of_rows(beta, first, rows, head, N)
        state = M.to(keys.dtype)
        new = b[:, None] * values.to(tl.float32)
        if DELTA:
            inverse = tile(R + head * 64, N * 64, first, rows, tl.arange(0, 64), 64)
            new = b[:, None] * (values.to(tl.float32) - tl.exp(G)[:, None] * dot(keys, state))
            new = dot(inverse, new.to(keys.dtype))
        if OUTPUT:
            queries = tile(q + head // GROUP * K, q_row, first, rows, down, K)
            seen = tile(P + head * 64, N * 64, first, rows, tl.arange(0, 64), 64)
            out = tl.exp(G)[:, None] * dot(queries, state) + dot(seen, new.to(keys.dtype))
            out *= scale
            if not DELTA:
                out += tl.load(skip + head).to(tl.float32) * values.to(tl.float32)
            put_tile(o + head * V, o_row, first, rows, across, V, out)
        else:
            slot = (first // 64 + document).to(tl.int64)
            tl.store(states + slot * N * K * V + own, state, mask=inside)
            put_tile(D + head * V, N * V, first, rows, across, V, new)
        M = tl.exp(last) * M + dot(tl.trans(keys), (tl.exp(last - G)[:, None] * new).to(keys.dtype))
    if HAS_FINAL:  # noqa: SIM102 (known to the compiler, the other is not)
        if end > start:
            tl.store(final + tl.load(places + document).to(tl.int64) * N * K * V + own, M, mask=inside)
