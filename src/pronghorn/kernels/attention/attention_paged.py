"""Attention of one new token per answer over keys and values in pages: decoding.

B = rows, each the newest token of an answer; N = query heads, K = key/value heads, H = head width; C = tokens of a page.

    pages_PKCH     keys, or values: a page holds C tokens of every key/value head, so a head's part of it is contiguous
    segment        a run of keys: pages in order, `length` of their tokens, the position of the first one, and the rows that see
                   it. An answer sees two: its prompt, which all answers to it share, and its own tokens
    row b sees     key j of a segment if it is a member, and position_b - (first + j) < window where there is a window

Answers to one prompt are members of one segment, so its keys are read once for all of them: with 8 answers, a prompt of 512 and
answers of 512 tokens, 576 instead of 1,024 tokens of keys an answer. A program multiplies the query heads of a key/value head,
of up to M members, by the pages of one split of a segment; a second kernel adds up the splits of both segments and the sink:

    m, l, a  =  max s, sum exp(s - m), sum exp(s - m) v        of a split;  s as in attention.py
    out      =  sum over splits of exp(m - m') a  /  (sum over splits of exp(m - m') l + exp(sink - m')),  m' the largest m

Splits and grids follow from the sizes of the tables alone, and nothing is read back, so a CUDA graph can capture it. Sums have
a fixed order. Everything between the products is float32. Inputs in float32 are multiplied in parts of 64 columns: one product
over a head of 512 adds its terms one after the other, which was 2.5 times plain torch's error on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_paged_torch import PagesRead
from pronghorn.kernels.attention.attention_softmax import capped, powers
from pronghorn.kernels.runtime.add_dot import add_dot
from pronghorn.kernels.runtime.dispatch import jit, processor_count, tl, triton, use_triton

PAGE = 64  # tokens of a page: a tile of keys
MEMBERS = 8  # rows that one program of a shared segment computes: more of them are further segments of the same pages
LEAST_ROWS = 16  # of a product on tensor cores
# Wider heads are computed in tiles of 16 rows and 16 keys: whole pages would take 149 to 360 KB of shared memory at 512.
WIDE = 256
_LEAST = tl.constexpr(-1e38)  # maximum before the first key; finite, since -inf - -inf is NaN


class Segments(NamedTuple):
    """S runs of keys of the same table. A row is a member of at most one of them."""

    pages_SJ: Tensor  # int32: numbers of pages
    length_S: Tensor  # int32: tokens
    first_S: Tensor  # int32: position of the first token
    members_SM: Tensor  # int32: rows of the batch; -1: none


def paged_attention_reference(
    q_BNH: Tensor, k_PKCH: Tensor, v_PKCH: Tensor, parts: Sequence[Segments], position_B: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks_N: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The definition, row by row. For tests."""
    out_BNH, group = torch.zeros_like(q_BNH), q_BNH.shape[1] // k_PKCH.shape[1]
    for row, q_NH in enumerate(q_BNH):
        keys, values, places = [], [], []
        for part in parts:
            for segment, _ in (part.members_SM == row).nonzero().tolist():
                length, pages = int(part.length_S[segment]), part.pages_SJ[segment].long()
                k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length] for x in (k_PKCH, v_PKCH))
                keys.append(k)
                values.append(v)
                places.append(int(part.first_S[segment]) + torch.arange(length))
        if not keys:
            continue
        k_NLH, v_NLH = (torch.cat(x, 1).repeat_interleave(group, 0) for x in (keys, values))
        scores_NL = scale * (k_NLH @ q_NH[..., None])[..., 0]
        if softcap is not None:
            scores_NL = softcap * torch.tanh(scores_NL / softcap)
        if window is not None:
            scores_NL = scores_NL.masked_fill(position_B[row] - torch.cat(places) >= window, float("-inf"))
        if sinks_N is not None:
            scores_NL = torch.cat([scores_NL, sinks_N.to(scores_NL)[:, None]], 1)
        shares_NL = scores_NL.softmax(-1)[:, : v_NLH.shape[1]]
        out_BNH[row] = (shares_NL[..., None] * v_NLH).sum(1)
    return out_BNH


def paged_attention(
    q_BNH: Tensor, k_PKCH: Tensor, v_PKCH: Tensor, parts: Sequence[Segments], position_B: Tensor, *, scale: float,
    window: int | None = None, softcap: float | None = None, sinks_N: Tensor | None = None, out: Tensor,
    read: dict[tuple[int | None, int], PagesRead] | None = None,
) -> Tensor:  # fmt: skip
    """Writes `out`, [B, N, H], which may be a view into wider rows. A row that is no member of anything gets zeros. `read`: of
    a step, where a CPU keeps what its layers have in common."""
    if use_triton(q_BNH):
        return _launched(q_BNH, k_PKCH, v_PKCH, parts, position_B, scale, window, softcap, sinks_N, out)
    heads, read = k_PKCH.shape[1], {} if read is None else read
    if (window, heads) not in read:
        read[window, heads] = PagesRead(parts, position_B, heads, k_PKCH.shape[2], window)
    return out.copy_(read[window, heads].attention(q_BNH, k_PKCH, v_PKCH, scale=scale, softcap=softcap, sinks_N=sinks_N))


