"""Attention over packed short documents in Triton (see attention.py for what is computed and for the letters).

Kernels for long sequences cut each document into tiles of 128 rows and start a pipeline for each tile of each head. With
documents of 200 tokens, start-up and empty rows take most of the time. Here a tile is a slice of the pack, across documents: it
reads keys from the start of its first token's document to its own end, and a mask separates documents. So the grid depends on
T alone, nothing is zeroed or converted, sums have a fixed order (results are bit-identical), and many small programs per SM
hide each other's latency.

Query heads that share a key/value head (PACK of them, a power of 2) lie side by side in a tile: its BM rows are BM / PACK
tokens of each. A tile that spans fewer tokens reads fewer masked keys: with documents of 200 tokens, 64 rows of one head read
229 keys on average, 16 tokens of four heads 181, of which 165 are visible (computed).

A forward program can process two key/value heads for its tokens (PAIR; names ending in 2 belong to the second). What is the
same for both, mainly the mask, is computed once: 13.6 instructions a score instead of 17.4 in the loop at width 64 (compiled
for an H200). The arithmetic of a head and its order stay the same.

    starts_T, ends_T    int32: where each token's document begins and ends, made once per batch (`spans` in attention_torch.py)
    forward             program = BM query rows; loops over key blocks; online softmax
    backward, dq        the same programs; also delta = sum_h dout * out, for the next kernel
    backward, dk, dv    program = BN key rows of one key/value head; loops over the query heads of its group and over query
                        blocks up to the end of its last row's document

With shared prefixes (SHARED, attention_shared.py) a tile reads two ranges of keys in one loop (attention_ranges.py). dk and dv
need no second range: rows that see an answer end with it, and those that see a prompt are all that follow in its group.

Backward can also undo RoPE on dq and dk in fp32: one rounding and one pass less.

Products run on tensor cores in the inputs' dtype with fp32 sums (fp32 inputs: true fp32); the softmax is in fp32, base 2.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pronghorn.kernels.attention.attention_ranges import (
    away_by,
    key_block,
    keys_of,
    last_row,
    next_keys,
    prompt_of,
    seen_before,
    seen_keys,
    with_prompt,
)
from pronghorn.kernels.attention.attention_softmax import LOG2E, as_power, capped, powers, weights_by
from pronghorn.kernels.attention.attention_torch import Computed, Grads, Packed, Parts, sink_gradients
from pronghorn.kernels.runtime.add_dot import add_dot, halves
from pronghorn.kernels.runtime.dispatch import BLACKWELL, HOPPER, Chip, chip_of, jit, tl, triton

MAX_WIDTH = 128  # of a head: wider accumulators leave room for small tiles only
ALONE_WIDTH = 512  # the same where no other kernel computes: packs with shared prefixes, heads above 256; in 16 bits
_LEAST = tl.constexpr(-1e38)  # running maximum before the first key: below every score, and finite, since -inf - -inf is NaN


def _padded(width: int) -> int:
    """The columns of a tile."""
    return max(16, int(triton.next_power_of_2(width)))


class Tiles(NamedTuple):
    rows: int  # query rows
    keys: int
    warps: int
    stages: int
    heads: int = 8  # heads that share a tile, at most
    pair: bool = False  # forward: two key/value heads a program, where that is possible

    def pack(self, group: int) -> int:
        """Heads of a group that share a tile."""
        return min(self.heads, group & -group)

    def pairs(self, group: int, kv_heads: int) -> bool:
        """Whether a program processes two: their number is even, and a tile holds all query heads of one."""
        return self.pair and kv_heads % 2 == 0 and self.pack(group) == group

    def options(self, tokens: int, queries: int, pack: int, width: int) -> dict[str, Any]:
        """Compile-time options. WHOLE: no tile crosses the end of the pack or of a head, so no load needs a mask."""
        whole = all(rows % max(self.rows, self.keys) == 0 for rows in (tokens, queries)) and width == _padded(width)
        return {"BM": self.rows, "BN": self.keys, "PACK": pack, "STAGES": self.stages, "WHOLE": whole}


class Config(NamedTuple):
    forward: Tiles
    dq: Tiles
    dkdv: Tiles


# By head width; the first is used, `python -m benchmarks.ops --sweep attention` times the others. Of some twelve tiles for
# each kernel these were the fastest (16,384 tokens of instructions, 32 query and 8 key/value heads, H200): forward 159 us at
# width 64 and 250 at 128, where 64 keys at a time take 182 and 280 (docs/log/2026-11-15-short-attention.md). None spills.
# Stages are from the same entry: dk, dv at width 64 take 191 us with 4 and 197 with 3, dq at 128 353 with 2 and
# 372 with 3. Forward by pairs takes 0.05 to 0.2 ms off a 1B step of 148 (2026-11-16 in docs/log); dq by pairs took 0.1 more,
# though it has a fifth fewer instructions, and at width 128 pairs leave registers for fewer programs.
CONFIGS = {
    64: [Config(Tiles(64, 32, 4, 3, pair=True), Tiles(64, 32, 4, 3), Tiles(32, 64, 4, 4)),
         Config(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
         Config(Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(32, 64, 4, 2)),
         Config(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 4))],
    128: [Config(Tiles(64, 32, 4, 3), Tiles(64, 32, 4, 2), Tiles(32, 64, 4, 2)),
          Config(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 1), Tiles(32, 64, 4, 2, heads=1)),
          Config(Tiles(64, 64, 4, 3), Tiles(128, 32, 8, 3), Tiles(64, 128, 8, 2))],
    256: [Config(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 32, 8, 2))],
    # Not timed. With 64 rows, or 32 keys for dk and dv, registers spill (compiled for 9.0).
    512: [Config(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1))],
}  # fmt: skip


# fp32 products do not use tensor cores: Triton unrolls them, and larger tiles spill kilobytes. fp32 is for debugging.
FP32_CONFIGS = {64: Config(*[Tiles(32, 32, 8, 1)] * 3), 128: Config(*[Tiles(16, 16, 4, 1)] * 3)}


# On small chips, tensor-core operands come from registers, not from shared memory: at width 128, dk and dv need more registers
# than a thread of four warps can have (compiled for 12.0: 8 to 40 bytes spilled; 180 registers with eight).
SMALL_CONFIGS = {
    64: CONFIGS[64][0],
    128: CONFIGS[128][0]._replace(dkdv=Tiles(32, 64, 8, 2)),
    256: Config(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    512: Config(Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(16, 16, 8, 1)),  # 98 of 101 KB of shared memory
}


def config_for(width: int, dtype: torch.dtype, chip: Chip = HOPPER) -> Config:
    size = max(64, _padded(width))
    if dtype == torch.float32:
        return FP32_CONFIGS[size]
    if chip == BLACKWELL and size == 64:
        return CONFIGS[64][0]._replace(dq=Tiles(64, 32, 8, 3))  # with four warps dq spills 8 to 16 bytes there
    return CONFIGS[size][0] if chip.large else SMALL_CONFIGS[size]


# ---- Triton -------------------------------------------------------------------------------------------------


@jit
def _places(pointer, token, row_stride, head, column, H: tl.constexpr):
    """[rows, columns] of one head, or each row of its own."""
    return pointer + (token.to(tl.int64) * row_stride + head * H)[:, None] + column[None, :]


@jit
def _rows(places, inside, column, H: tl.constexpr, WHOLE: tl.constexpr):
    """Loads rows; zeros outside."""
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=inside[:, None] & (column < H)[None, :], other=0.0)


@jit
def _store(pointer, token, row_stride, head, column, inside, x, cos, sin, H: tl.constexpr, UNROTATE: tl.constexpr):
    """Rounded; with UNROTATE rotated back first: (a, b) -> (a cos + b sin, b cos - a sin) for every pair (i, i + H / 2)."""
    if UNROTATE:
        column = tl.arange(0, H // 2)
        angles = token.to(tl.int64)[:, None] * (H // 2) + column[None, :]
        cosines = tl.load(cos + angles, mask=inside[:, None], other=0.0)
        sines = tl.load(sin + angles, mask=inside[:, None], other=0.0)
        a, b = halves(x)
        places = _places(pointer, token, row_stride, head, column, H)
        tl.store(places, (a * cosines + b * sines).to(pointer.dtype.element_ty), mask=inside[:, None])
        tl.store(places + H // 2, (b * cosines - a * sines).to(pointer.dtype.element_ty), mask=inside[:, None])
    else:
        places = _places(pointer, token, row_stride, head, column, H)
        tl.store(places, x.to(pointer.dtype.element_ty), mask=inside[:, None] & (column < H)[None, :])


@jit
def _behind(pointer, before, row_stride):
    """Where row 0 would be, of rows of which the first one is `before`. None: whole packs, for which it compiles to nothing."""
    if before is not None:
        pointer -= tl.cast(before, tl.int64) * row_stride
    return pointer


@jit
def _rows_from(before, row):
    """How many rows there are from `before` to `row`; 0 where it comes first."""
    if before is not None:
        row = tl.maximum(row - before, 0)
    return row


@jit
def _query_rows(block, first_head, before, BM: tl.constexpr, PACK: tl.constexpr):
    """(the block's first token, the token and the head of each row)"""
    first = block * (BM // PACK)
    if before is not None:
        first += before
    return first, first + tl.arange(0, BM) // PACK, first_head + tl.arange(0, BM) % PACK


@jit
def _first_keys(k, k_row, v, v_row, begin, kv_head, column, H: tl.constexpr, BN: tl.constexpr):
    """The keys of the block at `begin`, and where they and their values lie."""
    key = begin + tl.arange(0, BN)
    return key, _places(k, key, k_row, kv_head, column, H), _places(v, key, v_row, kv_head, column, H)


@jit
def _way_on(step, blocks, TOKENS: tl.constexpr, PACK: tl.constexpr, GROUP: tl.constexpr):
    """Steps to the next query block, in tokens and heads; after the last block of some heads comes the first of the next."""
    tokens, heads = TOKENS, 0
    if GROUP > PACK:
        wraps = step % blocks == blocks - 1
        tokens = tl.where(wraps, TOKENS - blocks * TOKENS, TOKENS)
        heads = tl.where(wraps, PACK, 0)
    return tokens, heads


@jit
def _online_softmax(scores, factor, values, largest, total, result, PRECISION: tl.constexpr):
    """One step of the online softmax: (largest, total, result) with these keys."""
    larger = tl.maximum(largest, tl.max(scores, 1) * factor)
    weights = powers(scores, factor, larger[:, None], PRECISION == "ieee")
    shrink = tl.exp2((largest - larger) * LOG2E)
    total = total * shrink + tl.sum(weights, 1)
    return larger, total, add_dot(result * shrink[:, None], weights.to(values.dtype), values, PRECISION)


@jit
def _store_attention(
    out, out_row, lse, sinks, token, head, column, inside, largest, total, result, queries, H: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Adds the sinks, divides by the total, stores."""
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        larger = tl.maximum(largest, sink)
        shrink = tl.exp2((largest - larger) * LOG2E)
        result *= shrink[:, None]
        total = total * shrink + tl.exp2((sink - larger) * LOG2E)
        largest = larger
    total = tl.where(inside, total, 1.0)
    _store(out, token, out_row, head, column, inside, result / total[:, None], None, None, H, False)
    tl.store(lse + head.to(tl.int64) * queries + token, largest + tl.log2(total) / LOG2E, mask=inside)


@jit
def _forward_kernel(
    q, q_row, k, k_row, v, v_row, out, out_row, lse, starts, prefix, sinks, scale, softcap, T, before, H: tl.constexpr,
    HP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, PAIR: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = PRECISION == "ieee"
    ABREAST: tl.constexpr = 2 * PACK if PAIR else PACK  # query heads a program
    first_head = tl.program_id(0) % (HEADS // ABREAST) * ABREAST
    first, token, head = _query_rows(tl.program_id(0) // (HEADS // ABREAST), first_head, before, BM, PACK)
    q, out, lse = _behind(q, before, q_row), _behind(out, before, out_row), _behind(lse, before, 1)
    kv_head = first_head // GROUP
    inside = token < T
    column = tl.arange(0, HP)
    q_places = _places(q, token, q_row, head, column, H)
    queries = _rows(q_places, inside, column, H, WHOLE)
    start = tl.load(starts + token, mask=inside, other=0)
    if SHARED:
        prompt, behind = prompt_of(prefix, token, inside, T)
    begin, end, common = keys_of(starts, first, T, WINDOW, BM // PACK, BN)
    begin, turn, gap, clear, unclear = with_prompt(starts, prefix, first, begin, end, T, WINDOW, BN, SHARED)
    key, k_places, v_places = _first_keys(k, k_row, v, v_row, begin, kv_head, column, H, BN)
    largest = tl.full([BM], _LEAST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    result = tl.zeros([BM, HP], tl.float32)
    if PAIR:
        queries2 = _rows(q_places + GROUP * H, inside, column, H, WHOLE)
        largest2, total2, result2 = largest, total, result
    for block in tl.range(begin, end - gap, BN, num_stages=STAGES):
        keys = _rows(k_places, key < T, column, H, WHOLE)
        values = _rows(v_places, key < T, column, H, WHOLE)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores, factor, _ = capped(scores, scale, softcap, HAS_SOFTCAP, EXACT)
        if PAIR:
            keys2 = _rows(k_places + H, key < T, column, H, WHOLE)
            values2 = _rows(v_places + H, key < T, column, H, WHOLE)
            scores2 = tl.dot(queries2, tl.trans(keys2), input_precision=PRECISION)
            scores2, _, _ = capped(scores2, scale, softcap, HAS_SOFTCAP, EXACT)
        first_key, masked = key_block(block, first, common, turn, gap, clear, unclear, BN, SHARED)
        if masked:
            place = tl.arange(0, BN)  # from first_key on; without a mask there is nothing to advance
            seen = seen_keys((token - first_key)[:, None], place[None, :], (start - first_key)[:, None], WINDOW)
            if SHARED:
                seen |= seen_before(
                    token[:, None], first_key + place[None, :], start[:, None], prompt[:, None], behind[:, None], WINDOW
                )
            scores = tl.where(seen, scores, float("-inf"))
            if PAIR:
                scores2 = tl.where(seen, scores2, float("-inf"))
        largest, total, result = _online_softmax(scores, factor, values, largest, total, result, PRECISION)
        if PAIR:
            largest2, total2, result2 = _online_softmax(scores2, factor, values2, largest2, total2, result2, PRECISION)
        key, k_places, v_places = next_keys(key, k_places, k_row, v_places, v_row, block, turn, gap, BN, SHARED)
    there = _rows_from(before, T)
    _store_attention(out, out_row, lse, sinks, token, head, column, inside, largest, total, result, there, H, HAS_SINKS)
    if PAIR:
        head2 = head + GROUP
        _store_attention(out, out_row, lse, sinks, token, head2, column, inside, largest2, total2, result2, there, H, HAS_SINKS)


@jit
def _dq_kernel(
    dout, dout_row, q, q_row, k, k_row, v, v_row, out, out_row, lse, norms, starts, prefix, dq, dq_row, cos, sin, scale,
    softcap, T, before, H: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, UNROTATE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    EXACT: tl.constexpr = PRECISION == "ieee"
    first_head = tl.program_id(0) % (HEADS // PACK) * PACK
    first, token, head = _query_rows(tl.program_id(0) // (HEADS // PACK), first_head, before, BM, PACK)
    q, dout, out = _behind(q, before, q_row), _behind(dout, before, dout_row), _behind(out, before, out_row)
    dq, norms, lse = _behind(dq, before, dq_row), _behind(norms, before, 2 * HEADS), _behind(lse, before, 1)
    kv_head = first_head // GROUP
    inside = token < T
    column = tl.arange(0, HP)
    queries = _rows(_places(q, token, q_row, head, column, H), inside, column, H, WHOLE)
    douts = _rows(_places(dout, token, dout_row, head, column, H), inside, column, H, WHOLE)
    outs = _rows(_places(out, token, out_row, head, column, H), inside, column, H, WHOLE)
    deltas = tl.sum(douts.to(tl.float32) * outs.to(tl.float32), 1)
    norm = as_power(tl.load(lse + head.to(tl.int64) * _rows_from(before, T) + token, mask=inside, other=0.0), EXACT)
    place = norms + (token.to(tl.int64) * HEADS + head) * 2
    tl.store(place, norm, mask=inside)
    tl.store(place + 1, deltas, mask=inside)
    start = tl.load(starts + token, mask=inside, other=0)
    if SHARED:
        prompt, behind = prompt_of(prefix, token, inside, T)
    begin, end, common = keys_of(starts, first, T, WINDOW, BM // PACK, BN)
    begin, turn, gap, clear, unclear = with_prompt(starts, prefix, first, begin, end, T, WINDOW, BN, SHARED)
    key, k_places, v_places = _first_keys(k, k_row, v, v_row, begin, kv_head, column, H, BN)
    result = tl.zeros([BM, HP], tl.float32)
    for block in tl.range(begin, end - gap, BN, num_stages=STAGES):
        keys = _rows(k_places, key < T, column, H, WHOLE)
        values = _rows(v_places, key < T, column, H, WHOLE)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        dweights = tl.dot(douts, tl.trans(values), input_precision=PRECISION)
        scores, factor, slope = capped(scores, scale, softcap, HAS_SOFTCAP, EXACT)
        weights = weights_by(scores, factor, norm[:, None], EXACT)
        _, masked = key_block(block, first, common, turn, gap, clear, unclear, BN, SHARED)
        if masked:
            seen = seen_keys(token[:, None], key[None, :], start[:, None], WINDOW)
            if SHARED:
                seen |= seen_before(token[:, None], key[None, :], start[:, None], prompt[:, None], behind[:, None], WINDOW)
            weights = tl.where(seen, weights, 0.0)
        dscores = weights * (dweights - deltas[:, None]) * slope
        result = add_dot(result, dscores.to(keys.dtype), keys, PRECISION)
        key, k_places, v_places = next_keys(key, k_places, k_row, v_places, v_row, block, turn, gap, BN, SHARED)
    _store(dq, token, dq_row, head, column, inside, result * scale, cos, sin, H, UNROTATE)


@jit
def _dkdv_kernel(
    dout, dout_row, q, q_row, k, k_row, v, v_row, norms, starts, ends, prefix, dk, dk_row, dv, dv_row, cos, sin, scale,
    softcap, T, before, H: tl.constexpr, HP: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, UNROTATE: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Scores are transposed, [keys, queries], so both products take their left operand as it is. One loop covers the query
    blocks of PACK heads of the group, then of the next PACK."""
    EXACT: tl.constexpr = PRECISION == "ieee"
    TOKENS: tl.constexpr = BM // PACK
    kv_head = tl.program_id(0) % (HEADS // GROUP)
    first_key = tl.program_id(0) // (HEADS // GROUP) * BN
    key = first_key + tl.arange(0, BN)
    there = key < T
    column = tl.arange(0, HP)
    keys = _rows(_places(k, key, k_row, kv_head, column, H), there, column, H, WHOLE)
    values = _rows(_places(v, key, v_row, kv_head, column, H), there, column, H, WHOLE)
    end = tl.load(ends + key, mask=there, other=0)
    last = last_row(ends, end, first_key, T, WINDOW, BN, SHARED)
    begin = _rows_from(before, first_key) // TOKENS
    blocks = tl.cdiv(_rows_from(before, last), TOKENS) - begin
    _, token, head = _query_rows(begin, kv_head * GROUP, before, BM, PACK)
    q, dout = _behind(q, before, q_row), _behind(dout, before, dout_row)
    norms = _behind(norms, before, HEADS)
    q_places = _places(q, token, q_row, head, column, H)
    dout_places = _places(dout, token, dout_row, head, column, H)
    norm_places = norms + token.to(tl.int64) * HEADS + head
    key_sums = tl.zeros([BN, HP], tl.float32)
    value_sums = tl.zeros([BN, HP], tl.float32)
    for step in tl.range(0, GROUP // PACK * blocks, num_stages=STAGES):
        inside = token < T
        queries = _rows(q_places, inside, column, H, WHOLE)
        douts = _rows(dout_places, inside, column, H, WHOLE)
        if WHOLE:
            pair = tl.load(norm_places)
        else:
            pair = tl.load(norm_places, mask=inside, other=0)
        norm = pair.to(tl.int32).to(tl.float32, bitcast=True)
        deltas = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
        dweights = tl.dot(values, tl.trans(douts), input_precision=PRECISION)
        scores, factor, slope = capped(scores, scale, softcap, HAS_SOFTCAP, EXACT)
        weights = weights_by(scores, factor, norm[None, :], EXACT)
        seen = (key[:, None] <= token[None, :]) & (token[None, :] < end[:, None])
        if WINDOW > 0:
            seen &= away_by(token, key, starts, prefix, inside, T, SHARED) < WINDOW
        weights = tl.where(seen, weights, 0.0)
        value_sums = add_dot(value_sums, weights.to(douts.dtype), douts, PRECISION)
        dscores = weights * (dweights - deltas[None, :]) * slope
        key_sums = add_dot(key_sums, dscores.to(queries.dtype), queries, PRECISION)
        tokens, heads = _way_on(step, blocks, TOKENS, PACK, GROUP)
        token += tokens
        q_places += tokens * q_row.to(tl.int64) + heads * H  # back to a long document's beginning may be 2^31 values and more
        dout_places += tokens * dout_row.to(tl.int64) + heads * H
        norm_places += tokens * HEADS + heads
    _store(dk, key, dk_row, kv_head, column, there, key_sums * scale, cos, sin, H, UNROTATE)
    _store(dv, key, dv_row, kv_head, column, there, value_sums, cos, sin, H, False)


# ---- the backend --------------------------------------------------------------------------------------------


class Short:
    title: ClassVar[str] = "Pronghorn's kernel for short documents"

    @staticmethod
    def _options(q_TNH: Tensor, k_TKH: Tensor, packed: Packed) -> dict[str, Any]:
        _, heads, width = q_TNH.shape
        if any(x.stride()[1:] != (width, 1) for x in (q_TNH, k_TKH)):
            raise ValueError(f"heads must be adjacent in a row; strides are {q_TNH.stride()} and {k_TKH.stride()}")
        return {
            "H": width, "HP": _padded(width), "HEADS": heads, "GROUP": heads // k_TKH.shape[1],
            "WINDOW": packed.window or 0, "HAS_SOFTCAP": packed.softcap is not None,
            "PRECISION": "ieee" if q_TNH.dtype == torch.float32 else None, "SHARED": packed.prefix_2T is not None,
        }  # fmt: skip

    @staticmethod
    def forward(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, packed: Packed, out: Tensor | None) -> tuple[Tensor, Tensor]:
        T, (tokens, heads, width) = len(k_TKH), q_TNH.shape
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device) if out is None else out
        lse_NT = torch.empty(heads, tokens, dtype=torch.float32, device=q_TNH.device)
        options = Short._options(q_TNH, k_TKH, packed)
        tiles = config_for(width, q_TNH.dtype, chip_of(q_TNH.device)).forward
        pack, pair = tiles.pack(options["GROUP"]), tiles.pairs(options["GROUP"], k_TKH.shape[1])
        _forward_kernel[(heads // (2 * pack if pair else pack) * triton.cdiv(tokens, tiles.rows // pack),)](
            q_TNH, q_TNH.stride(0), k_TKH, k_TKH.stride(0), v_TKH, v_TKH.stride(0), out_TNH, out_TNH.stride(0), lse_NT,
            packed.spans_of(T)[0], packed.prefix_2T, packed.sinks_N, packed.scale, packed.softcap or 1.0, T,
            packed.before or None, **options, **tiles.options(T, tokens, pack, width), HAS_SINKS=packed.sinks_N is not None,
            PAIR=pair, num_warps=tiles.warps,
        )  # fmt: skip
        return out_TNH, lse_NT

    @staticmethod
    def backward(
        dout_TNH: Tensor, done: Computed, packed: Packed, grads: Parts | None, rotated: tuple[Tensor, Tensor] | None = None
    ) -> Grads:
        """`rotated`: RoPE's cos and sin, [T, H / 2]; dq and dk are then the gradients before RoPE."""
        q_TNH, k_TKH, v_TKH, out_TNH, lse_NT = done
        T, (tokens, heads, width) = len(k_TKH), q_TNH.shape
        dq, dk, dv = grads or done.empty_grads()
        norms_TN2 = torch.empty(tokens, heads, 2, dtype=torch.float32, device=lse_NT.device)  # lse as a power, and delta
        starts_T, ends_T = packed.spans_of(T)
        options = Short._options(q_TNH, k_TKH, packed)
        options["UNROTATE"] = rotated is not None
        cos, sin = rotated or (None, None)
        config, softcap = config_for(width, q_TNH.dtype, chip_of(q_TNH.device)), packed.softcap or 1.0
        inputs = (dout_TNH, dout_TNH.stride(0), q_TNH, q_TNH.stride(0), k_TKH, k_TKH.stride(0), v_TKH, v_TKH.stride(0))
        tiles = config.dq
        pack = tiles.pack(options["GROUP"])
        _dq_kernel[(heads // pack * triton.cdiv(tokens, tiles.rows // pack),)](
            *inputs, out_TNH, out_TNH.stride(0), lse_NT, norms_TN2, starts_T, packed.prefix_2T, dq, dq.stride(0), cos,
            sin, packed.scale, softcap, T, packed.before or None, **options, **tiles.options(T, tokens, pack, width),
            num_warps=tiles.warps,
        )  # fmt: skip
        tiles = config.dkdv
        pack = tiles.pack(options["GROUP"])
        _dkdv_kernel[(k_TKH.shape[1] * triton.cdiv(T, tiles.keys),)](
            *inputs, norms_TN2.view(torch.int64), starts_T, ends_T, packed.prefix_2T, dk, dk.stride(0), dv, dv.stride(0), cos,
            sin, packed.scale, softcap, T, packed.before or None, **options, **tiles.options(T, tokens, pack, width),
            num_warps=tiles.warps,
        )  # fmt: skip
        return dq, dk, dv, sink_gradients(dout_TNH, out_TNH, lse_NT, packed.sinks_N)

    @staticmethod
    def unrotates(head_width: int, half: int) -> bool:
        """Whether `backward` can undo RoPE: it rotates whole heads by halves, and a head fills a tile."""
        return 2 * half == head_width == _padded(head_width)
