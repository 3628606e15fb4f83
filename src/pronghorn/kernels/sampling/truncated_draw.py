"""Draws a token of each row from what top_k, top_p and min_p leave of its logits, without a sort.

B = rows, V = vocabulary, K = thresholds of a pass. generation/sampling.py has the rules and their definition (`truncated`). All
of them keep the tokens with x = logit / t of at least a threshold, so a row needs one number:

    top_k    the least x of a token above which fewer than k tokens lie
    top_p    the least x of a token above which less than p of the mass lies, sum exp(x - m), of what top_k keeps
    min_p    m + log(min_p)

Both searches are one function: a program, which is a row, goes through its logits, finds what lies above each of K thresholds
between two bounds, and takes the two neighbours between which the limit is passed as new bounds, until all tokens between them
have one logit: it is the threshold, equals included. 128,256 normal logits take 4 passes for k = 50 and 7 for p = 0.9; a row
that has neither rule takes none. The bound is the time to read 4 B V bytes a pass (draw.py has the first one). Nothing is
read back, so a CUDA graph can capture it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl
from pronghorn.kernels.sampling import draw
from pronghorn.kernels.sampling.draw import _blocks_of, _scaled, _token_of

SEARCH = 1024  # tokens at a time: 4 of a thread, with 8 sums each (159 registers on 9.0)
THRESHOLDS = 8  # 16 take a quarter fewer passes, of twice the instructions
_MOST = tl.constexpr(3e38)


@jit
def _least_kept(
    row, temperature, V, scale, softcap, low, highest, limit, SOFTCAP: tl.constexpr, MASS: tl.constexpr, BLOCK: tl.constexpr,
    K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The least x, of those from `low` on, above which fewer than `limit` tokens lie, or less than this share of the mass."""
    under, upper = low - tl.maximum(1.0, tl.abs(low) * 1e-6), highest
    least, most, passes = low, highest, 0  # of the tokens between the bounds
    while (least < most) & (passes < 64):
        threshold = under + (upper - under) * ((tl.arange(0, K) + 1).to(tl.float32) / (K + 1))
        above = tl.zeros([BLOCK, K], tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        smallest = tl.full([BLOCK], _MOST, tl.float32)
        largest = tl.full([BLOCK], -_MOST, tl.float32)
        for first in tl.range(0, V, BLOCK, num_stages=STAGES):
            token = first + tl.arange(0, BLOCK)
            x = _scaled(tl.load(row + token, mask=token < V, other=0.0), scale, softcap, temperature, SOFTCAP)
            x = tl.where((token < V) & (x >= low), x, float("-inf"))
            weight = tl.exp(x - highest) if MASS else tl.full([BLOCK], 1.0, tl.float32)
            above += tl.where(x[:, None] > threshold[None, :], weight[:, None], 0.0)
            total += weight
            between = (x > under) & (x <= upper)
            smallest = tl.minimum(smallest, tl.where(between, x, _MOST))
            largest = tl.maximum(largest, tl.where(between, x, -_MOST))
        few = tl.sum(above, 0) < (limit * tl.sum(total, 0) if MASS else limit)
        least, most, passes = tl.min(smallest, 0), tl.max(largest, 0), passes + 1
        under, upper = tl.max(tl.where(few, under, threshold), 0), tl.min(tl.where(few, threshold, upper), 0)
    return tl.where(least == most, least, upper)  # none between them: fewer tokens than `limit`


@jit
def _truncated_kernel(
    logits, row_stride, temperatures, top_ks, top_ps, min_ps, keys, places, m_in, l_in, at_in, low_in, tokens, log_probs,
    kept_log_probs, leasts, V, X, scale, softcap, BLOCK: tl.constexpr, XP: tl.constexpr, SEARCH: tl.constexpr,
    K: tl.constexpr, STAGES: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    logits += row.to(tl.int64) * row_stride
    block = tl.arange(0, XP)
    _, highest, total, likeliest = _blocks_of(m_in, l_in, at_in, row, X, XP)
    least = tl.min(tl.load(low_in + row * X + block, mask=block < X, other=_MOST), 0)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    if (top_k > 0) & (top_k < V) & (temperature != 0):
        limit = top_k.to(tl.float32)
        least = _least_kept(
            logits, temperature, V, scale, softcap, least, highest, limit, SOFTCAP, False, SEARCH, K, STAGES
        )  # fmt: skip
    if (top_p < 1) & (temperature != 0):
        least = _least_kept(
            logits, temperature, V, scale, softcap, least, highest, top_p, SOFTCAP, True, SEARCH, K, STAGES
        )  # fmt: skip
    if min_p > 0:
        least = tl.minimum(tl.maximum(least, highest + tl.log(min_p)), highest)
    kept = tl.zeros([XP], tl.float32)
    for at in tl.range(0, X):
        token = at * BLOCK + tl.arange(0, BLOCK)
        x = _scaled(tl.load(logits + token, mask=token < V, other=0.0), scale, softcap, temperature, SOFTCAP)
        mass = tl.sum(tl.where((token < V) & (x >= least), tl.exp(x - highest), 0.0), 0)
        kept += tl.where(block == at, mass, 0.0)
    drawn = _token_of(logits, temperature, keys, places, row, kept, highest, least, V, scale, softcap, BLOCK, XP, SOFTCAP)
    picked = tl.where(temperature == 0, likeliest, drawn)
    x = _scaled(tl.load(logits + picked), scale, softcap, temperature, SOFTCAP) - highest
    tl.store(tokens + row, picked.to(tl.int64))
    tl.store(log_probs + row, x - tl.log(total))
    tl.store(kept_log_probs + row, x - tl.log(tl.where(temperature == 0, total, tl.sum(kept, 0))))
    tl.store(leasts + row, least)


def truncated_draw_launched(
    logits_BV: Tensor, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor, key_B: Tensor, place_B: Tensor,
    *, scale: float = 1.0, softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(token_B, its log-probability among all tokens, that among those kept, the least logit / temperature that is kept)"""
    B, V = logits_BV.shape
    blocks = draw.Blocks.of(logits_BV, temperature_B, scale, softcap, low=True)
    token_B = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    log_prob_B, kept_B, least_B = (torch.empty(B, dtype=torch.float32, device=logits_BV.device) for _ in range(3))
    _truncated_kernel[(B,)](
        logits_BV, logits_BV.stride(0), temperature_B, top_k_B, top_p_B, min_p_B, key_B, place_B, *blocks, token_B, log_prob_B,
        kept_B, least_B, V, blocks.width, scale, softcap or 1.0, BLOCK=draw.BLOCK, XP=blocks.padded, SEARCH=SEARCH,
        K=THRESHOLDS, STAGES=5, SOFTCAP=softcap != 0.0, num_warps=8,
    )  # fmt: skip
    return token_B, log_prob_B, kept_B, least_B
