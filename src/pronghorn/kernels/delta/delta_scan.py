"""Triton kernels of the delta rule that forward needs (delta_rule.py has the formulas and the letters).

    _pairs_kernel       program = chunk and key head: G and P of its value heads
    _inverse_kernel     (delta_inverse.py) R
    _scan_kernel        program = document, value head and V block: goes through the document's chunks, M in registers;
                        writes o or, for backward, D and the state before each chunk; then through those of the answers that
                        share the document, each from its last M (conv/shared_prompts.py)

The kernels that carry a state from chunk to chunk hold everything transposed: M^T [V block, K], rows of a chunk as columns. So
the first operand of each product has fewer than 64 rows. With 64, Triton 3.6 takes Hopper's asynchronous products, whose
results in these loops are wrong on an H200 (2026-11-18: errors of 0.9, illegal addresses; with two warps, which cannot use
them, the same kernels are right). Programs are numbered so that neighbours read the same rows.
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
def of_program(N: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """(document, head, columns of V): the blocks of a head follow each other, and the heads of a document."""
    number = tl.program_id(0)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    return number // (N * BLOCKS), number // BLOCKS % N, number % BLOCKS * BV + tl.arange(0, BV)


@jit
def _scan_document(
    M, document, start, end, head, across, down, own, inside, q, q_row, k, k_row, v, v_row, decays, beta, P, R, o, o_row, D,
    states, skip, scale, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, OUTPUT: tl.constexpr,
    DELTA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, 64)
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
    return M


@jit
def _scan_kernel(
    q, q_row, k, k_row, v, v_row, decays, beta, P, R, o, o_row, D, states, bounds, behinds, initial, final, places, skip, scale,
    N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OUTPUT: tl.constexpr, HAS_INITIAL: tl.constexpr, HAS_FINAL: tl.constexpr, SHARED: tl.constexpr, DELTA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Pointers that a variant does not use may be any: o without OUTPUT, D and states with it, those of HAS_..., behinds
    without SHARED, R with DELTA off, skip with DELTA."""
    document, head, across = of_program(N, V, BV)
    down = tl.arange(0, KP)
    inside = (across < V)[:, None] & (down < K)[None, :]
    own = head.to(tl.int64) * K * V + down[None, :] * V + across[:, None]  # of a state [N, K, V]
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    M = tl.zeros([BV, KP], tl.float32)
    if HAS_INITIAL:
        M = tl.load(initial + tl.load(places + document).to(tl.int64) * N * K * V + own, mask=inside, other=0.0)
    if SHARED:  # of an answer there is nothing to do: its prompt's program does it
        for number in tl.range(0, tl.load(behinds + document) - document, num_stages=1):
            one = document + number
            last = _scan_document(
                M, one, tl.load(bounds + one), tl.load(bounds + one + 1), head, across, down, own, inside, q, q_row, k, k_row,
                v, v_row, decays, beta, P, R, o, o_row, D, states, skip, scale, N, GROUP, K, V, OUTPUT, DELTA, STAGES,
            )  # fmt: skip
            M = tl.where(one == document, last, M)
    else:
        M = _scan_document(
            M, document, start, end, head, across, down, own, inside, q, q_row, k, k_row, v, v_row, decays, beta, P, R, o,
            o_row, D, states, skip, scale, N, GROUP, K, V, OUTPUT, DELTA, STAGES,
        )  # fmt: skip
    if HAS_FINAL:  # noqa: SIM102 (known to the compiler, the other is not)
        if end > start:
            tl.store(final + tl.load(places + document).to(tl.int64) * N * K * V + own, M, mask=inside)
