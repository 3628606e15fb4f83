"""The gated delta rule over the documents of a pack (Gated DeltaNet: Qwen3.5), in chunks of 64 rows.

T = packed tokens, J = key heads, K = key width, N = value heads (N / J neighbours share a key head), V = value width,
S = slots of the chunk table (delta_chunks.py), C = 64 rows of a chunk. State M [K, V] of each value head, in float32, zero at
the start of a document (or `initial`):

    M <- exp(g_t) M;  d_t = beta_t (v_t - M^T k_t);  M <- M + k_t d_t^T;  o_t = K^-1/2 M^T q_t

In a chunk with rows i, j and the state M0 before it, G_i = g_1 + ... + g_i, E_ij = exp(G_i - G_j) for i >= j, else 0:

    A_ij = beta_i (k_i . k_j) E_ij for i > j;  R = (I + A)^-1          parallel over chunks; what backward needs of forward
    D = R diag(beta) (v - diag(e^G) k M0)                              all d_t of the chunk
    o = scale (diag(e^G) q M0 + P D),  P = q k^T * E
    M1 = e^(G_C) M0 + k^T diag(e^(G_C - G)) D                          chunk after chunk

    dD = scale P^T do + diag(e^(G_C - G)) k dM1;  X = R^T dD           backward: from the last chunk to the first
    dM0 = e^(G_C) dM1 + scale q^T diag(e^G) do - k^T diag(beta e^G) X
    dv = beta X;  dA = -tril(X D^T, -1);  F = do D^T;  H = dA * beta * E         from here on each chunk by itself
    dq = scale (e^G do M0^T + (F * E) k)
    dk = scale (F * E)^T q + e^(G_C - G) D dM1^T - beta e^G X M0^T + (H + H^T) k
    dbeta = X . (v - e^G k M0) + rowsum(dA * k k^T * E)
    B = F * scale P + dA * A;  dG = rowsum(B) - colsum(B) + scale e^G (q M0 . do) - beta e^G (k M0 . X) - kept
    dG_C += e^(G_C) <dM1, M0> + sum(kept);  kept = e^(G_C - G) k . (D dM1^T);  dg = reversed cumulative sum of dG

Mamba-2 is the same without the correction: where `skip_N` is given (DELTA off in the kernels),

    M <- exp(g_t) M + k_t (beta_t v_t)^T;  o_t = M^T q_t + skip v_t        q = C, k = B, beta = dt, g = dt A

so R = I, A = 0, scale = 1, D = diag(beta) v and X = dD: what reads R, dA or H above is left out. dv has skip do more,
dskip = sum over t of do . v.

G, E and M are in float32, and R while it is made; operands of products are rounded to the inputs' dtype, sums are in float32.

Where answers share prompts (conv/shared_prompts.py), a prompt's program goes on with its answers, each from the prompt's last
M, and dM of the prompt begins as the sum of its answers' dM0: no launch and no memory more.

Three launches forward (delta_scan.py, delta_inverse.py), five backward (delta_gradients.py). Backward's own memory, for 16,384
tokens in 80 documents with 32 value heads of 128 x 128 in 16 bits: M0 and dM1 352 MB each, D and X 134 each, P, F * E and H 67
each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.conv.shared_prompts import SharedPrompts
from pronghorn.kernels.delta.delta_chunks import CHUNK
from pronghorn.kernels.delta.delta_gradients import _local_kernel, _reverse_kernel, _weights_kernel
from pronghorn.kernels.delta.delta_inverse import _inverse_kernel
from pronghorn.kernels.delta.delta_rule_torch import backward_torch, inverse_torch, put_rows, scan_torch
from pronghorn.kernels.delta.delta_scan import _pairs_kernel, _scan_kernel
from pronghorn.kernels.runtime.dispatch import chip_of, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order
from pronghorn.kernels.runtime.work import count

# Of the products that give R, which is rounded to the inputs' dtype: 10 bits are enough for bf16's 7, not for fp16's 10.
PRECISIONS = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}


class _Tiles(NamedTuple):
    """The fastest of what was tried on an H200 with heads of 128 in 16 bits (2026-11-19); scans have at most 32 columns, so
    that a product has fewer than 64 rows (delta_scan.py). In float32, which is for debugging, heads of 128 spill 3 to 8 KB."""

    scan: int  # V columns of a program
    stages: int  # chunks whose rows are on their way
    keys: int  # K columns of a step, in products of rows
    pairs: int  # columns of a step, in products of rows that give pairs
    local: tuple[int, int]  # K and V columns of a step

    @staticmethod
    def of(K: int, V: int, x: Tensor, *, shared: bool = False) -> _Tiles:
        """`shared`: scans hold a second state."""
        large, K, V = chip_of(x.device).large and _padded(K) <= 128, _padded(K), _padded(V)
        if x.dtype == torch.float32:  # no tensor cores: products are unrolled
            return _Tiles(16, 1, 16, 16, (16, 16))
        # ms of a forward scan: 0.57; 0.83 with 1 stage, 0.83 with 16 columns
        scan, stages = (32, 2) if large and not shared else (16, 1)
        return _Tiles(min(scan, V), stages, min(64, K), min(64, K, V), (min(32, K), min(128 if large else 32, V)))


# Products forward (first True) and backward, with the correction (second True) and without: for each row and value head so many
# of K x V, of 64 x V and of 64 x K. P is one of 64 x K more for each key head. Those that give R are left out (2 %).
PRODUCTS = {(True, True): (3, 2, 1), (True, False): (2, 1, 0), (False, True): (8, 5, 4), (False, False): (5, 2, 2)}


def operations(q_TJK: Tensor, v_TNV: Tensor, *, forward: bool, delta: bool = True) -> int:
    """How many there are in whole chunks; 5.0 million a token forward with the heads of Qwen3.5-9B."""
    (T, J, K), (_, N, V), (states, values, keys) = q_TJK.shape, v_TNV.shape, PRODUCTS[forward, delta]
    return 2 * T * (N * (states * K * V + CHUNK * (values * V + keys * K)) + J * CHUNK * K)


def _padded(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def _sizes(q_TJK: Tensor, v_TNV: Tensor) -> dict[str, Any]:
    (_, J, K), (_, N, V) = q_TJK.shape, v_TNV.shape
    return {"N": N, "GROUP": N // J, "K": K, "V": V}


def delta_rule_forward(
    q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, chunks_S2: Tensor, cu_seqlens: Tensor, *,
    initial: Tensor | None = None, final: Tensor | None = None, places: Tensor | None = None, out: Tensor | None = None,
    skip_N: Tensor | None = None, shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o_TNV, R_TNC): R has the rows of q and 64 columns; `delta_rule_backward` takes it. None where `skip_N` is given.

    q, k, v, `out`: rows may be columns of wider ones. g, beta: contiguous, float32. `chunks_S2`: `chunk_table(cu_seqlens, T)`.
    `cu_seqlens` int32, from 0 to T: padding is a document. `initial`, `final` [places, N, K, V] float32: the state before each
    document (else zero), and where to put the one after it; both at its place in `places` (else its number). Empty documents
    leave their place in `final` alone. Neither goes with `shared`.
    """
    assert shared is None or initial is final is None
    o_TNV = torch.empty(v_TNV.shape, dtype=v_TNV.dtype, device=v_TNV.device) if out is None else out
    documents = len(cu_seqlens) - 1
    if places is None and (initial is not None or final is not None):
        places = torch.arange(documents, dtype=torch.int32, device=v_TNV.device)
    if not use_triton(v_TNV):
        R_TNC = None if skip_N is not None else inverse_torch(k_TJK, g_TN, beta_TN, chunks_S2, cu_seqlens)
        before = None if initial is None or places is None else initial[places.long()]
        found = scan_torch(q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens, before, skip_N, shared)
        put_rows(found.o, o_TNV, chunks_S2, cu_seqlens)
        if final is not None and places is not None:
            filled = cu_seqlens[1:] > cu_seqlens[:-1]
            final[places[filled].long()] = found.last[filled].to(final.dtype)
        return o_TNV, R_TNC
    count("delta", operations(q_TJK, v_TNV, forward=True, delta=skip_N is None))
    K, V = q_TJK.shape[2], v_TNV.shape[2]
    sizes, tiles = _sizes(q_TJK, v_TNV), _Tiles.of(K, V, v_TNV, shared=shared is not None)
    scanned = sizes | {"KP": _padded(K), "BV": tiles.scan, "SHARED": shared is not None}
    P_TNC, decays_TN = _within_chunks(q_TJK, k_TJK, g_TN, chunks_S2, sizes, tiles)
    R_TNC = _inverse(k_TJK, decays_TN, beta_TN, chunks_S2, sizes, tiles) if skip_N is None else None
    inverse = P_TNC if R_TNC is None else R_TNC  # not read where there is none
    states = [P_TNC if each is None else each for each in (initial, final, places, skip_N)]
    _scan_kernel[(documents * v_TNV.shape[1] * triton.cdiv(V, tiles.scan),)](
        q_TJK, q_TJK.stride(0), k_TJK, k_TJK.stride(0), v_TNV, v_TNV.stride(0), decays_TN, beta_TN, P_TNC, inverse, o_TNV,
        o_TNV.stride(0), P_TNC, P_TNC, cu_seqlens, cu_seqlens if shared is None else shared.behind_S, *states,
        _scale(q_TJK, skip_N), **scanned, OUTPUT=True, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
        DELTA=skip_N is None, STAGES=tiles.stages, num_warps=4,
    )  # fmt: skip
    return o_TNV, R_TNC


