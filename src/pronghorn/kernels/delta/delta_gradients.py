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

from pronghorn.kernels.delta.delta_scan import between, between_transposed, dot, of_rows, put_tile, running, tile
from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def _reverse_kernel(
    do, do_row, q, q_row, k, k_row, g, beta, R, dv, dv_row, X, dstates, bounds, scale, N: tl.constexpr, GROUP: tl.constexpr,
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
        G, last = running(of_rows(g, first, rows, head, N))
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
def _by_state(x, x_row, states, first, rows, down, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr):
    """x state^T [rows of a chunk, K] of one head."""
    found = tl.zeros([64, KP], tl.float32)
    for block in range(0, V, BV):
        across = block + tl.arange(0, BV)
        inside = (down < K)[:, None] & (across < V)[None, :]
        state = tl.load(states + down[:, None] * V + across[None, :], mask=inside, other=0.0)
        found += dot(tile(x, x_row, first, rows, across, V), tl.trans(state))
    return found


@jit
def _within(do, do_row, D, X, v, v_row, row, first, rows, V: tl.constexpr, BV: tl.constexpr):
    """(do D^T, its transposed, X D^T, its transposed, the rows' X . v) of one head."""
    F, F_t = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    XD, XD_t = tl.zeros([64, 64], tl.float32), tl.zeros([64, 64], tl.float32)
    xv = tl.zeros([64], tl.float32)
    for block in range(0, V, BV):
        across = block + tl.arange(0, BV)
        grad, new = tile(do, do_row, first, rows, across, V), tile(D, row, first, rows, across, V)
        F += dot(grad, tl.trans(new))
        F_t += dot(new, tl.trans(grad))
        x = tile(X, row, first, rows, across, V)
        XD += dot(x, tl.trans(new))
        XD_t += dot(new, tl.trans(x))
        xv += tl.sum(x.to(tl.float32) * tile(v, v_row, first, rows, across, V).to(tl.float32), 1)
    return F, F_t, XD, XD_t, xv


@jit
def _product_of_states(one, other, down, V: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BV: tl.constexpr):
    """The sum of one * other."""
    total = tl.zeros([KP, BV], tl.float32)
    for block in range(0, V, BV):
        across = block + tl.arange(0, BV)
        inside = (down < K)[:, None] & (across < V)[None, :]
        place = down[:, None] * V + across[None, :]
        found = tl.load(one + place, mask=inside, other=0.0).to(tl.float32)
        total += found * tl.load(other + place, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(total, 1), 0)


@jit
def _local_kernel(
    do, do_row, q, q_row, k, k_row, v, v_row, g, beta, D, X, states, dstates, dq, dq_row, dk, dk_row, dg, dbeta, chunks, scale,
    N: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    slot, key_head = tl.program_id(0), tl.program_id(1)
    first, rows = tl.load(chunks + 2 * slot), tl.load(chunks + 2 * slot + 1)
    if rows > 0:
        down, row = tl.arange(0, KP), tl.arange(0, 64)
        i, j = row[:, None], row[None, :]
        dqueries, dkeys = tl.zeros([64, KP], tl.float32), tl.zeros([64, KP], tl.float32)
        for head in range(key_head * GROUP, (key_head + 1) * GROUP):
            G, last = running(of_rows(g, first, rows, head, N))
            b = of_rows(beta, first, rows, head, N)
            F, F_t, XD, XD_t, xv = _within(
                do + head * V, do_row, D + head * V, X + head * V, v + head * V, v_row, N * V, first, rows, V, BV
            )
            keys = tile(k + key_head * K, k_row, first, rows, down, K)
            queries = tile(q + key_head * K, q_row, first, rows, down, K)
            E, E_t = between(G), between_transposed(G)
            dA_E = tl.where(i > j, -XD * E, 0.0)
            products = dA_E * dot(keys, tl.trans(keys))
            db = xv + tl.sum(products, 1)
            products = b[:, None] * products + scale * F * E * dot(queries, tl.trans(keys))
            dG = tl.sum(products, 1) - tl.sum(products, 0)
            H = dA_E * b[:, None] + tl.where(i < j, -XD_t * E_t, 0.0) * b[None, :]
            dqueries += scale * dot((F * E).to(keys.dtype), keys)
            dkeys += scale * dot((F_t * E_t).to(keys.dtype), queries) + dot(H.to(keys.dtype), keys)

            state = (slot.to(tl.int64) * N + head) * K * V
            by_do = tl.exp(G)[:, None] * _by_state(do + head * V, do_row, states + state, first, rows, down, V, K, KP, BV)
            dqueries += scale * by_do
            dG += scale * tl.sum(queries.to(tl.float32) * by_do, 1)
            by_x = tl.exp(G)[:, None] * _by_state(X + head * V, N * V, states + state, first, rows, down, V, K, KP, BV)
            dkeys -= b[:, None] * by_x
            seen = tl.sum(keys.to(tl.float32) * by_x, 1)
            dG -= b * seen
            kept = tl.exp(last - G)[:, None] * _by_state(D + head * V, N * V, dstates + state, first, rows, down, V, K, KP, BV)
            dkeys += kept
            left = tl.sum(keys.to(tl.float32) * kept, 1)
            behind = tl.exp(last) * _product_of_states(states + state, dstates + state, down, V, K, KP, BV) + tl.sum(left, 0)
            dG += tl.where(row == 63, behind, 0.0) - left
            place = (first + row).to(tl.int64) * N + head
            tl.store(dg + place, tl.sum(tl.where(i >= j, dG[:, None], 0.0), 0), mask=row < rows)
            tl.store(dbeta + place, db - seen, mask=row < rows)
        put_tile(dq + key_head * K, dq_row, first, rows, down, K, dqueries)
        put_tile(dk + key_head * K, dk_row, first, rows, down, K, dkeys)
