"""Queries, keys and values of the delta rule from the projection's columns, over the documents of a pack, in one pass.

T = packed tokens, J = key heads, K = key width, N = value heads, V = value width, X = 2 J K + N V, W = taps.
qkv_TX = [q | k | v], head by head. Depthwise causal convolution, SiLU, and for heads of q and k the L2 norm:

    c_t = bias + sum over j < W of taps_{W - 1 - j} qkv_{t - j},  j no further than the document's first token
    s = c sigmoid(c)
    q, k = s / sqrt(sum over the head of s^2 + 1e-6);  v = s

    ds = (dy - y (dy . y)) / sqrt(sum of s^2 + 1e-6) for q and k, dy for v
    dc = ds (sigmoid(c) + c sigmoid(c) (1 - sigmoid(c)))
    dqkv_t = sum over j < W of taps_{W - 1 - j} dc_{t + j},  within the document
    dtaps_{W - 1 - j} = sum over t of dc_t qkv_{t - j}     in tiles of rows, which are added in order: the same bits each time
    dbias = sum over t of dc_t

Where answers share prompts, "t - j" goes on from an answer into its prompt, "t + j" from a prompt into each answer
(conv/shared_prompts.py). Mamba-2 norms nothing: all its columns are values (`unnormed`).

Forward reads and writes X values a token, backward reads 2 X and writes X; neighbouring rows come again from the cache. All in
float32 between loading and storing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.kernels.conv.shared_prompts import SharedPrompts, answers_of, earlier, later, prompt_of
from pronghorn.kernels.conv.short_conv import behind_rows, convolved, shifted, shifted_back
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

EPS = tl.constexpr(1e-6)  # inside the root of the L2 norm
TILE = 1024  # values of a program: 8 rows of a head of 128


class Heads(NamedTuple):
    """Sizes of a layer with states: N / J value heads share a key head, neighbours first."""

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


def unnormed(columns: int) -> Heads:
    """So many columns, none of them of keys or queries, in heads as wide as a program is."""
    width = math.gcd(columns, 128)
    return Heads(0, 1, columns // width, width)


def delta_inputs_reference(
    qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads, bias_X: Tensor | None = None,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q_TJK, k_TJK and v_TNV. `spans_2T`: where each token's document begins and ends."""
    conv_TX = convolved(qkv_TX, taps_XW.to(qkv_TX.dtype), spans_2T, shared)
    q, k, v = heads.split(F.silu(conv_TX if bias_X is None else conv_TX + bias_X.to(conv_TX.dtype)))
    return _l2_normed(q), _l2_normed(k), v


