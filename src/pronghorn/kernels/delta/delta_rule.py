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
    dbeta = rowsum(X * v - dA * ...)                                    (see the code)

G, E, R and the state are in float32; operands of products are rounded to the inputs' dtype, sums are in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.delta.delta_chunks import CHUNK
from pronghorn.kernels.delta.delta_rule_torch import backward_torch, inverse_torch, put_rows, scan_torch
from pronghorn.kernels.runtime.first_order import Ctx, first_order


def delta_rule_forward(
    q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, chunks_S2: Tensor, cu_seqlens: Tensor, *,
    initial: Tensor | None = None, final: Tensor | None = None, places: Tensor | None = None, out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o_TNV, R_TNC): R has the rows of q and 64 columns, which `delta_rule_backward` takes.

    q, k, v: rows may be columns of wider ones. g, beta: contiguous, float32. `chunks_S2`: `chunk_table(cu_seqlens, T)`.
    `cu_seqlens` int32, from 0 to T: padding is a document. `initial`, `final` [places, N, K, V] float32: the state before each
    document (else zero), and where to put the one after it; both at its place in `places` (else its number). Empty documents
    leave their place in `final` alone.
    """
    o_TNV = torch.empty(v_TNV.shape, dtype=v_TNV.dtype, device=v_TNV.device) if out is None else out
    R_TNC = inverse_torch(k_TJK, g_TN, beta_TN, chunks_S2, cu_seqlens)
    place_D = torch.arange(len(cu_seqlens) - 1, device=v_TNV.device) if places is None else places.long()
    found = scan_torch(
        q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens, None if initial is None else initial[place_D]
    )
    put_rows(found.o, o_TNV, chunks_S2, cu_seqlens)
    if final is not None:
        filled = cu_seqlens[1:] > cu_seqlens[:-1]
        final[place_D[filled]] = found.last[filled].to(final.dtype)
    return o_TNV, R_TNC


def delta_rule_backward(
    do_TNV: Tensor, q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, R_TNC: Tensor,
    chunks_S2: Tensor, cu_seqlens: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq_TJK, dk_TJK, dv_TNV, dg_TN, dbeta_TN), the last two in float32. do may be columns of wider rows. For documents that
    begin without a state."""
    dq_TJK, dk_TJK, dv_TNV = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q_TJK, k_TJK, v_TNV))
    dg_TN, dbeta_TN = torch.empty_like(g_TN), torch.empty_like(beta_TN)
    outs = (dq_TJK, dk_TJK, dv_TNV, dg_TN, dbeta_TN)
    backward_torch(do_TNV, q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens, outs)
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
    ) -> Tensor:
        o_TNV, R_TNC = delta_rule_forward(q_TJK, k_TJK, v_TNV, g_TN, beta_TN, chunks_S2, cu_seqlens)
        ctx.save_for_backward(q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens)
        return o_TNV

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        return *delta_rule_backward(incoming[0].contiguous(), *ctx.saved_tensors), None, None


def delta_rule(
    q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, chunks_S2: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Differentiable o_TNV."""
    o_TNV: Tensor = _DeltaRule.apply(q_TJK, k_TJK, v_TNV, g_TN, beta_TN, chunks_S2, cu_seqlens)  # type: ignore[no-untyped-call]
    return o_TNV
