"""The gated delta rule in plain torch: the recurrence, and the chunked form of delta_rule.py, where formulas and letters are.

Products round their operands to the inputs' dtype and sum in float32 (float64 for float64), as the kernels do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.conv.shared_prompts import SharedPrompts
from pronghorn.kernels.delta.delta_chunks import CHUNK


def delta_rule_reference(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_TNV: Tensor,
    g_TN: Tensor,
    beta_TN: Tensor,
    cu_seqlens: Tensor,
    initial: Tensor | None = None,
    skip_N: Tensor | None = None,
) -> Tensor:
    """o_TNV by the recurrence, token by token. `initial` [documents, N, K, V]. `skip_N`: of Mamba-2."""
    q_TNK, k_TNK = (_of_value_heads(x, v_TNV.shape[1]) for x in (q_TJK, k_TJK))
    outs, bounds = [], cu_seqlens.tolist()
    for document, (start, end) in enumerate(pairwise(bounds)):
        state = torch.zeros_like(k_TNK[0, :, :, None] * v_TNV[0, :, None]) if initial is None else initial[document]
        for t in range(start, end):
            state, o_NV = _one_token(state, q_TNK[t], k_TNK[t], v_TNV[t], g_TN[t], beta_TN[t], skip_N)
            outs.append(o_NV)
    return torch.stack(outs)


def _of_value_heads(x_TJK: Tensor, N: int) -> Tensor:
    return x_TJK.repeat_interleave(N // x_TJK.shape[1], 1)


def _one_token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, skip_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(state after the token, o): any leading axes."""
    state = state * g.exp()[..., None, None]
    if skip_N is not None:
        state = state + k[..., None] * (beta[..., None] * v)[..., None, :]
        return state, (state * q[..., None]).sum(-2) + skip_N[:, None].to(v.dtype) * v
    new = beta[..., None] * (v - (state * k[..., None]).sum(-2))
    state = state + k[..., None] * new[..., None, :]
    return state, q.shape[-1] ** -0.5 * (state * q[..., None]).sum(-2)