def _l2_normed(x_TJK: Tensor) -> Tensor:
    return x_TJK * torch.rsqrt(x_TJK.square().sum(-1, keepdim=True) + 1e-6)


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _convolution(
    qkv, qkv_row, taps, bias, row, column, start, first, behind, inside, W: tl.constexpr, BIAS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """c of a head at these rows; zero, or the bias, outside."""
    conv = tl.zeros(inside.shape, tl.float32)
    if BIAS:
        conv += tl.load(bias + column).to(tl.float32)[None, :]
    for j in tl.static_range(W):
        tap = tl.load(taps + column * W + (W - 1 - j)).to(tl.float32)
        other, known = earlier(row, j, start, first, behind, SHARED)
        place = qkv + other[:, None] * qkv_row + column[None, :]
        conv += tap[None, :] * tl.load(place, mask=inside & known[:, None], other=0.0).to(tl.float32)
    return conv


@jit
def _head(head, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr):
    """(first column, whether it is normed, columns of qkv, which of them are the head's). Columns behind a head's width stand
    for its first one, whose taps are there."""
    normed = head < 2 * J
    first = tl.where(normed, head * K, 2 * J * K + (head - 2 * J) * V)
    width = tl.where(normed, K, V)
    own = tl.arange(0, BLOCK) < width
    return first, normed, tl.where(own, first + tl.arange(0, BLOCK), first), own


@jit
def _forward_kernel(
    qkv, qkv_row, taps, bias, starts, prefix, made, T, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, X: tl.constexpr,
    W: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    _, normed, column, own = _head(tl.program_id(1), J, K, V, BLOCK)
    inside = (row < T)[:, None] & own[None, :]
    start = tl.load(starts + row, mask=row < T, other=0)
    first, behind = prompt_of(prefix, row, start, T, SHARED)
    conv = _convolution(qkv, qkv_row, taps, bias, row, column, start, first, behind, inside, W, BIAS, SHARED)
    s = conv * tl.sigmoid(conv)
    factor = tl.where(normed, 1.0 / tl.sqrt_rn(tl.sum(s * s, 1) + EPS), 1.0)
    tl.store(made + row[:, None] * X + column[None, :], (s * factor[:, None]).to(made.dtype.element_ty), mask=inside)


@jit
def _dconv(
    dy, dy_row, place, qkv, qkv_row, taps, bias, row, column, start, first, behind, inside, normed, W: tl.constexpr,
    BIAS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """The gradient of a head's convolution at these rows; zero outside."""
    conv = _convolution(qkv, qkv_row, taps, bias, row, column, start, first, behind, inside, W, BIAS, SHARED)
    opened = tl.sigmoid(conv)
    s = conv * opened
    grad = tl.load(dy + row[:, None] * dy_row + place[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(normed, 1.0 / tl.sqrt_rn(tl.sum(s * s, 1) + EPS), 1.0)[:, None]
    y = s * factor
    ds = factor * (grad - y * tl.where(normed, tl.sum(grad * y, 1), 0.0)[:, None])
    return ds * (opened + s * (1.0 - opened))


@jit
def _backward_kernel(
    dq, dq_row, dk, dk_row, dv, dv_row, qkv, qkv_row, taps, bias, starts, ends, prefix, documents, behinds, bounds, dqkv,
    dqkv_row, dtaps, T, J: tl.constexpr, K: tl.constexpr, V: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, NEED_TAPS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """dtaps [programs of rows, W, X]: each program's part; with a bias [programs of rows, W + 1, X], dbias behind them."""
    row, head = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    origin, normed, column, own = _head(head, J, K, V, BLOCK)
    dy = dv
    if head < J:
        dy = dq
    elif head < 2 * J:
        dy = dk
    dy_row = tl.where(head < J, dq_row, tl.where(normed, dk_row, dv_row))
    place = column - origin + tl.where(normed, (head - tl.where(head < J, 0, J)) * K, (head - 2 * J) * V)  # J may be 0
    there = (row < T)[:, None] & own[None, :]
    start = tl.load(starts + row, mask=row < T, other=0)
    end = tl.load(ends + row, mask=row < T, other=0)
    first, behind = prompt_of(prefix, row, start, T, SHARED)
    grad = tl.zeros([ROWS, BLOCK], tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(taps + column * W + (W - 1 - j)).to(tl.float32)
        inside = there & (row + j < end)[:, None]
        dconv = _dconv(
            dy, dy_row, place, qkv, qkv_row, taps, bias, row + j, column, start, first, behind, inside, normed, W, BIAS, SHARED
        )
        grad += tap[None, :] * dconv
        if NEED_TAPS and j == 0:
            for back in tl.static_range(W):
                other, known = earlier(row, back, start, first, behind, SHARED)
                seen = there & known[:, None]
                before = tl.load(qkv + other[:, None] * qkv_row + column[None, :], mask=seen, other=0.0).to(tl.float32)
                part = dtaps + (tl.program_id(0) * (W + BIAS) + (W - 1 - back)) * X + column
                tl.store(part, tl.sum(dconv * before, 0), mask=own)
            if BIAS:
                tl.store(dtaps + (tl.program_id(0) * (W + BIAS) + W) * X + column, tl.sum(dconv, 0), mask=own)
    if SHARED:  # what answers see of a prompt's last rows: the prompt is `start` to `end`
        document, last, most = answers_of(row, end, T, W, documents, behinds)
        for number in tl.range(0, most):
            for ahead in tl.range(1, W):
                other, known, begins = later(row, ahead, end, document + 1 + number, last, bounds)
                inside = there & known[:, None]
                dconv = _dconv(
                    dy, dy_row, place, qkv, qkv_row, taps, bias, other, column, begins, start, end, inside, normed, W, BIAS,
                    SHARED,
                )  # fmt: skip
                grad += tl.load(taps + column * W + (W - 1 - ahead)).to(tl.float32)[None, :] * dconv
    tl.store(dqkv + row[:, None] * dqkv_row + column[None, :], grad.to(dqkv.dtype.element_ty), mask=there)


# ---- forward and backward --------------------------------------------------------------------------------------------------


def delta_inputs_forward(
    qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads, bias_X: Tensor | None = None,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """q_TJK, k_TJK and v_TNV: columns of one new [T, X]."""
    made_TX = torch.empty(qkv_TX.shape, dtype=qkv_TX.dtype, device=qkv_TX.device)
    q, k, v = heads.split(made_TX)
    if use_triton(qkv_TX):
        tiles, sizes = _tiles(heads, len(qkv_TX), taps_XW.shape[1])
        taps = taps_XW.contiguous()
        _forward_kernel[(tiles, 2 * heads.J + heads.N)](
            qkv_TX, qkv_TX.stride(0), taps, taps if bias_X is None else bias_X, spans_2T[0],
            spans_2T if shared is None else shared.prefix_2T, made_TX, len(qkv_TX), **sizes, BIAS=bias_X is not None,
            SHARED=shared is not None, num_warps=4,
        )  # fmt: skip
        return q, k, v
    wide = torch.promote_types(qkv_TX.dtype, torch.float32)
    found = delta_inputs_reference(qkv_TX.to(wide), taps_XW, spans_2T, heads, bias_X, shared)
    for part, value in zip((q, k, v), found, strict=True):
        part.copy_(value)
    return q, k, v


def _tiles(heads: Heads, tokens: int, W: int) -> tuple[int, dict[str, int]]:
    """(tiles of rows, their sizes)"""
    block = int(triton.next_power_of_2(max(heads.K, heads.V)))
    rows = max(1, TILE // block)
    sizes = {"J": heads.J, "K": heads.K, "V": heads.V, "X": heads.columns, "W": W, "ROWS": rows, "BLOCK": block}
    return int(triton.cdiv(tokens, rows)), sizes


def delta_inputs_backward(
    dq_TJK: Tensor, dk_TJK: Tensor, dv_TNV: Tensor, qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads,
    bias_X: Tensor | None = None, shared: SharedPrompts | None = None, *, need_taps: bool = True, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(dqkv_TX, dtaps_XW in float32 or None; with a bias its gradient is the last column). Rows of the gradients may be columns
    of wider ones. `out` must be none of the inputs: programs read each other's rows."""
    dqkv_TX = torch.empty(qkv_TX.shape, dtype=qkv_TX.dtype, device=qkv_TX.device) if out is None else out
    if not use_triton(qkv_TX):
        grads = dq_TJK, dk_TJK, dv_TNV
        return _backward_torch(grads, qkv_TX, taps_XW, spans_2T, heads, bias_X, shared, need_taps, dqkv_TX)
    T, W, has_bias, taps = len(qkv_TX), taps_XW.shape[1], bias_X is not None, taps_XW.contiguous()
    tiles, sizes = _tiles(heads, T, W)
    parts = torch.empty(tiles if need_taps else 0, W + has_bias, heads.columns, dtype=torch.float32, device=qkv_TX.device)
    _backward_kernel[(tiles, 2 * heads.J + heads.N)](
        dq_TJK, dq_TJK.stride(0), dk_TJK, dk_TJK.stride(0), dv_TNV, dv_TNV.stride(0), qkv_TX, qkv_TX.stride(0),
        taps, taps if bias_X is None else bias_X, spans_2T[0], *behind_rows(spans_2T, shared), dqkv_TX, dqkv_TX.stride(0),
        parts, T, **sizes, BIAS=has_bias, NEED_TAPS=need_taps, SHARED=shared is not None,
        num_warps=4 if shared is None else 8,  # 4 spill registers
    )  # fmt: skip
    return dqkv_TX, parts.sum(0).T.contiguous() if need_taps else None


def _backward_torch(
    grads: tuple[Tensor, Tensor, Tensor], qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads,
    bias_X: Tensor | None, shared: SharedPrompts | None, need_taps: bool, dqkv_TX: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    wide, W = torch.promote_types(qkv_TX.dtype, torch.float32), taps_XW.shape[1]
    x_TX, taps_XW = qkv_TX.to(wide), taps_XW.to(wide)
    conv_TX = convolved(x_TX, taps_XW, spans_2T, shared)
    if bias_X is not None:
        conv_TX = conv_TX + bias_X.to(wide)
    open_TX = conv_TX.sigmoid()
    ds = []
    for grad, s, normed in zip(grads, heads.split(conv_TX * open_TX), (True, True, False), strict=True):
        dy = grad.to(wide)
        factor = torch.rsqrt(s.square().sum(-1, keepdim=True) + 1e-6)
        y = s * factor
        ds.append((factor * (dy - y * (dy * y).sum(-1, keepdim=True)) if normed else dy).flatten(1))
    dconv_TX = torch.cat(ds, dim=1) * (open_TX + conv_TX * open_TX * (1 - open_TX))
    parts = (taps_XW[:, -1 - j] * shifted_back(dconv_TX, j, spans_2T, shared) for j in range(W))
    dqkv_TX.copy_(sum(parts, torch.zeros_like(x_TX)))
    if not need_taps:
        return dqkv_TX, None
    of_taps = [(dconv_TX * shifted(x_TX, W - 1 - j, spans_2T, shared)).sum(0) for j in range(W)]
    return dqkv_TX, torch.stack([*of_taps, *([] if bias_X is None else [dconv_TX.sum(0)])], dim=1)


class _DeltaInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads, bias_X: Tensor | None,
        shared: SharedPrompts | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.save_for_backward(qkv_TX, taps_XW, spans_2T, bias_X)
        ctx.heads, ctx.shared = heads, shared
        return delta_inputs_forward(qkv_TX, taps_XW, spans_2T, heads, bias_X, shared)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, taps_XW, spans_2T, bias_X = ctx.saved_tensors
        dq, dk, dv = (each.contiguous() for each in incoming)
        trains = ctx.needs_input_grad[1] or ctx.needs_input_grad[4]
        given = qkv_TX, taps_XW, spans_2T, ctx.heads, bias_X, ctx.shared
        dqkv_TX, dtaps = delta_inputs_backward(dq, dk, dv, *given, need_taps=trains)
        if dtaps is None:
            return dqkv_TX, None, None, None, None, None
        of_taps, W = dtaps.to(taps_XW.dtype), taps_XW.shape[1]
        return dqkv_TX, of_taps[:, :W], None, None, None if bias_X is None else of_taps[:, W], None


def delta_inputs(
    qkv_TX: Tensor, taps_XW: Tensor, spans_2T: Tensor, heads: Heads, bias_X: Tensor | None = None,
    shared: SharedPrompts | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Differentiable q_TJK, k_TJK and v_TNV."""
    q, k, v = _DeltaInputs.apply(qkv_TX, taps_XW, spans_2T, heads, bias_X, shared)  # type: ignore[no-untyped-call]
    return q, k, v
