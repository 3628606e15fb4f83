"""Triton kernels of the delta rule's backward (delta_rule.py has the formulas and the letters).

    _scan_kernel        (delta_scan.py) once more: D, and the state before each chunk
    _reverse_kernel     program = document, value head and V block: from the last chunk to the first, dM in registers;
                        writes dv, X and the gradient of the state behind each chunk; before that through the answers that
                        share the document, from the last one, whose dM are added
    _weights_kernel     program = chunk and value head: F * E, H, and their part of dG and dbeta
    _local_kernel       program = chunk and key head: everything else, K block by K block, for its value heads one after the
                        other, so that dq and dk are sums in a fixed order

No product has a transposed result of a product as its first operand: Triton 3.4 to 3.7 gets that wrong on Hopper. F * E and H
are needed both ways and go through memory.
"""

from __future__ import annotations

from pronghorn.kernels.delta.delta_scan import (
    between,
    decays_of,
    dot,
    of_program,
    of_rows,
    put_tile,
    put_transposed,
    tile,
    tile_transposed,
)
from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def _reverse_document(
    dM, document, start, end, head, across, down, own, inside, do, do_row, q, q_row, k, k_row, decays, beta, P, R, dv, dv_row,
    X, dstates, skip, scale, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, DELTA: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, 64)
    for back in tl.range(0, tl.cdiv(end - start, 64), num_stages=STAGES):
        first = start + (tl.cdiv(end - start, 64) - 1 - back) * 64
        rows = end - first
        keys = tile(k + head // GROUP * K, k_row, first, rows, down, K)
        queries = tile(q + head // GROUP * K, q_row, first, rows, down, K)
        grad = tile_transposed(do + head * V, do_row, first, rows, across, V)
        G, last = decays_of(decays, first, rows, head, N)
        b = of_rows(beta, first, rows, head, N)
        dstate = dM.to(keys.dtype)
        tl.store(dstates + (first // 64 + document).to(tl.int64) * N * K * V + own, dstate, mask=inside)
        seen = tile(P + head * 64, N * 64, first, rows, row, 64)
        x = scale * dot(grad, seen) + tl.exp(last - G)[None, :] * dot(dstate, tl.trans(keys))
        if DELTA:
            x = dot(x.to(keys.dtype), tile(R + head * 64, N * 64, first, rows, row, 64))
        put_transposed(X + head * V, N * V, first, rows, across, V, x)
        dvalues = b[None, :] * x
        if not DELTA:
            dvalues += tl.load(skip + head).to(tl.float32) * grad.to(tl.float32)
        put_transposed(dv + head * V, dv_row, first, rows, across, V, dvalues)
        dM = tl.exp(last) * dM + scale * dot((tl.exp(G)[None, :] * grad.to(tl.float32)).to(keys.dtype), queries)
        if DELTA:
            dM -= dot(((b * tl.exp(G))[None, :] * x).to(keys.dtype), keys)
    return dM


@jit
def _reverse_kernel(
    do, do_row, q, q_row, k, k_row, decays, beta, P, R, dv, dv_row, X, dstates, bounds, behinds, skip, scale, N: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SHARED: tl.constexpr,
    DELTA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    document, head, across = of_program(N, V, BV)
    down = tl.arange(0, KP)
    inside = (across < V)[:, None] & (down < K)[None, :]
    own = head.to(tl.int64) * K * V + down[None, :] * V + across[:, None]
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    dM = tl.zeros([BV, KP], tl.float32)
    if SHARED:  # the last answer first, the prompt last
        behind = tl.load(behinds + document)
        for number in tl.range(1, behind - document + 1, num_stages=1):
            one = behind - number
            dM += _reverse_document(
                tl.where(one == document, dM, 0.0), one, tl.load(bounds + one), tl.load(bounds + one + 1), head, across, down,
                own, inside, do, do_row, q, q_row, k, k_row, decays, beta, P, R, dv, dv_row, X, dstates, skip, scale, N, GROUP,
                K, V, DELTA, STAGES,
            )  # fmt: skip
    else:
        _reverse_document(
            dM, document, start, end, head, across, down, own, inside, do, do_row, q, q_row, k, k_row, decays, beta, P, R, dv,
            dv_row, X, dstates, skip, scale, N, GROUP, K, V, DELTA, STAGES,
        )  # fmt: skip


@jit
def _by_state(x, x_row, states, first, rows, down, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """x state^T [rows of a chunk, some of K] of one head."""
    found = tl.zeros([64, BK], tl.float32)
    for block in tl.range(0, V, BV, loop_unroll_factor=1):
        across = block + tl.arange(0, BV)
        inside = (down < K)[:, None] & (across < V)[None, :]
        state = tl.load(states + down[:, None] * V + across[None, :], mask=inside, other=0.0)
        found += dot(tile(x, x_row, first, rows, across, V), tl.trans(state))
    return found


@jit
def _pair_products(a, a_row, b, b_row, first, rows, V: tl.constexpr, BV: tl.constexpr):
    """a b^T [rows of a chunk, rows of a chunk] of one head."""
    found = tl.zeros([64, 64], tl.float32)
    for block in tl.range(0, V, BV, loop_unroll_factor=1):
        across = block + tl.arange(0, BV)
        found += dot(tile(a, a_row, first, rows, across, V), tl.trans(tile(b, b_row, first, rows, across, V)))
    return found


@jit
def _row_products(a, a_row, b, b_row, first, rows, V: tl.constexpr, BV: tl.constexpr):
    """a . b of each row."""
    total = tl.zeros([64], tl.float32)
    for block in tl.range(0, V, BV, loop_unroll_factor=1):
        across = block + tl.arange(0, BV)
        value = tile(a, a_row, first, rows, across, V).to(tl.float32)
        total += tl.sum(value * tile(b, b_row, first, rows, across, V).to(tl.float32), 1)
    return total


@jit
def _weights_kernel(
    do, do_row, k, k_row, v, v_row, decays, beta, P, D, X, by_o, by_A, dg, dbeta, dskip, chunks, scale, N: tl.constexpr,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
    NEED_SKIP: tl.constexpr,
):  # fmt: skip
    """scale F * E and, with DELTA, H; what is known of dG and dbeta by them."""
    slot, head = tl.program_id(0) // N, tl.program_id(0) % N
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        row = tl.arange(0, 64)
        G, _ = decays_of(decays, first, rows, head, N)
        b = of_rows(beta, first, rows, head, N)
        F = scale * _pair_products(do + head * V, do_row, D + head * V, N * V, first, rows, V, BV)
        put_tile(by_o + head * 64, N * 64, first, rows, row, 64, F * between(G))
        F *= tile(P + head * 64, N * 64, first, rows, row, 64).to(tl.float32)
        dG = tl.sum(F, 1) - tl.sum(F, 0)
        db = _row_products(X + head * V, N * V, v + head * V, v_row, first, rows, V, BV)
        place = (first + row).to(tl.int64) * N + head
        if DELTA:
            dA = -_pair_products(X + head * V, N * V, D + head * V, N * V, first, rows, V, BV)
            dA = tl.where(row[:, None] > row[None, :], dA * between(G), 0.0)
            put_tile(by_A + head * 64, N * 64, first, rows, row, 64, dA * b[:, None])
            keys = k + head // GROUP * K
            dA *= _pair_products(keys, k_row, keys, k_row, first, rows, K, BK)
            db += tl.sum(dA, 1)
            dA *= b[:, None]
            dG += tl.sum(dA, 1) - tl.sum(dA, 0)
        if NEED_SKIP:
            found = _row_products(do + head * V, do_row, v + head * V, v_row, first, rows, V, BV)
            tl.store(dskip + place, found, mask=row < rows)
        tl.store(dg + place, dG, mask=row < rows)
        tl.store(dbeta + place, db, mask=row < rows)


@jit
def _product_of_states(one, other, down, V: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """The sum of one * other over some of K."""
    total = tl.zeros([BK], tl.float32)
    for block in tl.range(0, V, BV, loop_unroll_factor=1):
        across = block + tl.arange(0, BV)
        inside = (down < K)[:, None] & (across < V)[None, :]
        place = down[:, None] * V + across[None, :]
        found = tl.load(one + place, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(found * tl.load(other + place, mask=inside, other=0.0).to(tl.float32), 1)
    return tl.sum(total, 0)


@jit
def _add_up(sums, out, out_row, sums_row, first, rows, down, width, values, starts, ends):
    """The heads before this one left their sum in `sums`; the last one writes the result."""
    if not starts:
        values += tile(sums, sums_row, first, rows, down, width)
    if ends:
        put_tile(out, out_row, first, rows, down, width, values)
    else:
        put_tile(sums, sums_row, first, rows, down, width, values)


@jit
def _local_kernel(
    do, do_row, q, q_row, k, k_row, decays, beta, D, X, by_o, by_A, dG, db, states, dstates, dq, dq_row, dk, dk_row, dg, dbeta,
    sums, sums_2, chunks, scale, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    slot, key_head = tl.program_id(0), tl.program_id(1)
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        row, sums_row, at = tl.arange(0, 64), N // GROUP * K, key_head * K
        for head in range(key_head * GROUP, (key_head + 1) * GROUP):
            starts, ends = head == key_head * GROUP, head == (key_head + 1) * GROUP - 1
            state = (slot.to(tl.int64) * N + head) * K * V
            G, last = decays_of(decays, first, rows, head, N)
            b = of_rows(beta, first, rows, head, N)
            slope, step = of_rows(dG, first, rows, head, N), of_rows(db, first, rows, head, N)
            for block in tl.range(0, K, BK, loop_unroll_factor=1):
                down = block + tl.arange(0, BK)
                keys = tile(k + at, k_row, first, rows, down, K)
                queries = tile(q + at, q_row, first, rows, down, K)
                weights = tile(by_o + head * 64, N * 64, first, rows, row, 64)
                part = _by_state(do + head * V, do_row, states + state, first, rows, down, V, K, BK, BV)
                part *= (scale * tl.exp(G))[:, None]
                slope += tl.sum(queries.to(tl.float32) * part, 1)
                _add_up(sums + at, dq + at, dq_row, sums_row, first, rows, down, K, part + dot(weights, keys), starts, ends)
                total = dot(tl.trans(weights), queries)
                if DELTA:
                    weights = tile(by_A + head * 64, N * 64, first, rows, row, 64)
                    total += dot(weights, keys) + dot(tl.trans(weights), keys)
                    part = tl.exp(G)[:, None] * _by_state(X + head * V, N * V, states + state, first, rows, down, V, K, BK, BV)
                    seen = tl.sum(keys.to(tl.float32) * part, 1)
                    step -= seen
                    slope -= b * seen
                    total -= b[:, None] * part
                part = _by_state(D + head * V, N * V, dstates + state, first, rows, down, V, K, BK, BV)
                part *= tl.exp(last - G)[:, None]
                kept = tl.sum(keys.to(tl.float32) * part, 1)
                behind = tl.exp(last) * _product_of_states(states + state, dstates + state, down, V, K, BK, BV)
                slope += tl.where(row == 63, behind + tl.sum(kept, 0), 0.0) - kept
                _add_up(sums_2 + at, dk + at, dk_row, sums_row, first, rows, down, K, total + part, starts, ends)
            place = (first + row).to(tl.int64) * N + head
            slope = tl.sum(tl.where(row[:, None] >= row[None, :], slope[:, None], 0.0), 0)
            tl.store(dg + place, slope, mask=row < rows)
            tl.store(dbeta + place, step, mask=row < rows)
            tl.debug_barrier()  # before another thread may read what this one put into the sums