def write_pages(k_PKCH: Tensor, v_PKCH: Tensor, place_T: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
    """Keys and values of T tokens to their places: page * C + token in it. Several may have place 0, which nobody reads."""
    T, K, H = k_TKH.shape
    assert k_TKH.stride()[1:] == v_TKH.stride()[1:] == (H, 1)
    if use_triton(k_TKH):
        width = int(triton.next_power_of_2(K * H))
        strides = k_TKH.stride(0), v_TKH.stride(0)
        _write_kernel[(T,)](k_TKH, v_TKH, *strides, place_T, k_PKCH, v_PKCH, K=K, H=H, C=k_PKCH.shape[2], KH=width, num_warps=4)
        return
    page_T, token_T = place_T // PAGE, place_T % PAGE
    for pages, rows in ((k_PKCH, k_TKH), (v_PKCH, v_TKH)):
        pages[page_T, :, token_T] = rows.to(pages.dtype)


def _value(constant: object) -> float:
    """The number of a `tl.constexpr`, or of what stands for one where Triton is missing."""
    return float(getattr(constant, "value", constant))  # type: ignore[arg-type]


@jit
def _write_kernel(
    k, v, k_row, v_row, places, k_pages, v_pages, K: tl.constexpr, H: tl.constexpr, C: tl.constexpr, KH: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, KH)
    place = tl.load(places + row)
    target = ((place // C) * K + column // H) * C * H + (place % C) * H + column % H
    inside = column < K * H
    tl.store(k_pages + target, tl.load(k + row * k_row + column, mask=inside), mask=inside)
    tl.store(v_pages + target, tl.load(v + row * v_row + column, mask=inside), mask=inside)


@jit
def _exp(x, EXACT: tl.constexpr):
    """e^x; exact: as plain torch, which a GPU's own instruction is not."""
    return powers(x, 1.0, 0.0, EXACT) if EXACT else tl.exp(x)


@jit
def _scores(queries, there, keys, written, H, HP: tl.constexpr, PART: tl.constexpr):
    """q k^T in float32, in parts of the width. `queries`, `keys`: where rows begin."""
    s = tl.zeros((there.shape[0], written.shape[0]), tl.float32)
    for first in tl.static_range(0, HP, PART):
        width = first + tl.arange(0, PART)
        inside = (width < H)[None, :]
        q = tl.load(queries[:, None] + width[None, :], mask=there[:, None] & inside, other=0.0)
        k = tl.load(keys[:, None] + width[None, :], mask=written[:, None] & inside, other=0.0)
        s = add_dot(s, q, tl.trans(k), "ieee")
    return s


@jit
def _split_kernel(
    q, q_row, k_pages, v_pages, pages, lengths, firsts, members, positions, m_out, l_out, a_out, J, split_pages, column, X,
    scale, softcap, window, K: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, R: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One split of one segment, for one key/value head and one of TILES tiles of rows: member by member, G heads each. A page
    is read in parts of KEYS."""
    segment, head, split = tl.program_id(0), tl.program_id(1) // TILES, tl.program_id(2)
    row, width = tl.program_id(1) % TILES * R + tl.arange(0, R), tl.arange(0, HP)
    member = tl.load(members + segment * M + row // G, mask=row < M * G, other=-1)
    there = member >= 0
    length, first = tl.load(lengths + segment), tl.load(firsts + segment)
    N: tl.constexpr = K * G
    heads = head * G + row % G
    inside = there[:, None] & (width < H)[None, :]
    EXACT: tl.constexpr = q.dtype.element_ty == tl.float32
    queries = q + member.to(tl.int64) * q_row + heads * H
    if not EXACT:
        tile = tl.load(queries[:, None] + width[None, :], mask=inside, other=0.0)
    position = tl.load(positions + member, mask=there, other=0)
    m = tl.full((R,), _LEAST, tl.float32)
    mass = tl.zeros((R,), tl.float32)
    a = tl.zeros((R, HP), tl.float32)
    PARTS: tl.constexpr = C // KEYS
    begin = split * split_pages * PARTS
    end = tl.minimum(begin + split_pages * PARTS, tl.cdiv(length, KEYS))
    if WINDOW:
        oldest = tl.min(tl.where(there, position, 2147483647)) - window + 1 - first
        begin = tl.maximum(begin, tl.maximum(oldest, 0) // KEYS)
    for j in range(begin, end):
        page = tl.load(pages + segment * J + j // PARTS).to(tl.int64)
        token = j % PARTS * KEYS + tl.arange(0, KEYS)
        key = j // PARTS * C + token
        seen = there[:, None] & (key < length)[None, :]
        if WINDOW:
            seen = seen & (position[:, None] - first - key[None, :] < window)
        start = (page * K + head) * C * H + token * H
        base = start[:, None] + width[None, :]
        written = (key < length)[:, None] & (width < H)[None, :]
        if EXACT:
            s = _scores(queries, there, k_pages + start, key < length, H, HP, min(HP, 64))
        else:
            s = tl.dot(tile, tl.trans(tl.load(k_pages + base, mask=written, other=0.0)))
        s, factor, _ = capped(s, scale, softcap, SOFTCAP, EXACT)
        s = tl.where(seen, s * factor, _LEAST)
        higher = tl.maximum(m, tl.max(s, 1))
        p = tl.where(seen, _exp(s - higher[:, None], EXACT), 0.0)
        fade = _exp(m - higher, EXACT)
        v = tl.load(v_pages + base, mask=written, other=0.0)
        mass = mass * fade + tl.sum(p, 1)
        a = add_dot(a * fade[:, None], p.to(v.dtype), v, "ieee")
        m = higher
    place = (member * X + column + split) * N + heads
    tl.store(m_out + place, m, mask=there)
    tl.store(l_out + place, mass, mask=there)
    tl.store(a_out + place.to(tl.int64)[:, None] * H + width[None, :], a, mask=inside)


@jit
def _merge_kernel(
    m_in, l_in, a_in, sinks, out, out_row, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, X: tl.constexpr,
    XP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Splits of one row and head, added up."""
    row, head = tl.program_id(0), tl.program_id(1)
    column, width = tl.arange(0, XP), tl.arange(0, HP)
    place = (row * X + column) * N + head
    m = tl.load(m_in + place, mask=column < X, other=_LEAST)
    seen = m > _LEAST  # else nobody wrote there
    mass = tl.load(l_in + place, mask=seen, other=0.0)
    highest = tl.max(m, 0)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    EXACT: tl.constexpr = out.dtype.element_ty == tl.float32
    factor = _exp(m - highest, EXACT)
    total = tl.sum(factor * mass, 0)
    if SINKS:
        total += _exp(sink - highest, EXACT)
    inside = seen[:, None] & (width < H)[None, :]
    a = tl.load(a_in + place.to(tl.int64)[:, None] * H + width[None, :], mask=inside, other=0.0)
    found = tl.sum(factor[:, None] * a, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row.to(tl.int64) * out_row + head * H + width, found.to(out.dtype.element_ty), mask=width < H)


def splits_of(segments: int, heads: int, pages: int, device: torch.device) -> int:
    """Programs for one segment and head: about four a multiprocessor in all, and at least two pages each."""
    wanted = -(-4 * processor_count(device) // max(1, segments * heads))
    return max(1, min(wanted, pages // 2, 16))


def _launched(
    q_BNH: Tensor, k_PKCH: Tensor, v_PKCH: Tensor, parts: Sequence[Segments], position_B: Tensor, scale: float,
    window: int | None, softcap: float | None, sinks_N: Tensor | None, out: Tensor,
) -> Tensor:  # fmt: skip
    (B, N, H), K, C = q_BNH.shape, k_PKCH.shape[1], k_PKCH.shape[2]
    splits = [splits_of(len(part.length_S), K, part.pages_SJ.shape[1], q_BNH.device) for part in parts]
    X = sum(splits)
    # Rows that are members of only one table leave columns of the other untouched: these count nothing.
    m_BXN = q_BNH.new_full((B, X, N), _value(_LEAST), dtype=torch.float32)
    l_BXN = q_BNH.new_empty(B, X, N, dtype=torch.float32)
    a_BXNH = q_BNH.new_empty(B, X, N, H, dtype=torch.float32)
    padded = max(16, int(triton.next_power_of_2(H)))
    column = 0
    for part, count in zip(parts, splits, strict=True):
        (S, M), J = part.members_SM.shape, part.pages_SJ.shape[1]
        if not S:
            continue
        rows = max(LEAST_ROWS, int(triton.next_power_of_2(M * (N // K))))
        tiles, keys = (1, C) if padded <= WIDE else (triton.cdiv(M * (N // K), LEAST_ROWS), 16)
        _split_kernel[(S, K * tiles, count)](
            q_BNH, q_BNH.stride(0), k_PKCH, v_PKCH, part.pages_SJ, part.length_S, part.first_S, part.members_SM, position_B,
            m_BXN, l_BXN, a_BXNH, J, -(-J // count), column, X, scale, softcap or 1.0, window or 0, K=K, G=N // K, H=H,
            HP=padded, C=C, M=M, R=rows if tiles == 1 else LEAST_ROWS, TILES=tiles, KEYS=keys, WINDOW=window is not None,
            SOFTCAP=softcap is not None, num_warps=4,
        )  # fmt: skip
        column += count
    _merge_kernel[(B, N)](
        m_BXN, l_BXN, a_BXNH, sinks_N if sinks_N is not None else q_BNH, out, out.stride(0), N=N, H=H, HP=padded, X=X,
        XP=int(triton.next_power_of_2(X)), SINKS=sinks_N is not None, num_warps=1,
    )  # fmt: skip
    return out
