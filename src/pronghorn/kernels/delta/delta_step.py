"""The gated delta rule for one token of each of B rows, as decoding needs it (delta_rule.py has the formula and the letters).

Each row has its own state M [K, V] of each value head, at its place in `states` [places, N, K, V] (float32), which is replaced:

    M <- exp(g) M;  d = beta (v - M^T k);  M <- M + k d^T;  o = K^-1/2 M^T q
    M <- exp(g) M + k (beta v)^T;  o = M^T q + skip v                              Mamba-2, where `skip_N` is given

Bound by memory: reads and writes the states of these rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.delta.delta_rule_torch import step_torch
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

COLUMNS = 32  # of V, a program: with rows of 64 answers and 32 heads of 128 there are 8,192 programs


@jit
def _step_kernel(
    q, q_row, k, k_row, v, v_row, g, beta, o, states, places, skip, scale, N: tl.constexpr, GROUP: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    down, across = tl.arange(0, KP), tl.program_id(2) * BV + tl.arange(0, BV)
    inside = (down < K)[:, None] & (across < V)[None, :]
    place = states + (tl.load(places + row).to(tl.int64) * N + head) * K * V + down[:, None] * V + across[None, :]
    key = tl.load(k + row * k_row + head // GROUP * K + down, mask=down < K, other=0.0).to(tl.float32)[:, None]
    query = tl.load(q + row * q_row + head // GROUP * K + down, mask=down < K, other=0.0).to(tl.float32)[:, None]
    value = tl.load(v + row * v_row + head * V + across, mask=across < V, other=0.0).to(tl.float32)
    M = tl.exp(tl.load(g + row * N + head)) * tl.load(place, mask=inside, other=0.0)
    new = value
    if DELTA:
        new -= tl.sum(M * key, 0)
    M += key * (tl.load(beta + row * N + head) * new)[None, :]
    tl.store(place, M, mask=inside)
    out = scale * tl.sum(M * query, 0)
    if not DELTA:
        out += tl.load(skip + head).to(tl.float32) * value
    tl.store(o + (row * N + head) * V + across, out.to(o.dtype.element_ty), mask=across < V)


def delta_step(
    q_BJK: Tensor, k_BJK: Tensor, v_BNV: Tensor, g_BN: Tensor, beta_BN: Tensor, states: Tensor, place_B: Tensor,
    skip_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o_BNV, contiguous. q, k, v: rows may be columns of wider ones; g, beta: contiguous, float32. Rows that share a
    place (those that stand for no answer) leave any one's state there."""
    if not use_triton(v_BNV):
        return step_torch(q_BJK, k_BJK, v_BNV, g_BN, beta_BN, states, place_B, skip_N)
    (B, N, V), (_, J, K) = v_BNV.shape, q_BJK.shape
    o_BNV = torch.empty(B, N, V, dtype=v_BNV.dtype, device=v_BNV.device)
    KP, BV = triton.next_power_of_2(K), min(COLUMNS, triton.next_power_of_2(V))
    _step_kernel[(B, N, triton.cdiv(V, BV))](
        q_BJK, q_BJK.stride(0), k_BJK, k_BJK.stride(0), v_BNV, v_BNV.stride(0), g_BN, beta_BN, o_BNV, states, place_B,
        g_BN if skip_N is None else skip_N, K**-0.5 if skip_N is None else 1.0, N=N, GROUP=N // J, K=K, KP=KP, V=V, BV=BV,
        DELTA=skip_N is None, num_warps=4,
    )  # fmt: skip
    return o_BNV
