"""Gated short convolution over the documents of a pack (LFM2): depthwise, causal, without an activation.

T = packed tokens, D = channels, X = 3 D, W = taps. bcx_TX = [B | C | x]; rows of other documents count as zero. Where answers
share prompts (shared_prompts.py), "t - j" goes on from an answer into its prompt, "t + j" from a prompt into each answer.

    u_t = B_t x_t
    conv_t = sum over j < W of taps_{W - 1 - j} u_{t - j},  j no further than the document's first token
    y_t = C_t conv_t

    dC_t = dy_t conv_t;  g_t = dy_t C_t
    du_t = sum over j < W of taps_{W - 1 - j} g_{t + j};  dB_t = du_t x_t;  dx_t = du_t B_t
    dtaps_{W - 1 - j} = sum over t of g_t u_{t - j}        in tiles of rows, which are added in order: the same bits each time

Bound by memory: forward reads X and writes D values a token, backward reads 4 D and writes X. Neighbouring rows are read again,
from the cache. The taps' gradient is only made if they are trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.conv.shared_prompts import SharedPrompts, answers_of, earlier, later, prompt_of
from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

ROWS, COLUMNS = 16, 128  # of a tile; with 32 rows the backward spills registers on sm_90


def short_conv_reference(
    bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None
) -> Tensor:  # fmt: skip
    """y_TD. `spans_2T`: where each token's document begins and ends."""
    B_TD, C_TD, x_TD = bcx_TX.chunk(3, dim=-1)
    return C_TD * convolved(B_TD * x_TD, taps_DW.to(bcx_TX.dtype), spans_2T, shared)


def convolved(u_TD: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None) -> Tensor:
    parts = (taps_DW[:, -1 - j] * shifted(u_TD, j, spans_2T, shared) for j in range(taps_DW.shape[1]))
    return sum(parts, torch.zeros_like(u_TD))


def shifted(u_TD: Tensor, back: int, spans_2T: Tensor, shared: SharedPrompts | None = None) -> Tensor:
    """u of the token so many before, or behind if it is negative; zero where that is in no or in another document."""
    other, inside = _other_rows(len(u_TD), back, spans_2T, shared)
    return u_TD.index_select(0, other).masked_fill(~inside[:, None], 0.0)


def shifted_back(g_TD: Tensor, back: int, spans_2T: Tensor, shared: SharedPrompts | None = None) -> Tensor:
    """The gradient of what was `shifted`."""
    if shared is None:
        return shifted(g_TD, -back, spans_2T)
    other, inside = _other_rows(len(g_TD), back, spans_2T, shared)
    return torch.zeros_like(g_TD).index_add_(0, other, g_TD.masked_fill(~inside[:, None], 0.0))


def _other_rows(tokens: int, back: int, spans_2T: Tensor, shared: SharedPrompts | None) -> tuple[Tensor, Tensor]:
    other = torch.arange(tokens, device=spans_2T.device) - back
    inside = (other >= spans_2T[0]) & (other < spans_2T[1])
    if shared is not None:
        first, behind = shared.prefix_2T
        other = torch.where(other < spans_2T[0], other - spans_2T[0] + behind, other)
        inside = other >= first
    return other.clamp(0, tokens - 1), inside


# ---- Triton ----------------------------------------------------------------------------------------------------------------


@jit
def _product(bcx, bcx_row, other, column, inside, D: tl.constexpr):
    """B x of these rows, in float32."""
    place = bcx + other[:, None] * bcx_row + column[None, :]
    return tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.load(place + 2 * D, mask=inside, other=0.0).to(tl.float32)


