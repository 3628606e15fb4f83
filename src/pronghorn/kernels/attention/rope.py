"""QK-norm and rotary positions of queries and keys, on the output of their common projection, in one launch.

    qkv row = [N*H queries | K*H keys | K*H values]; with a gate, each query head is followed by H columns that are not read
    y = x * rstd * w                             per head (Qwen 3, Gemma 3) or over all heads together (OLMo 2), or not at all
    (a, b) -> (a cos - b sin, b cos + a sin)     for every pair: (i, i + P/2), or (2i, 2i+1) where `neighbours`

`norm_kind` after_rope (HunYuan): per head, and the other way round.

T = packed tokens, N = query heads, K = key/value heads, H = head width, P = rotary width <= H (the rest of a head passes
through), X = (N + 2K) * H, (2N + 2K) * H with a gate behind each query head, or (N + K) * H for rows without values, which have
none then. cos and sin are fp32, [T, P/2]: positions, scaling and their factor are already in them. Rows may be strided (last
dimension contiguous). Computed in fp32, rounded once. Backward writes the gradient of the whole qkv row, values included, so
the projection's backward reads one tensor. Bound by memory.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from pronghorn.kernels.attention.rope_torch import Pair, rotate, rotate_backward, rotate_forward
from pronghorn.kernels.norm.rms_norm import rms_norm_backward, rms_norm_forward, rms_norm_reference, sum_rows
from pronghorn.kernels.runtime.dispatch import jit, processor_count, tl, triton, use_triton
from pronghorn.kernels.runtime.first_order import Ctx, first_order

NormKind = Literal["per_head", "full", "after_rope"]
Grads = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def qk_rope_reference(
    qkv_TX: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, *, heads: int, kv_heads: int, head_width: int,
    neighbours: bool = False, q_norm_H: torch.Tensor | None = None, k_norm_H: torch.Tensor | None = None,
    norm_kind: NormKind = "per_head", eps: float = 1e-6, one_plus: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns q [T, N, H], k [T, K, H], v [T, K, H]."""
    q, k, v = _parts(qkv_TX, heads, kv_heads, head_width)
    rotated = []
    for x_TNH, weight in ((q, q_norm_H), (k, k_norm_H)):
        x = x_TNH
        if weight is not None and norm_kind != "after_rope":
            flat = x if norm_kind == "per_head" else x.flatten(1)
            x = rms_norm_reference(flat, weight, eps, one_plus=one_plus)[0].view(x.shape)
        x = rotate(x, cos_TP, sin_TP, neighbours).to(x.dtype)
        if weight is not None and norm_kind == "after_rope":
            x = rms_norm_reference(x, weight, eps, one_plus=one_plus)[0]
        rotated.append(x)
    return rotated[0], rotated[1], v