def _scale(q_TJK: Tensor, skip_N: Tensor | None) -> float:
    return float(q_TJK.shape[2] ** -0.5) if skip_N is None else 1.0


def _within_chunks(
    q_TJK: Tensor, k_TJK: Tensor, g_TN: Tensor, chunks_S2: Tensor, sizes: dict[str, int], tiles: _Tiles
) -> tuple[Tensor, Tensor]:
    """(P_TNC, G_TN)"""
    P_TNC, decays_TN = torch.empty(*g_TN.shape, CHUNK, dtype=k_TJK.dtype, device=k_TJK.device), torch.empty_like(g_TN)
    given = {name: sizes[name] for name in ("N", "GROUP", "K")}
    _pairs_kernel[(len(chunks_S2) * q_TJK.shape[1],)](
        q_TJK, q_TJK.stride(0), k_TJK, k_TJK.stride(0), g_TN, P_TNC, decays_TN, chunks_S2, **given, BK=tiles.keys, num_warps=4
    )
    return P_TNC, decays_TN


def _inverse(
    k_TJK: Tensor, decays_TN: Tensor, beta_TN: Tensor, chunks_S2: Tensor, sizes: dict[str, int], tiles: _Tiles
) -> Tensor:
    """R_TNC"""
    R_TNC = torch.zeros(*beta_TN.shape, CHUNK, dtype=k_TJK.dtype, device=k_TJK.device)
    given = {name: sizes[name] for name in ("N", "GROUP", "K")}
    _inverse_kernel[(len(chunks_S2) * beta_TN.shape[1],)](
        k_TJK, k_TJK.stride(0), decays_TN, beta_TN, R_TNC, chunks_S2, **given, BK=min(32, tiles.keys),
        PRECISION=PRECISIONS[k_TJK.dtype], num_warps=1,
    )  # fmt: skip
    return R_TNC