def step_torch(
    q_BJK: Tensor, k_BJK: Tensor, v_BNV: Tensor, g_BN: Tensor, beta_BN: Tensor, states: Tensor, place_B: Tensor,
    skip_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """o_BNV; the states at these places are replaced."""
    wide, N = torch.promote_types(v_BNV.dtype, torch.float32), v_BNV.shape[1]
    q, k = (_of_value_heads(x, N).to(wide) for x in (q_BJK, k_BJK))
    place_B = place_B.long()
    state, o = _one_token(states[place_B].to(wide), q, k, v_BNV.to(wide), g_BN.to(wide), beta_BN.to(wide), skip_N)
    states[place_B] = state.to(states.dtype)
    return o.to(v_BNV.dtype)


# ---- in chunks -------------------------------------------------------------------------------------------------------------


class _Chunks:
    """All slots side by side: [S, N, 64, ...] in float32 or wider, zeros behind a chunk's rows."""

    def __init__(self, dtype: torch.dtype, chunks_S2: Tensor, cu_seqlens: Tensor, N: int) -> None:
        self.dtype, self.N, self.wide = dtype, N, torch.promote_types(dtype, torch.float32)
        offset, first = torch.arange(CHUNK, device=chunks_S2.device), chunks_S2[:, :1].long()
        self.inside = offset < chunks_S2[:, 1:]  # [S, 64]
        self.row = torch.where(self.inside, first + offset, 0)
        bounds = cu_seqlens.tolist()
        table = chunks_S2.tolist()
        slot_at = {row: slot for slot, (row, rows) in enumerate(table) if rows}
        self.documents = [[slot_at[row] for row in range(start, end, CHUNK)] for start, end in pairwise(bounds)]
        self.lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=chunks_S2.device).tril()

    def cut(self, x_TN: Tensor) -> Tensor:
        x = x_TN if x_TN.shape[1] == self.N else _of_value_heads(x_TN, self.N)
        taken = x.to(self.wide)[self.row]
        return (taken * self.inside.view(*self.inside.shape, *[1] * (taken.ndim - 2))).transpose(1, 2)

    def put(self, x: Tensor, out_TN: Tensor) -> None:
        """Back into rows; heads that share a key head are added in order."""
        found = x.transpose(1, 2)[self.inside]
        if out_TN.shape[1] != self.N:
            found = found.unflatten(1, (out_TN.shape[1], -1)).sum(2)
        out_TN[self.row[self.inside]] = found.to(out_TN.dtype)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        return a.to(self.dtype).to(self.wide) @ b.to(self.dtype).to(self.wide)

    def decays(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(E, e^G, e^(G_C - G), e^(G_C)), the middle two as columns. The difference comes before exp: e^-G may overflow."""
        G = g.cumsum(-1)
        E = (G[..., :, None] - G[..., None, :]).masked_fill(~self.lower, float("-inf")).exp()
        return E, G.exp()[..., None], (G[..., -1:] - G).exp()[..., None], G[..., -1].exp()[..., None, None]


def inverse_torch(k_TJK: Tensor, g_TN: Tensor, beta_TN: Tensor, chunks_S2: Tensor, cu_seqlens: Tensor) -> Tensor:
    """R_TNC"""
    N = g_TN.shape[1]
    at = _Chunks(k_TJK.dtype, chunks_S2, cu_seqlens, N)
    k, E = at.cut(k_TJK), at.decays(at.cut(g_TN))[0]
    A = (at.cut(beta_TN)[..., None] * at.dot(k, k.mT) * E).tril(-1)
    eye = torch.eye(CHUNK, dtype=at.wide, device=k.device)
    R_TNC = torch.zeros(len(k_TJK), N, CHUNK, dtype=k_TJK.dtype, device=k.device)
    at.put(torch.linalg.solve_triangular(eye + A, eye, upper=False), R_TNC)
    return R_TNC


class Scanned(NamedTuple):
    o: Tensor
    D: Tensor
    states: Tensor  # M0 of each slot, [S, N, K, V]
    last: Tensor  # [documents, N, K, V]


def scan_torch(
    q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, R_TNC: Tensor | None,
    chunks_S2: Tensor, cu_seqlens: Tensor, initial: Tensor | None = None, skip_N: Tensor | None = None,
    shared: SharedPrompts | None = None,
) -> Scanned:  # fmt: skip
    """In chunks. `initial` [documents, N, K, V]. R None and `skip_N`: Mamba-2."""
    prompts = {} if shared is None else shared.prompts()
    at = _Chunks(v_TNV.dtype, chunks_S2, cu_seqlens, v_TNV.shape[1])
    q, k, v, g, b = (at.cut(x) for x in (q_TJK, k_TJK, v_TNV, g_TN, beta_TN))
    R = None if R_TNC is None else at.cut(R_TNC)
    (E, eG, away, through), b, scale = at.decays(g), b[..., None], 1.0 if R is None else q.shape[-1] ** -0.5
    P = at.dot(q, k.mT) * E
    o, D, states = torch.zeros_like(v), torch.zeros_like(v), torch.zeros_like(k.mT @ v)
    last = torch.zeros(len(at.documents), *states.shape[1:], dtype=at.wide, device=v.device)
    for document, slots in enumerate(at.documents):
        M = last[prompts.get(document, document)] if initial is None else initial[document].to(at.wide)
        for s in slots:
            states[s] = M
            D[s] = b[s] * v[s] if R is None else at.dot(R[s], b[s] * (v[s] - eG[s] * at.dot(k[s], M)))
            o[s] = scale * (eG[s] * at.dot(q[s], M) + at.dot(P[s], D[s]))
            M = through[s] * M + at.dot(k[s].mT, away[s] * D[s])
        last[document] = M
    if skip_N is not None:
        o += skip_N.to(at.wide)[:, None, None] * v
    return Scanned(o, D, states, last)


def put_rows(x: Tensor, out_TNV: Tensor, chunks_S2: Tensor, cu_seqlens: Tensor) -> Tensor:
    _Chunks(out_TNV.dtype, chunks_S2, cu_seqlens, out_TNV.shape[1]).put(x, out_TNV)
    return out_TNV


def backward_torch(
    do_TNV: Tensor, q_TJK: Tensor, k_TJK: Tensor, v_TNV: Tensor, g_TN: Tensor, beta_TN: Tensor, R_TNC: Tensor | None,
    chunks_S2: Tensor, cu_seqlens: Tensor, outs: tuple[Tensor, ...], skip_N: Tensor | None = None,
    dskip_TN: Tensor | None = None, shared: SharedPrompts | None = None,
) -> None:  # fmt: skip
    """Writes dq, dk, dv, dg, dbeta into `outs`."""
    at = _Chunks(v_TNV.dtype, chunks_S2, cu_seqlens, v_TNV.shape[1])
    q, k, v, g, b, do = (at.cut(x) for x in (q_TJK, k_TJK, v_TNV, g_TN, beta_TN, do_TNV))
    R = None if R_TNC is None else at.cut(R_TNC)
    (E, eG, away, through), b, scale = at.decays(g), b[..., None], 1.0 if R is None else q.shape[-1] ** -0.5
    _, D, M0, _ = scan_torch(q_TJK, k_TJK, v_TNV, g_TN, beta_TN, R_TNC, chunks_S2, cu_seqlens, shared=shared)
    qk, kk = at.dot(q, k.mT) * E, at.dot(k, k.mT) * E
    X, dM1 = torch.zeros_like(v), torch.zeros_like(M0)
    prompts = {} if shared is None else shared.prompts()
    by_answers = {prompt: torch.zeros_like(M0[0]) for prompt in prompts.values()}
    for document, slots in reversed([*enumerate(at.documents)]):  # answers before their prompt
        dM = by_answers.get(document, torch.zeros_like(M0[0]))
        for s in reversed(slots):
            dM1[s] = dM
            X[s] = at.dot(scale * qk[s].mT, do[s]) + away[s] * at.dot(k[s], dM)
            dM = through[s] * dM + scale * at.dot(q[s].mT, eG[s] * do[s])
            if R is not None:
                X[s] = at.dot(R[s].mT, X[s])
                dM -= at.dot(k[s].mT, b[s] * eG[s] * X[s])
        if document in prompts:
            by_answers[prompts[document]] += dM
    seen, dA = scale * at.dot(do, D.mT), -at.dot(X, D.mT).tril(-1)
    doM, XM, DM = at.dot(do, M0.mT), at.dot(X, M0.mT), at.dot(D, dM1.mT)
    if R is None:  # no correction by what is there
        dA, XM = torch.zeros_like(dA), torch.zeros_like(XM)
    H = dA * b * E
    dq = scale * eG * doM + at.dot(seen * E, k)
    dk = at.dot((seen * E).mT, q) + away * DM - b * eG * XM + at.dot(H + H.mT, k)
    kM = eG[..., 0] * (k * XM).sum(-1)
    db = (X * v).sum(-1) - kM + (dA * kk).sum(-1)
    B, kept = seen * qk + dA * b * kk, away[..., 0] * (k * DM).sum(-1)
    dG = B.sum(-1) - B.sum(-2) + scale * eG[..., 0] * (q * doM).sum(-1) - b[..., 0] * kM - kept
    dG[..., -1] += through[..., 0, 0] * (dM1 * M0).sum((-1, -2)) + kept.sum(-1)
    dv = b * X if skip_N is None else b * X + skip_N.to(at.wide)[:, None, None] * do
    if dskip_TN is not None:
        at.put((do * v).sum(-1), dskip_TN)
    for x, out in zip((dq, dk, dv, dG.flip(-1).cumsum(-1).flip(-1), db), outs, strict=True):
        at.put(x, out)