def _parts(qkv_TX: torch.Tensor, heads: int, kv_heads: int, head_width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = qkv_TX.view(len(qkv_TX), qkv_TX.shape[1] // head_width, head_width)
    step = 2 if rows.shape[1] == 2 * (heads + kv_heads) else 1  # 2 with a gate
    q, k, v = rows.split([step * heads, kv_heads, rows.shape[1] - step * heads - kv_heads], dim=1)
    return q[:, ::step], k, v


class Tile(NamedTuple):
    """Heads a program takes of one token, and its warps."""

    heads: int
    warps: int


class WeightGradTile(NamedTuple):
    """The same for the norm weights' gradients, where a program loops over many tokens: `stages` - 1 of them are being loaded
    into shared memory while one is computed. `programs`: per multiprocessor."""

    heads: int
    warps: int
    stages: int
    programs: int


# For `python -m benchmarks.ops --sweep rope`.
CONFIGS = [Tile(heads, warps) for heads in (4, 8, 16, 32) for warps in (1, 2, 4, 8)]
WEIGHT_GRAD_CONFIGS = [WeightGradTile(*config) for config in (
    (8, 2, 3, 10), (8, 2, 3, 20), (8, 2, 2, 10), (8, 2, 1, 30), (4, 1, 3, 20), (8, 4, 3, 8), (8, 4, 3, 16), (16, 4, 3, 5)
)]  # fmt: skip


def _tile(heads: int, head_width: int) -> Tile:
    """About 2048 values a program, 16 a thread: a 16-byte load of each half in bf16."""
    width = triton.next_power_of_2(head_width)
    block = max(1, min(triton.next_power_of_2(heads), 2048 // width))
    return Tile(block, max(1, min(4, block * width // 512)))


def _weight_grad_tile(heads: int, head_width: int) -> WeightGradTile:
    """About 1024 values, 16 a thread: with 8 key heads of 128 no lane is idle. 96 registers (sm_90), so ten programs fit a
    multiprocessor, with 93 KB in flight. Its loop has 270 instructions; with 8 values a thread it had 188."""
    width = triton.next_power_of_2(head_width)
    block = max(1, min(triton.next_power_of_2(heads), 1024 // width))
    return WeightGradTile(block, warps := max(1, block * width // 512), 3, 20 // warps)


@jit
def _load_pairs(at, inside, ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr):
    """Both members of every pair, [ROWS, BLOCK] each, of the heads that start at the pointers `at`."""
    if NEIGHBOURS:  # read side by side and split in registers: reading every second value would halve the load width
        column = tl.arange(0, 2 * BLOCK)
        mask = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, [ROWS, BLOCK, 2]))
    else:
        column = tl.arange(0, BLOCK)
        mask = inside[:, None] & (column < HALF)[None, :]
        first = tl.load(at[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(at[:, None] + HALF + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return first, second


@jit
def _store_pairs(
    at, inside, first, second, ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    if NEIGHBOURS:
        column = tl.arange(0, 2 * BLOCK)
        mask = inside[:, None] & (column < 2 * HALF)[None, :]
        both = tl.reshape(tl.join(first, second), [ROWS, 2 * BLOCK])
        tl.store(at[:, None] + column[None, :], both.to(at.dtype.element_ty), mask=mask)
    else:
        column = tl.arange(0, BLOCK)
        mask = inside[:, None] & (column < HALF)[None, :]
        tl.store(at[:, None] + column[None, :], first.to(at.dtype.element_ty), mask=mask)
        tl.store(at[:, None] + HALF + column[None, :], second.to(at.dtype.element_ty), mask=mask)


@jit
def _load_angles(cos, sin, pair, HALF: tl.constexpr):
    return (
        tl.load(cos + pair, mask=pair < HALF, other=0.0)[None, :],
        tl.load(sin + pair, mask=pair < HALF, other=0.0)[None, :],
    )


@jit
def _turned(a, b, c, s):
    return a * c - b * s, b * c + a * s


@jit
def _turned_back(a, b, c, s):
    return a * c + b * s, b * c - a * s


@jit
def _load_scale(weight, column, inside, ONE_PLUS: tl.constexpr):
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if ONE_PLUS:
        scale += 1.0
    return scale[None, :]


@jit
def _forward_heads(
    x, out, cos, sin, weight, rstd, eps, first_head, HEADS: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, NEIGHBOURS: tl.constexpr,
    NORM: tl.constexpr, ONE_PLUS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Some heads of one token; REST is 0 where the whole head rotates. In place, without a norm, the rest stays as it is.
    PITCH: from one head of x to the next."""
    head = first_head + tl.arange(0, ROWS)
    inside = head < HEADS
    pair = tl.arange(0, BLOCK)
    c, s = _load_angles(cos, sin, pair, HALF)
    a, b = _load_pairs(x + head * PITCH, inside, ROWS, HALF, BLOCK, NEIGHBOURS)
    MOVE_REST: tl.constexpr = REST > 0 and not IN_PLACE
    if MOVE_REST:
        other = 2 * HALF + tl.arange(0, REST)
        other_mask = inside[:, None] & (other < H)[None, :]
        rest = tl.load(x + (head * PITCH)[:, None] + other[None, :], mask=other_mask, other=0.0).to(tl.float32)
    if NORM == 2:
        a, b = _turned(a, b, c, s)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if MOVE_REST:
            squares += tl.sum(rest * rest, 1)
        inverse = 1.0 / tl.sqrt_rn(squares / H + eps)
        tl.store(rstd + head, inverse, mask=inside)
        STEP: tl.constexpr = 2 if NEIGHBOURS else 1
        SHIFT: tl.constexpr = 1 if NEIGHBOURS else HALF
        a = a * inverse[:, None] * _load_scale(weight, pair * STEP, pair < HALF, ONE_PLUS)
        b = b * inverse[:, None] * _load_scale(weight, pair * STEP + SHIFT, pair < HALF, ONE_PLUS)
        if MOVE_REST:
            rest = rest * inverse[:, None] * _load_scale(weight, other, other < H, ONE_PLUS)
    if NORM != 2:
        a, b = _turned(a, b, c, s)
    _store_pairs(out + head * H, inside, a, b, ROWS, HALF, BLOCK, NEIGHBOURS)
    if MOVE_REST:
        tl.store(out + (head * H)[:, None] + other[None, :], rest.to(out.dtype.element_ty), mask=other_mask)


@jit
def _forward_kernel(
    q, q_row, k, k_row, q_out, q_out_row, k_out, k_out_row, cos, cos_row, sin, sin_row, q_weight, k_weight, rstd, eps,
    N: tl.constexpr, K: tl.constexpr, Q_PITCH: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, NEIGHBOURS: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr,
    IN_PLACE: tl.constexpr,
):  # fmt: skip
    """One program: some query heads or some key heads of one token."""
    Q_TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    TILES: tl.constexpr = Q_TILES + (K + ROWS - 1) // ROWS
    program = tl.program_id(0)
    token = (program // TILES).to(tl.int64)
    tile = program % TILES
    cos += token * cos_row
    sin += token * sin_row
    rstd += token * (N + K)
    if tile < Q_TILES:
        _forward_heads(
            q + token * q_row, q_out + token * q_out_row, cos, sin, q_weight, rstd, eps, tile * ROWS, N, Q_PITCH,
            ROWS, H, HALF, BLOCK, REST, NEIGHBOURS, NORM, ONE_PLUS, IN_PLACE,
        )  # fmt: skip
    else:
        _forward_heads(
            k + token * k_row, k_out + token * k_out_row, cos, sin, k_weight, rstd + N, eps, (tile - Q_TILES) * ROWS, K, H,
            ROWS, H, HALF, BLOCK, REST, NEIGHBOURS, NORM, ONE_PLUS, IN_PLACE,
        )  # fmt: skip


@jit
def _backward_heads(
    grad, grad_row, x, x_row, out, out_row, cos, cos_row, sin, sin_row, weight, rstd, rstd_row, partial, T, lane, lanes, tile,
    HEADS: tl.constexpr, PITCH: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, NEIGHBOURS: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, NEED_DW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Some heads of every lanes-th token, PITCH apart in x and out; exactly one without a gradient of the norm's weight."""
    head = tile * ROWS + tl.arange(0, ROWS)
    inside = head < HEADS
    pair = tl.arange(0, BLOCK)
    STEP: tl.constexpr = 2 if NEIGHBOURS else 1
    SHIFT: tl.constexpr = 1 if NEIGHBOURS else HALF
    REST_BLOCK: tl.constexpr = REST if REST > 0 else 1
    other = 2 * HALF + tl.arange(0, REST_BLOCK)
    other_mask = inside[:, None] & (other < H)[None, :]
    if NORM:
        scale_a, scale_b, scale_rest = (
            _load_scale(weight, pair * STEP, pair < HALF, ONE_PLUS),
            _load_scale(weight, pair * STEP + SHIFT, pair < HALF, ONE_PLUS),
            _load_scale(weight, other, other < H, ONE_PLUS),
        )
    dw_a, dw_b = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    dw_rest = tl.zeros([ROWS, REST_BLOCK], tl.float32)
    for number in tl.range(lane, T, lanes, num_stages=STAGES):
        token = tl.cast(number, tl.int64)  # it is one already, but for the interpreter
        c, s = _load_angles(cos + token * cos_row, sin + token * sin_row, pair, HALF)
        a, b = _load_pairs(grad + token * grad_row + head * H, inside, ROWS, HALF, BLOCK, NEIGHBOURS)
        if NORM != 2:
            a, b = _turned_back(a, b, c, s)
        if REST > 0:
            at, rest_at = (head * PITCH)[:, None] + other[None, :], (head * H)[:, None] + other[None, :]
            rest = tl.load(grad + token * grad_row + rest_at, mask=other_mask, other=0.0).to(tl.float32)
        if NORM:
            # 1 / rms multiplies the gradients, not x: once, and the result is one multiply-add.
            inverse = tl.load(rstd + token * rstd_row + head, mask=inside, other=0.0)
            x_a, x_b = _load_pairs(x + token * x_row + head * PITCH, inside, ROWS, HALF, BLOCK, NEIGHBOURS)
            if NORM == 2:  # what the norm read
                x_a, x_b = _turned(x_a, x_b, c, s)
            a, b = a * inverse[:, None], b * inverse[:, None]
            dw_a, dw_b = dw_a + a * x_a, dw_b + b * x_b
            a, b = a * scale_a, b * scale_b
            shared = tl.sum(a * x_a, 1) + tl.sum(b * x_b, 1)
            if REST > 0:
                x_rest = tl.load(x + token * x_row + at, mask=other_mask, other=0.0).to(tl.float32)
                rest = rest * inverse[:, None]
                dw_rest, rest = dw_rest + rest * x_rest, rest * scale_rest
                shared += tl.sum(rest * x_rest, 1)
            share = (shared / H * inverse * inverse)[:, None]
            a, b = a - x_a * share, b - x_b * share
            if REST > 0:
                rest = rest - x_rest * share
        if NORM == 2:
            a, b = _turned_back(a, b, c, s)
        _store_pairs(out + token * out_row + head * PITCH, inside, a, b, ROWS, HALF, BLOCK, NEIGHBOURS)
        if REST > 0:
            tl.store(out + token * out_row + at, rest.to(out.dtype.element_ty), mask=other_mask)
    if NEED_DW:
        TILES: tl.constexpr = (HEADS + ROWS - 1) // ROWS
        partial += (lane * TILES + tile) * H
        tl.store(partial + pair * STEP, tl.sum(dw_a, 0), mask=pair < HALF)
        tl.store(partial + pair * STEP + SHIFT, tl.sum(dw_b, 0), mask=pair < HALF)
        tl.store(partial + other, tl.sum(dw_rest, 0), mask=other < H)


@jit
def _copy_heads(
    x, x_row, out, out_row, T, lane, lanes, tile, HEADS: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr,
    H_BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tile * ROWS * H + tl.arange(0, ROWS)[:, None] * H + tl.arange(0, H_BLOCK)[None, :]
    inside = (tl.arange(0, H_BLOCK) < H)[None, :] & (column < HEADS * H)
    for token in tl.range(lane, T, lanes, num_stages=STAGES):
        values = tl.load(x + tl.cast(token, tl.int64) * x_row + column, mask=inside, other=0.0)
        tl.store(out + tl.cast(token, tl.int64) * out_row + column, values.to(out.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    dq, dq_row, dk, dk_row, dv, dv_row, qkv, qkv_row, out, out_row, cos, cos_row, sin, sin_row, q_weight, k_weight, rstd,
    partial_q, partial_k, T, period, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, Q_PITCH: tl.constexpr,
    ROWS: tl.constexpr, H: tl.constexpr, H_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    NEIGHBOURS: tl.constexpr, NORM: tl.constexpr, ONE_PLUS: tl.constexpr, NEED_DW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    Q_TILES: tl.constexpr = (N + ROWS - 1) // ROWS
    K_TILES: tl.constexpr = (K + ROWS - 1) // ROWS
    TILES: tl.constexpr = Q_TILES + K_TILES + (V + ROWS - 1) // ROWS
    program = tl.program_id(0)
    lane = (program // TILES).to(tl.int64)
    lanes = tl.num_programs(0) // TILES
    tile = (program + program // TILES // period) % TILES
    if tile < Q_TILES:
        _backward_heads(
            dq, dq_row, qkv, qkv_row, out, out_row, cos, cos_row, sin, sin_row, q_weight, rstd, N + K, partial_q,
            T, lane, lanes, tile, N, Q_PITCH, ROWS, H, HALF, BLOCK, REST, NEIGHBOURS, NORM, ONE_PLUS, NEED_DW, STAGES,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        _backward_heads(
            dk, dk_row, qkv + N * Q_PITCH, qkv_row, out + N * Q_PITCH, out_row, cos, cos_row, sin, sin_row, k_weight, rstd + N,
            N + K, partial_k, T, lane, lanes, tile - Q_TILES, K, H, ROWS, H, HALF, BLOCK, REST, NEIGHBOURS, NORM, ONE_PLUS,
            NEED_DW, STAGES,
        )  # fmt: skip
    else:
        v_tile = tile - Q_TILES - K_TILES
        _copy_heads(dv, dv_row, out + N * Q_PITCH + K * H, out_row, T, lane, lanes, v_tile, V, ROWS, H, H_BLOCK, STAGES)


def _widths(head_width: int, cos_TP: torch.Tensor) -> dict[str, int]:
    """Pairs of a head and its columns without RoPE, and the next powers of two."""
    half, rest = cos_TP.shape[-1], head_width - 2 * cos_TP.shape[-1]
    if rest < 0:
        raise ValueError(f"cos and sin rotate {2 * half} of {head_width} columns")
    round_up = triton.next_power_of_2
    return {"H": head_width, "HALF": half, "BLOCK": round_up(half), "REST": round_up(rest) if rest else 0}


def _norm(norms: Pair | None, after: bool) -> int:
    """How the kernels name it: 0, or 1 before the rotation, 2 after it."""
    return 0 if norms is None else 1 + after


def _rotate_forward(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor, cos_TP: torch.Tensor,
    sin_TP: torch.Tensor, neighbours: bool, norms: Pair | None, eps: float, one_plus: bool,
    after: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """Per-head norm and rotation into q_out and k_out, which may be q and k where there is no norm. Returns rstd."""
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    rstd = None if norms is None else torch.empty(T, N + K, dtype=torch.float32, device=q_TNH.device)
    if use_triton(q_TNH):
        q_weight, k_weight = norms or (cos_TP, cos_TP)  # pointers the kernel does not read
        tile = _tile(N, H)
        _forward_kernel[(T * (triton.cdiv(N, tile.heads) + triton.cdiv(K, tile.heads)),)](
            q_TNH, q_TNH.stride(0), k_TKH, k_TKH.stride(0), q_out, q_out.stride(0), k_out, k_out.stride(0), cos_TP,
            cos_TP.stride(0), sin_TP, sin_TP.stride(0), q_weight, k_weight, cos_TP if rstd is None else rstd, eps, N=N, K=K,
            Q_PITCH=q_TNH.stride(1), ROWS=tile.heads, NEIGHBOURS=neighbours, NORM=_norm(norms, after), ONE_PLUS=one_plus,
            IN_PLACE=q_out.data_ptr() == q_TNH.data_ptr(), num_warps=tile.warps, **_widths(H, cos_TP),
        )  # fmt: skip
        return rstd
    rstds = rotate_forward((q_TNH, k_TKH), (q_out, k_out), cos_TP, sin_TP, neighbours, norms, eps, one_plus, after)
    return torch.cat(rstds, dim=1) if rstds else None


def _rotate_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], cos_TP: torch.Tensor, sin_TP: torch.Tensor, neighbours: bool,
    qkv_TX: torch.Tensor, rstd: torch.Tensor | None, norms: Pair | None, one_plus: bool,
    need_norm_grad: bool, out: torch.Tensor, after: bool = False,
) -> Grads:  # fmt: skip
    """The transpose of `_rotate_forward`; qkv is read only where there is a norm."""
    dq, dk, dv = grads
    (T, N, H), K, V = dq.shape, dk.shape[1], dv.shape[1]
    if not use_triton(dq):
        raw, targets = _parts(qkv_TX, N, K, H)[:2], _parts(out, N, K, H)
        targets[2].copy_(dv)
        args = raw, targets[:2], cos_TP, sin_TP, neighbours, rstd, norms, one_plus, need_norm_grad, after
        return out, *rotate_backward((dq, dk), *args)
    block, warps, stages, programs = _weight_grad_tile(N, H) if need_norm_grad else (*_tile(N, H), 1, 0)
    q_tiles, k_tiles = triton.cdiv(N, block), triton.cdiv(K, block)
    tiles, lanes, period, held = q_tiles + k_tiles + triton.cdiv(V, block), T, T, 0
    if need_norm_grad:
        # Programs go to multiprocessors round robin. If the number of tiles divided theirs, one would get only value tiles,
        # which are fewer bytes, and idle at the end: so the kinds shift by one every round.
        processors = processor_count(dq.device)
        lanes = held = min(T, triton.cdiv(programs * processors, tiles))
        period = processors // tiles if processors % tiles == 0 else T
    partial_q = torch.empty(held * q_tiles, H, dtype=torch.float32, device=dq.device)
    partial_k = torch.empty(held * k_tiles, H, dtype=torch.float32, device=dq.device)
    q_weight, k_weight = norms or (cos_TP, cos_TP)
    _backward_kernel[(lanes * tiles,)](
        dq, dq.stride(0), dk, dk.stride(0), dv, dv.stride(0), qkv_TX, qkv_TX.stride(0), out, out.stride(0), cos_TP,
        cos_TP.stride(0), sin_TP, sin_TP.stride(0), q_weight, k_weight, cos_TP if rstd is None else rstd, partial_q, partial_k,
        T, period, N=N, K=K, V=V, Q_PITCH=(out.shape[1] - (K + V) * H) // N, ROWS=block, H_BLOCK=triton.next_power_of_2(H),
        NEIGHBOURS=neighbours, NORM=_norm(norms, after), ONE_PLUS=one_plus, NEED_DW=need_norm_grad, STAGES=stages,
        num_warps=warps, **_widths(H, cos_TP),
    )  # fmt: skip
    if not need_norm_grad:
        return out, None, None
    norm_grads_2H = sum_rows(partial_q, partial_k)
    return out, norm_grads_2H[0], norm_grads_2H[1]


def _both(q_norm_H: torch.Tensor | None, k_norm_H: torch.Tensor | None) -> Pair | None:
    if (q_norm_H is None) != (k_norm_H is None):
        raise ValueError("QK-norm needs a weight for queries and one for keys, or none")
    return None if q_norm_H is None or k_norm_H is None else (q_norm_H, k_norm_H)


def qk_rope_forward(
    qkv_TX: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, *, heads: int, kv_heads: int, head_width: int,
    neighbours: bool = False, q_norm_H: torch.Tensor | None = None, k_norm_H: torch.Tensor | None = None,
    norm_kind: NormKind = "per_head", eps: float = 1e-6, one_plus: bool = False, in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Returns q [T, N, H], k [T, K, H], v (a view of qkv) and rstd: [T, N + K] per head, [2, T] over all heads, or None.

    In place, q and k are views of qkv too, and backward needs nothing; a norm's backward needs the raw qkv.
    """
    norms = _both(q_norm_H, k_norm_H)
    if in_place and norms is not None:
        raise ValueError("with QK-norm, backward needs the values that rotating in place overwrites")
    q, k, v = _parts(qkv_TX, heads, kv_heads, head_width)
    if q.stride(1) != head_width and (in_place or norm_kind == "full"):
        raise ValueError("queries with gates are neither rotated in place nor normed over all heads")
    if norms is not None and norm_kind == "full":
        q_flat, _, q_rstd = rms_norm_forward(q.flatten(1), norms[0], eps, one_plus=one_plus)
        k_flat, _, k_rstd = rms_norm_forward(k.flatten(1), norms[1], eps, one_plus=one_plus)
        q, k = q_flat.view(q.shape), k_flat.view(k.shape)
        _rotate_forward(q, k, q, k, cos_TP, sin_TP, neighbours, None, eps, one_plus)
        return q, k, v, torch.stack([q_rstd, k_rstd])
    q_out, k_out = (q, k) if in_place else (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    after = norm_kind == "after_rope"
    rstd = _rotate_forward(q, k, q_out, k_out, cos_TP, sin_TP, neighbours, norms, eps, one_plus, after)
    return q_out, k_out, v, rstd


def qk_rope_backward(
    dq_TNH: torch.Tensor, dk_TKH: torch.Tensor, dv_TKH: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, *,
    neighbours: bool = False, qkv_TX: torch.Tensor | None = None, rstd: torch.Tensor | None = None,
    q_norm_H: torch.Tensor | None = None, k_norm_H: torch.Tensor | None = None, norm_kind: NormKind = "per_head",
    one_plus: bool = False, need_norm_grad: bool = False, out: torch.Tensor | None = None,
) -> Grads:  # fmt: skip
    """Returns (dqkv [T, X], gradients of the two norm weights in fp32 or None). With a norm, give the raw qkv and rstd.

    dq, dk and dv may be views of `out`. The norm gradients are the same in every run.
    """
    T, N, H = dq_TNH.shape
    width, kv_width, values = N * H, dk_TKH.shape[1] * H, dv_TKH.shape[1] * H
    norms = _both(q_norm_H, k_norm_H)
    if norms is not None and (qkv_TX is None or rstd is None):
        raise ValueError("the backward of QK-norm needs qkv and rstd")
    if out is None and qkv_TX is not None and qkv_TX.shape[1] > width + kv_width + values:
        out = torch.zeros_like(qkv_TX)  # the gradient of the gates is someone else's
    dqkv = torch.empty(T, width + kv_width + values, dtype=dq_TNH.dtype, device=dq_TNH.device) if out is None else out
    raw = dqkv if qkv_TX is None else qkv_TX
    grads = (dq_TNH, dk_TKH, dv_TKH)
    if norms is None or norm_kind != "full":
        need_norm_grad, after = need_norm_grad and norms is not None, norm_kind == "after_rope"
        return _rotate_backward(grads, cos_TP, sin_TP, neighbours, raw, rstd, norms, one_plus, need_norm_grad, dqkv, after)
    _rotate_backward(grads, cos_TP, sin_TP, neighbours, raw, None, None, one_plus, False, dqkv)
    assert rstd is not None
    norm_grads = []
    for i, columns in enumerate((slice(0, width), slice(width, width + kv_width))):
        part = dqkv[:, columns]
        norm_grads.append(rms_norm_backward(
            part, raw[:, columns], norms[i], rstd[i], one_plus=one_plus, need_weight_grad=need_norm_grad, out=part
        )[1])  # fmt: skip
    return dqkv, norm_grads[0], norm_grads[1]


class _QkRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Ctx, qkv_TX: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, q_norm_H: torch.Tensor | None,
        k_norm_H: torch.Tensor | None, settings: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        q, k, v, rstd = qk_rope_forward(qkv_TX, cos_TP, sin_TP, q_norm_H=q_norm_H, k_norm_H=k_norm_H, **settings)
        ctx.save_for_backward(qkv_TX if q_norm_H is not None else None, cos_TP, sin_TP, q_norm_H, k_norm_H, rstd)
        ctx.settings = {name: settings[name] for name in ("neighbours", "norm_kind", "one_plus") if name in settings}
        return q, k, v.clone()

    @staticmethod
    @first_order
    def backward(ctx: Ctx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv_TX, cos_TP, sin_TP, q_norm_H, k_norm_H, rstd = ctx.saved_tensors
        dq, dk, dv = (grad.contiguous() for grad in grads)
        norm = {"qkv_TX": qkv_TX, "rstd": rstd, "q_norm_H": q_norm_H, "k_norm_H": k_norm_H}
        norm["need_norm_grad"] = any(ctx.needs_input_grad[3:5])
        dqkv, *norm_grads = qk_rope_backward(dq, dk, dv, cos_TP, sin_TP, **norm, **ctx.settings)
        return dqkv, None, None, *(None if grad is None else grad.to(q_norm_H.dtype) for grad in norm_grads), None


def qk_rope(
    qkv_TX: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, *, q_norm_H: torch.Tensor | None = None,
    k_norm_H: torch.Tensor | None = None, **settings: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Differentiable; returns q, k and v. `settings`: the other arguments of `qk_rope_forward`."""
    q, k, v = _QkRope.apply(qkv_TX, cos_TP, sin_TP, q_norm_H, k_norm_H, settings)  # type: ignore[no-untyped-call]
    return q, k, v