@jit
def _gated(dy, dy_row, bcx, bcx_row, other, column, inside, D: tl.constexpr):
    """g of these rows, in float32."""
    grad = tl.load(dy + other[:, None] * dy_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return grad * tl.load(bcx + other[:, None] * bcx_row + D + column[None, :], mask=inside, other=0.0).to(tl.float32)


@jit
def _forward_kernel(
    bcx, bcx_row, taps, starts, prefix, y, y_row, T, D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row[:, None] < T) & (column[None, :] < D)
    start = tl.load(starts + row, mask=row < T, other=0)
    first, behind = prompt_of(prefix, row, start, T, SHARED)
    conv = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(taps + column * W + (W - 1 - j), mask=column < D, other=0.0).to(tl.float32)
        other, known = earlier(row, j, start, first, behind, SHARED)
        conv += tap[None, :] * _product(bcx, bcx_row, other, column, there & known[:, None], D)
    gate = tl.load(bcx + row[:, None] * bcx_row + D + column[None, :], mask=there, other=0.0).to(tl.float32)
    tl.store(y + row[:, None] * y_row + column[None, :], (gate * conv).to(y.dtype.element_ty), mask=there)


@jit
def _backward_kernel(
    dy, dy_row, bcx, bcx_row, taps, starts, ends, prefix, documents, behinds, bounds, dbcx, dbcx_row, dtaps, T,
    D: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEED_TAPS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """dtaps [programs of rows, W, D]: each program's part."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row[:, None] < T) & (column[None, :] < D)
    start = tl.load(starts + row, mask=row < T, other=0)
    end = tl.load(ends + row, mask=row < T, other=0)
    first, behind = prompt_of(prefix, row, start, T, SHARED)
    grad = tl.load(dy + row[:, None] * dy_row + column[None, :], mask=there, other=0.0).to(tl.float32)
    gate = tl.load(bcx + row[:, None] * bcx_row + D + column[None, :], mask=there, other=0.0).to(tl.float32)
    own = grad * gate
    conv = tl.zeros((ROWS, COLUMNS), tl.float32)
    du = tl.zeros((ROWS, COLUMNS), tl.float32)
    for j in tl.static_range(W):
        tap = tl.load(taps + column * W + (W - 1 - j), mask=column < D, other=0.0).to(tl.float32)
        other, known = earlier(row, j, start, first, behind, SHARED)
        before = _product(bcx, bcx_row, other, column, there & known[:, None], D)
        conv += tap[None, :] * before
        if NEED_TAPS:
            place = dtaps + (tl.program_id(0) * W + (W - 1 - j)) * D + column
            tl.store(place, tl.sum(own * before, axis=0), mask=column < D)
        du += tap[None, :] * _gated(dy, dy_row, bcx, bcx_row, row + j, column, there & (row + j < end)[:, None], D)
    if SHARED:
        document, last, most = answers_of(row, end, T, W, documents, behinds)
        for number in tl.range(0, most):
            for ahead in tl.range(1, W):
                other, known, _ = later(row, ahead, end, document + 1 + number, last, bounds)
                tap = tl.load(taps + column * W + (W - 1 - ahead), mask=column < D, other=0.0).to(tl.float32)
                du += tap[None, :] * _gated(dy, dy_row, bcx, bcx_row, other, column, there & known[:, None], D)
    place = bcx + row[:, None] * bcx_row + column[None, :]
    B = tl.load(place, mask=there, other=0.0).to(tl.float32)
    x = tl.load(place + 2 * D, mask=there, other=0.0).to(tl.float32)
    place = dbcx + row[:, None] * dbcx_row + column[None, :]
    tl.store(place, (du * x).to(dbcx.dtype.element_ty), mask=there)
    tl.store(place + D, (grad * conv).to(dbcx.dtype.element_ty), mask=there)
    tl.store(place + 2 * D, (du * B).to(dbcx.dtype.element_ty), mask=there)


# ---- forward and backward --------------------------------------------------------------------------------------------------


def short_conv_forward(
    bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None, *, out: Tensor | None = None
) -> Tensor:
    T, D = bcx_TX.shape[0], bcx_TX.shape[1] // 3
    y_TD = torch.empty(T, D, dtype=bcx_TX.dtype, device=bcx_TX.device) if out is None else out
    if not use_triton(bcx_TX):
        wide = torch.promote_types(bcx_TX.dtype, torch.float32)
        return y_TD.copy_(short_conv_reference(bcx_TX.to(wide), taps_DW, spans_2T, shared))
    _forward_kernel[(triton.cdiv(T, ROWS), triton.cdiv(D, COLUMNS))](
        bcx_TX, bcx_TX.stride(0), taps_DW.contiguous(), spans_2T[0], spans_2T if shared is None else shared.prefix_2T, y_TD,
        y_TD.stride(0), T, D=D, W=taps_DW.shape[1], ROWS=ROWS, COLUMNS=COLUMNS, SHARED=shared is not None, num_warps=4,
    )  # fmt: skip
    return y_TD


def short_conv_backward(
    dy_TD: Tensor, bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None, *,
    need_taps: bool = True, out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(dbcx_TX, dtaps_DW in float32 or None). `out` must not be bcx: programs read each other's rows."""
    (T, D), W = dy_TD.shape, taps_DW.shape[1]
    dbcx_TX = torch.empty(T, 3 * D, dtype=bcx_TX.dtype, device=bcx_TX.device) if out is None else out
    if not use_triton(bcx_TX):
        return _backward_torch(dy_TD, bcx_TX, taps_DW, spans_2T, shared, need_taps, dbcx_TX)
    tiles = triton.cdiv(T, ROWS)
    parts = torch.empty(tiles if need_taps else 0, W, D, dtype=torch.float32, device=dy_TD.device)
    _backward_kernel[(tiles, triton.cdiv(D, COLUMNS))](
        dy_TD, dy_TD.stride(0), bcx_TX, bcx_TX.stride(0), taps_DW.contiguous(), spans_2T[0], *behind_rows(spans_2T, shared),
        dbcx_TX, dbcx_TX.stride(0), parts, T, D=D, W=W, ROWS=ROWS, COLUMNS=COLUMNS, NEED_TAPS=need_taps,
        SHARED=shared is not None, num_warps=4,
    )  # fmt: skip
    return dbcx_TX, parts.sum(0).T.contiguous() if need_taps else None


def behind_rows(spans_2T: Tensor, shared: SharedPrompts | None) -> tuple[Tensor, ...]:
    """What backward kernels read of the rows behind each other: ends, prefix, documents, behinds, bounds."""
    if shared is None:
        return (spans_2T[1],) * 5  # only the first one is read
    return shared.ends_T, shared.prefix_2T, shared.document_T, shared.behind_S, shared.bounds_E


def _backward_torch(
    dy_TD: Tensor, bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None, need_taps: bool,
    dbcx_TX: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    wide, (D, W) = torch.promote_types(bcx_TX.dtype, torch.float32), taps_DW.shape
    B_TD, C_TD, x_TD = bcx_TX.to(wide).chunk(3, dim=-1)
    dy_TD, taps_DW, u_TD = dy_TD.to(wide), taps_DW.to(wide), B_TD * x_TD
    g_TD = dy_TD * C_TD
    du_TD = sum((taps_DW[:, -1 - j] * shifted_back(g_TD, j, spans_2T, shared) for j in range(W)), torch.zeros_like(u_TD))
    dbcx_TX[:, :D].copy_(du_TD * x_TD)
    dbcx_TX[:, D : 2 * D].copy_(dy_TD * convolved(u_TD, taps_DW, spans_2T, shared))
    dbcx_TX[:, 2 * D :].copy_(du_TD * B_TD)
    if not need_taps:
        return dbcx_TX, None
    return dbcx_TX, torch.stack([(g_TD * shifted(u_TD, W - 1 - j, spans_2T, shared)).sum(0) for j in range(W)], dim=1)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Ctx, bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None) -> Tensor:
        ctx.save_for_backward(bcx_TX, taps_DW, spans_2T)
        ctx.shared = shared
        return short_conv_forward(bcx_TX, taps_DW, spans_2T, shared)

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        bcx_TX, taps_DW, spans_2T = ctx.saved_tensors
        dy_TD = incoming[0] if incoming[0].stride(-1) == 1 else incoming[0].contiguous()
        given, need_taps = (dy_TD, bcx_TX, taps_DW, spans_2T, ctx.shared), ctx.needs_input_grad[1]
        dbcx_TX, dtaps_DW = short_conv_backward(*given, need_taps=need_taps)
        return dbcx_TX, None if dtaps_DW is None else dtaps_DW.to(taps_DW.dtype), None, None


def short_conv(bcx_TX: Tensor, taps_DW: Tensor, spans_2T: Tensor, shared: SharedPrompts | None = None) -> Tensor:
    """Differentiable C * conv(B * x) of bcx = [B | C | x], document by document."""
    y_TD: Tensor = _ShortConv.apply(bcx_TX, taps_DW, spans_2T, shared)  # type: ignore[no-untyped-call]
    return y_TD
