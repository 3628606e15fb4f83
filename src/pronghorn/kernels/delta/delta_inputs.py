"""Queries, keys and values of the delta rule from the projection's columns, over the documents of a pack, in one pass.

T = packed tokens, J = key heads, K = key width, N = value heads, V = value width, X = 2 J K + N V, W = taps.
qkv_TX = [q | k | v], head by head. Depthwise causal convolution, SiLU, and for heads of q and k the L2 norm:

    c_t = sum over j < W of taps_{W - 1 - j} qkv_{t - j},  j no further than the document's first token
    s = c sigmoid(c)
    q, k = s / sqrt(sum over the head of s^2 + 1e-6);  v = s

    ds = (dy - y (dy . y)) / sqrt(sum of s^2 + 1e-6) for q and k, dy for v
    dc = ds (sigmoid(c) + c sigmoid(c) (1 - sigmoid(c)))
    dqkv_t = sum over j < W of taps_{W - 1 - j} dc_{t + j},  within the document
    dtaps_{W - 1 - j} = sum over t of dc_t qkv_{t - j}     in tiles of rows, which are added in order: the same bits each time

Forward reads and writes X values a token, backward reads 2 X and writes X; neighbouring rows come again from the cache. All in
float32 between loading and storing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.runtime.first_order import Ctx, first_order

EPS = 1e-6  # inside the root of the L2 norm


class Heads(NamedTuple):
    """Sizes of a Gated DeltaNet layer: N / J value heads share a key head, neighbours first."""

    J: int
    K: int
    N: int
    V: int

    @property
    def columns(self) -> int:
        """X"""
        return 2 * self.J * self.K + self.N * self.V

    def split(self, x_TX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, J, K], [T, J, K] and [T, N, V]: views of the columns."""
        J, K, N, V = self
        q, k, v = x_TX.split([J * K, J * K, N * V], dim=-1)
        return q.unflatten(-1, (J, K)), k.unflatten(-1, (J, K)), v.unflatten(-1, (N, V))


def delta_inputs_reference(qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q_TJK, k_TJK and v_TNV. `spans_2T`: where each token's document begins and ends."""
    q, k, v = heads.split(F.silu(_convolved(qkv_TX, taps_XW.to(qkv_TX.dtype), spans_2T)))
    return _l2_normed(q), _l2_normed(k), v


def _l2_normed(x_TJK: Tensor) -> Tensor:
    return x_TJK * torch.rsqrt(x_TJK.square().sum(-1, keepdim=True) + EPS)


def _convolved(x_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor) -> Tensor:
    return sum((taps_XW[:, -1 - j] * _shifted(x_TX, j, spans_2T) for j in range(taps_XW.shape[1])), torch.zeros_like(x_TX))


def _shifted(x_TX: Tensor, back: int, spans_2T: Tensor) -> Tensor:
    """x of the token so many before, or behind if it is negative; zero where that is in no or in another document."""
    row = torch.arange(len(x_TX), device=x_TX.device)
    other = row - back
    inside = (other >= spans_2T[0]) & (other < spans_2T[1])
    return x_TX.index_select(0, other.clamp(0, len(x_TX) - 1)).masked_fill(~inside[:, None], 0.0)


# ---- forward and backward --------------------------------------------------------------------------------------------------


def delta_inputs_forward(qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """q_TJK, k_TJK and v_TNV: columns of one new [T, X]."""
    made_TX = torch.empty(qkv_TX.shape, dtype=qkv_TX.dtype, device=qkv_TX.device)
    q, k, v = heads.split(made_TX)
    wide = torch.promote_types(qkv_TX.dtype, torch.float32)
    for part, found in zip((q, k, v), delta_inputs_reference(qkv_TX.to(wide), taps_XW, spans_2T, heads), strict=True):
        part.copy_(found)
    return q, k, v


def delta_inputs_backward(
    dq_TJK: Tensor, dk_TJK: Tensor, dv_TNV: Tensor, qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads, *,
    need_taps: bool = True, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(dqkv_TX, dtaps_XW in float32 or None). Rows of the gradients may be columns of wider ones. `out` must be none of the
    inputs: programs read each other's rows."""
    dqkv_TX = torch.empty(qkv_TX.shape, dtype=qkv_TX.dtype, device=qkv_TX.device) if out is None else out
    return _backward_torch((dq_TJK, dk_TJK, dv_TNV), qkv_TX, taps_XW, spans_2T, heads, need_taps, dqkv_TX)


def _backward_torch(
    grads: tuple[Tensor, Tensor, Tensor], qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads, need_taps: bool,
    dqkv_TX: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    wide, W = torch.promote_types(qkv_TX.dtype, torch.float32), taps_XW.shape[1]
    x_TX, taps_XW = qkv_TX.to(wide), taps_XW.to(wide)
    conv_TX = _convolved(x_TX, taps_XW, spans_2T)
    open_TX = conv_TX.sigmoid()
    ds = []
    for dy, s, normed in zip(grads, heads.split(conv_TX * open_TX), (True, True, False), strict=True):
        dy = dy.to(wide)
        if normed:
            factor = torch.rsqrt(s.square().sum(-1, keepdim=True) + EPS)
            y = s * factor
            dy = factor * (dy - y * (dy * y).sum(-1, keepdim=True))
        ds.append(dy.flatten(1))
    dconv_TX = torch.cat(ds, dim=1) * (open_TX + conv_TX * open_TX * (1 - open_TX))
    parts = (taps_XW[:, -1 - j] * _shifted(dconv_TX, -j, spans_2T) for j in range(W))
    dqkv_TX.copy_(sum(parts, torch.zeros_like(x_TX)))
    if not need_taps:
        return dqkv_TX, None
    return dqkv_TX, torch.stack([(dconv_TX * _shifted(x_TX, W - 1 - j, spans_2T)).sum(0) for j in range(W)], dim=1)


class _DeltaInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv_TX, taps_XW, spans_2T)
        ctx.heads = heads
        return delta_inputs_forward(qkv_TX, taps_XW, spans_2T, heads)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, taps_XW, spans_2T = ctx.saved_tensors
        dq, dk, dv = (each.contiguous() for each in incoming)
        dqkv_TX, dtaps_XW = delta_inputs_backward(
            dq, dk, dv, qkv_TX, taps_XW, spans_2T, ctx.heads, need_taps=ctx.needs_input_grad[1]
        )
        return dqkv_TX, None if dtaps_XW is None else dtaps_XW.to(taps_XW.dtype), None, None


def delta_inputs(qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Differentiable q_TJK, k_TJK and v_TNV."""
    q, k, v = _DeltaInputs.apply(qkv_TX, taps_XW, spans_2T, heads)  # type: ignore[no-untyped-call]
    return q, k, v
