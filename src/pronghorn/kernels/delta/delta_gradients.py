"""Triton kernels of the delta rule's backward (delta_rule.py has the formulas and the letters).

    _scan_kernel        (delta_scan.py) once more: D, and the state before each chunk
    _reverse_kernel     program = document, value head and V block: from the last chunk to the first, dM in registers;
                        writes dv, X and the gradient of the state behind each chunk
    _local_kernel       program = chunk and key head: everything else, for its value heads one after the other, so that
                        dq and dk are sums in a fixed order

No product has a transposed result of a product as its first operand: Triton 3.4 to 3.7 gets that wrong on Hopper. Where the
transposed of F or X D^T is needed, it is a product of its own.
"""

from __future__ import annotations

from pronghorn.kernels.delta.delta_scan import between, between_transposed, dot, kept_running, of_rows, put_tile, tile
from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def _reverse_kernel(
    do, do_row, q, q_row, k, k_row, decays, beta, R, dv, dv_row, X, dstates, bounds, scale, N: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    document, head = tl.program_id(0), tl.program_id(1)
    across, down = tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, KP)
    inside = (down < K)[:, None] & (across < V)[None, :]
    own = head.to(tl.int64) * K * V + down[:, None] * V + across[None, :]
    start, end = tl.load(bounds + document), tl.load(bounds + document + 1)
    dM = tl.zeros([KP, BV], tl.float32)
    for back in tl.range(0, tl.cdiv(end - start, 64), num_stages=STAGES):
        first = start + (tl.cdiv(end - start, 64) - 1 - back) * 64
        rows = end - first
        keys = tile(k + head // GROUP * K, k_row, first, rows, down, K)
        queries = tile(q + head // GROUP * K, q_row, first, rows, down, K)
        inverse = tile(R + head * 64, N * 64, first, rows, tl.arange(0, 64), 64)
        grad = tile(do + head * V, do_row, first, rows, across, V)
        G, last = kept_running(decays, first, rows, head, N)
        b = of_rows(beta, first, rows, head, N)
        dstate = dM.to(keys.dtype)
        tl.store(dstates + (first // 64 + document).to(tl.int64) * N * K * V + own, dstate, mask=inside)
        P = scale * dot(keys, tl.trans(queries)) * between_transposed(G)  # transposed
        dnew = dot(P.to(keys.dtype), grad) + tl.exp(last - G)[:, None] * dot(keys, dstate)
        x = dot(tl.trans(inverse), dnew.to(keys.dtype))
        put_tile(X + head * V, N * V, first, rows, across, V, x)
        put_tile(dv + head * V, dv_row, first, rows, across, V, b[:, None] * x)
        seen = (tl.exp(G)[:, None] * grad.to(tl.float32)).to(keys.dtype)
        corrected = ((b * tl.exp(G))[:, None] * x).to(keys.dtype)
        dM = tl.exp(last) * dM + scale * dot(tl.trans(queries), seen) - dot(tl.trans(keys), corrected)


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
def _both_ways(a, a_row, b, b_row, first, rows, V: tl.constexpr, BV: tl.constexpr):
    """(a b^T, b a^T) of one head, [rows of a chunk, rows of a chunk]."""
    one, other = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    for block in tl.range(0, V, BV, loop_unroll_factor=1):
        across = block + tl.arange(0, BV)
        left, right = tile(a, a_row, first, rows, across, V), tile(b, b_row, first, rows, across, V)
        one += dot(left, tl.trans(right))
        other += dot(right, tl.trans(left))
    return one, other


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
    do, do_row, q, q_row, k, k_row, v, v_row, decays, beta, D, X, states, dstates, dq, dq_row, dk, dk_row, dg, dbeta, sums, sums_2,
    chunks, scale, N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    slot, key_head = tl.program_id(0), tl.program_id(1)
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        row, wide, sums_row = tl.arange(0, 64), tl.arange(0, KP), N // GROUP * K
        i, j = row[:, None], row[None, :]
        for head in range(key_head * GROUP, (key_head + 1) * GROUP):
            G, last = kept_running(decays, first, rows, head, N)
            b = of_rows(beta, first, rows, head, N)
            grad, new, x = do + head * V, D + head * V, X + head * V
            state = (slot.to(tl.int64) * N + head) * K * V
            keys = tile(k + key_head * K, k_row, first, rows, wide, K)

            F, F_t = _both_ways(grad, do_row, new, N * V, first, rows, V, BV)  # o's own chunk
            F *= scale * between(G)
            products = F * dot(tile(q + key_head * K, q_row, first, rows, wide, K), tl.trans(keys))
            dG = tl.sum(products, 1) - tl.sum(products, 0)
            by_o, by_o_t = F.to(keys.dtype), (scale * F_t * between_transposed(G)).to(keys.dtype)

            XD, XD_t = _both_ways(x, N * V, new, N * V, first, rows, V, BV)  # A
            XD = tl.where(i > j, -XD * between(G), 0.0)
            products = XD * dot(keys, tl.trans(keys))
            db = _row_products(x, N * V, v + head * V, v_row, first, rows, V, BV) + tl.sum(products, 1)
            products *= b[:, None]
            dG += tl.sum(products, 1) - tl.sum(products, 0)
            H = XD * b[:, None] + tl.where(i < j, -XD_t * between_transposed(G), 0.0) * b[None, :]
            by_A = H.to(keys.dtype)

            for block in tl.range(0, K, BK, loop_unroll_factor=1):  # states
                down = block + tl.arange(0, BK)
                some_keys = tile(k + key_head * K, k_row, first, rows, down, K)
                queries = tile(q + key_head * K, q_row, first, rows, down, K)
                part = (scale * tl.exp(G))[:, None] * _by_state(grad, do_row, states + state, first, rows, down, V, K, BK, BV)
                dG += tl.sum(queries.to(tl.float32) * part, 1)
                total = part + dot(by_o, some_keys)
                at = key_head * K
                starts, ends = head == key_head * GROUP, head == (key_head + 1) * GROUP - 1
                _add_up(sums + at, dq + at, dq_row, sums_row, first, rows, down, K, total, starts, ends)
                part = tl.exp(G)[:, None] * _by_state(x, N * V, states + state, first, rows, down, V, K, BK, BV)
                seen = tl.sum(some_keys.to(tl.float32) * part, 1)
                db -= seen
                dG -= b * seen
                total = dot(by_o_t, queries) + dot(by_A, some_keys) - b[:, None] * part
                part = tl.exp(last - G)[:, None] * _by_state(new, N * V, dstates + state, first, rows, down, V, K, BK, BV)
                kept = tl.sum(some_keys.to(tl.float32) * part, 1)
                behind = tl.exp(last) * _product_of_states(states + state, dstates + state, down, V, K, BK, BV)
                dG += tl.where(row == 63, behind + tl.sum(kept, 0), 0.0) - kept
                _add_up(sums_2 + at, dk + at, dk_row, sums_row, first, rows, down, K, total + part, starts, ends)
            place = (first + row).to(tl.int64) * N + head
            tl.store(dg + place, tl.sum(tl.where(i >= j, dG[:, None], 0.0), 0), mask=row < rows)
            tl.store(dbeta + place, db, mask=row < rows)
            tl.debug_barrier()  # before another thread may read what this one put into the sums
