"""Which keys a tile of attention_short.py reads, and which of them each row sees.

A tile of query rows is a slice of the pack. Its loop goes through the key blocks from its first token's document on; with
shared prefixes (SHARED) through two ranges of blocks: that token's prompt, and from its own segment on. Prompts of later tokens
of the tile are the same one, or in the second range. Blocks between the two, of which no row sees anything, are left out, so
sums keep their order and bits. Of 8 answers of 512 tokens to a prompt of 256, tiles of 16 tokens read 4,296 blocks of 32 keys
instead of 18,632 (computed).
"""

from __future__ import annotations

from pronghorn.kernels.runtime.dispatch import jit, tl


@jit
def keys_of(starts, first, T, WINDOW: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr):
    """The range of key blocks that TOKENS tokens starting at the first one see; and the first key from which all of them see
    every key before the first token. Of shared prefixes, those of the first token's own segment and behind."""
    begin = tl.load(starts + first)
    end = tl.minimum(first + TOKENS, T)
    common = tl.load(starts + end - 1)
    if WINDOW > 0:
        begin = tl.maximum(begin, first - WINDOW + 1)
        common = tl.maximum(common, end - WINDOW)
    return begin // BN * BN, end, common


@jit
def with_prompt(starts, prefix, first, begin, end, T, WINDOW: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr):
    """(begin, turn, gap, clear, behind): the first key block when the first token's prompt is read, too; the end of its blocks;
    how many keys are left out there; from which key to which all tokens see all of the prompt."""
    turn, gap, clear, behind = 0, 0, 0, 0
    if SHARED:
        start, prompt, behind = tl.load(starts + first), tl.load(prefix + first), tl.load(prefix + T + first)
        one = tl.load(starts + end - 1) == start  # segment; the positions of another begin behind the prompt again
        clear = tl.where(one, prompt, behind)
        if WINDOW > 0:
            clear = tl.maximum(clear, end - start + behind - WINDOW)
            prompt = tl.maximum(prompt, tl.where(one, first - start, 0) + behind - WINDOW + 1)
        reads = prompt < behind
        turn = tl.where(reads, tl.cdiv(behind, BN) * BN, 0)
        gap = tl.where(reads, tl.maximum(begin - turn, 0), 0)
        begin = tl.where(reads, prompt // BN * BN, begin)
    return begin, turn, gap, clear, behind


@jit
def next_keys(key, k_places, k_row, v_places, v_row, block, turn, gap, BN: tl.constexpr, SHARED: tl.constexpr):
    """Those of the block behind this one."""
    keys, rows = BN, BN
    if SHARED:
        keys = BN + tl.where(block + BN == turn, gap, 0)
        rows = keys.to(tl.int64)  # a gap may be 2^31 values and more
    return key + keys, k_places + rows * k_row, v_places + rows * v_row


@jit
def key_block(block, first, common, turn, gap, clear, behind, BN: tl.constexpr, SHARED: tl.constexpr):
    """(first key of the loop's block, whether some token does not see all of its keys)"""
    key, masked = block, block < common
    if SHARED:
        key += tl.where(block < turn, 0, gap)
        masked = (key < common) & ((key < clear) | (key + BN > behind))
    return key, masked | (key + BN > first + 1)


@jit
def seen_keys(row, column, start, WINDOW: tl.constexpr):
    """The mask of keys (columns) that a query (row) sees; `start`: first token of the query's document."""
    seen = (column <= row) & (column >= start)
    if WINDOW > 0:
        seen &= row - column < WINDOW
    return seen


@jit
def prompt_of(prefix, token, inside, T):
    """(first row of each token's prompt, row behind its last)"""
    return tl.load(prefix + token, mask=inside, other=0), tl.load(prefix + T + token, mask=inside, other=0)


@jit
def seen_before(row, column, start, first, behind, WINDOW: tl.constexpr):
    """The mask of keys in a query's prompt; behind which the query's segment begins, wherever it lies."""
    seen = (column >= first) & (column < behind)
    if WINDOW > 0:
        seen &= row - start + behind - column < WINDOW
    return seen


@jit
def last_row(ends, end, first_key, T, WINDOW: tl.constexpr, BN: tl.constexpr, SHARED: tl.constexpr):
    """The row behind the last one that sees any of these keys; `end`: the same of each."""
    if SHARED:  # a prompt is seen by rows behind those that see the answer after it
        return tl.max(end)
    last = tl.load(ends + tl.minimum(first_key + BN, T) - 1)
    if WINDOW > 0:
        last = tl.minimum(last, first_key + BN - 1 + WINDOW)
    return last


@jit
def away_by(token, key, starts, prefix, inside, T, SHARED: tl.constexpr):
    """[keys, queries]: how many positions lie between them."""
    away = token[None, :] - key[:, None]
    if SHARED:
        start = tl.load(starts + token, mask=inside, other=0)
        behind = tl.load(prefix + T + token, mask=inside, other=0)
        away -= tl.where(key[:, None] < start[None, :], (start - behind)[None, :], 0)
    return away