def delta_rule_backward(
    do_TNV: Tensor, q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, R_TNC: Tensor | None,
    chunks_S2: Tensor, cu_seqlens: Tensor, *, skip_N: Tensor | None = None, dskip_TN: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None, shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq_TJK, dk_TJK, dv_TNV, dg_TN, dbeta_TN), the last two in float32. do, q, k, v: rows may be columns of wider ones. For
    documents that begin without a state. `out`: where to put the first three. `dskip_TN`: where to put each token's part of
    the skip's gradient, in float32."""
    made = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TJK, k_TJK, v_TNV))
    dq_TJK, dk_TJK, dv_TNV = made if out is None else out
    dg_TN, dbeta_TN = torch.empty_like(g_TN), torch.empty_like(beta_TN)
    outs = (dq_TJK, dk_TJK, dv_TNV, dg_TN, dbeta_TN)
    if not use_triton(v_TNV):
        given = q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens
        backward_torch(do_TNV, *given, outs, skip_N, dskip_TN, shared)
        return outs
    (T, N, V), K, scale, delta = v_TNV.shape, q_TJK.shape[2], _scale(q_TJK, skip_N), skip_N is None
    count("delta", operations(q_TJK, v_TNV, forward=False, delta=delta))
    sizes, tiles = _sizes(q_TJK, v_TNV), _Tiles.of(K, V, v_TNV, shared=shared is not None)
    scanned = sizes | {"KP": _padded(K), "BV": tiles.scan, "SHARED": shared is not None}
    behinds = cu_seqlens if shared is None else shared.behind_S  # not read where there is none
    D_TNV, X_TNV = (torch.empty(T, N, V, dtype=v_TNV.dtype, device=v_TNV.device) for _ in range(2))
    P_TNC, decays_TN = _within_chunks(q_TJK, k_TJK, g_TN, chunks_S2, sizes, tiles)
    inverse = P_TNC if R_TNC is None else R_TNC  # not read where there is none
    skip, dskip = (decays_TN if each is None else each for each in (skip_N, dskip_TN))
    states, dstates = (torch.empty(len(chunks_S2), N, K, V, dtype=v_TNV.dtype, device=v_TNV.device) for _ in range(2))
    grid = ((len(cu_seqlens) - 1) * N * triton.cdiv(V, tiles.scan),)
    _scan_kernel[grid](
        q_TJK, q_TJK.stride(0), k_TJK, k_TJK.stride(0), v_TNV, v_TNV.stride(0), decays_TN, beta_TN, P_TNC, inverse, D_TNV,
        N * V, D_TNV, states, cu_seqlens, behinds, states, states, cu_seqlens, skip, scale, **scanned, OUTPUT=False,
        HAS_INITIAL=False, HAS_FINAL=False, DELTA=delta, STAGES=tiles.stages, num_warps=4,
    )  # fmt: skip
    _reverse_kernel[grid](
        do_TNV, do_TNV.stride(0), q_TJK, q_TJK.stride(0), k_TJK, k_TJK.stride(0), decays_TN, beta_TN, P_TNC, inverse, dv_TNV,
        dv_TNV.stride(0), X_TNV, dstates, cu_seqlens, behinds, skip, scale, **scanned, DELTA=delta, STAGES=tiles.stages,
        num_warps=4 if shared is None else 8,  # 4 spill registers
    )  # fmt: skip
    by_o = torch.empty_like(P_TNC)
    by_A = torch.empty_like(P_TNC) if delta else P_TNC
    dG, db = (torch.empty_like(g_TN) for _ in range(2))
    _weights_kernel[(len(chunks_S2) * N,)](
        do_TNV, do_TNV.stride(0), k_TJK, k_TJK.stride(0), v_TNV, v_TNV.stride(0), decays_TN, beta_TN, P_TNC, D_TNV, X_TNV, by_o,
        by_A, dG, db, dskip, chunks_S2, scale, **sizes, BK=tiles.pairs, BV=tiles.pairs, DELTA=delta,
        NEED_SKIP=dskip_TN is not None, num_stages=1, num_warps=4,
    )  # fmt: skip
    summed = q_TJK.shape if q_TJK.shape[1] < N else (0,)  # a group of one head needs no sums
    sums = [torch.empty(summed, dtype=torch.float32, device=v_TNV.device) for _ in range(2)]
    _local_kernel[(len(chunks_S2), q_TJK.shape[1])](
        do_TNV, do_TNV.stride(0), q_TJK, q_TJK.stride(0), k_TJK, k_TJK.stride(0), decays_TN, beta_TN, D_TNV, X_TNV, by_o, by_A,
        dG, db, states, dstates, dq_TJK, dq_TJK.stride(0), dk_TJK, dk_TJK.stride(0), dg_TN, dbeta_TN, *sums, chunks_S2, scale,
        **sizes, BK=tiles.local[0], BV=tiles.local[1], DELTA=delta, num_stages=1, num_warps=4,
    )  # fmt: skip
    return outs


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx,
        q_TJK: Tensor,
        k_TJK: Tensor,
        v_TNV: Tensor,
        g_TN: Tensor,
        beta_TN: Tensor,
        chunks_S2: Tensor,
        cu_seqlens: Tensor,
        skip_N: Tensor | None,
        shared: SharedPrompts | None,
    ) -> Tensor:
        given = q_TJK, k_TJK, v_TNV, g_TN, beta_TN, chunks_S2, cu_seqlens
        o_TNV, R_TNC = delta_rule_forward(*given, skip_N=skip_N, shared=shared)
        ctx.shared = shared
        ctx.save_for_backward(q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens, skip_N)
        return o_TNV

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        *given, skip_N = ctx.saved_tensors
        dskip_TN = torch.empty_like(given[3]) if ctx.needs_input_grad[7] else None
        found = delta_rule_backward(incoming[0].contiguous(), *given, skip_N=skip_N, dskip_TN=dskip_TN, shared=ctx.shared)
        return *found, None, None, None if dskip_TN is None else dskip_TN.sum(0).to(skip_N.dtype), None


def delta_rule(
    q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, chunks_S2: Tensor, cu_seqlens: Tensor,
    skip_N: Tensor | None = None, shared: SharedPrompts | None = None,
) -> Tensor:  # fmt: skip
    """Differentiable o_TNV."""
    given = q_TJK, k_TJK, v_TNV, g_TN, beta_TN, chunks_S2, cu_seqlens, skip_N, shared
    o_TNV: Tensor = _DeltaRule.apply(*given)  # type: ignore[no-untyped-call]
    return o_TNV
