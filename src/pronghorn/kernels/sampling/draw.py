"""Draws a token of each row from its logits, in two kernels that read the logits once.

B = rows, V = vocabulary, X = blocks of BLOCK tokens. For a row with temperature t (0: the likeliest token), x = logit / t:

    blocks      m_X = max x,  l_X = sum exp(x - m_X),  the place of the maximum                    program = row and block
    choice      a block with probability exp(m_X - m) l_X / l, by one uniform number;               program = row
                in it a token with probability exp(x - m) over the block's sum, by another
                log_prob = x - m - log l

A sum over the vocabulary is thus one of X sums of BLOCK terms, so that float32 is enough, and a block of likely tokens is read
twice. The two numbers are splitmix64 (Steele, Lea and Flood 2014) of the row's key and the token's place in its answer: they
depend on no other row. Logits may be scaled and soft-capped on the way, as a model's head says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton

BLOCK = 4096  # tokens: 32 blocks of a vocabulary of 128 thousand
# Constants of splitmix64
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LEAST = tl.constexpr(-3e38)


@jit
def _mixed(value):
    """splitmix64's output function of an uint64."""
    value = value + 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@jit
def _unit(value):
    """A float32 in [0, 1) from the highest 24 bits."""
    return (value >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@jit
def _scaled(logits, scale, softcap, temperature, SOFTCAP: tl.constexpr):
    x = logits.to(tl.float32) * scale
    if SOFTCAP:
        power = tl.exp(-2.0 * tl.abs(x) / softcap)
        x = softcap * tl.where(x < 0, -1.0, 1.0) * (1.0 - power) / (1.0 + power)
    return x / tl.where(temperature == 0, 1.0, temperature)


@jit
def _blocks_kernel(
    logits, row_stride, temperatures, m_out, l_out, at_out, V, X, scale, softcap, BLOCK: tl.constexpr, SOFTCAP: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < V, other=0.0)
    x = _scaled(raw, scale, softcap, tl.load(temperatures + row), SOFTCAP)
    x = tl.where(token < V, x, _LEAST)
    m = tl.max(x, 0)
    tl.store(m_out + row * X + block, m)
    tl.store(l_out + row * X + block, tl.sum(tl.where(token < V, tl.exp(x - m), 0.0), 0))
    tl.store(at_out + row * X + block, tl.min(tl.where(x == m, token, 2147483647), 0))


@jit
def _choice_kernel(
    logits, row_stride, temperatures, keys, places, m_in, l_in, at_in, tokens, log_probs, V, X, scale, softcap,
    BLOCK: tl.constexpr, XP: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    block = tl.arange(0, XP)
    m = tl.load(m_in + row * X + block, mask=block < X, other=_LEAST)
    at = tl.load(at_in + row * X + block, mask=block < X, other=2147483647)
    highest = tl.max(m, 0)
    mass = tl.load(l_in + row * X + block, mask=block < X, other=0.0) * tl.exp(m - highest)
    total = tl.sum(mass, 0)
    seed = _mixed(tl.load(keys + row).to(tl.uint64, bitcast=True) ^ tl.load(places + row).to(tl.uint64, bitcast=True))
    until = tl.cumsum(mass, 0)
    chosen = tl.sum((until <= _unit(seed) * total).to(tl.int32), 0)
    last = tl.max(tl.where(mass > 0, block, 0), 0)  # rounding must not lead beyond it
    chosen = tl.minimum(chosen, last)
    token = chosen * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < V, other=0.0)
    x = _scaled(raw, scale, softcap, temperature, SOFTCAP)
    weight = tl.where(token < V, tl.exp(x - tl.max(tl.where(token < V, x, _LEAST), 0)), 0.0)
    inside = tl.cumsum(weight, 0)
    found = tl.sum((inside <= _unit(_mixed(seed)) * tl.sum(weight, 0)).to(tl.int32), 0)
    found = tl.minimum(found, tl.max(tl.where(weight > 0, tl.arange(0, BLOCK), 0), 0))
    likeliest = tl.min(tl.where(m == highest, at, 2147483647), 0)
    picked = tl.where(temperature == 0, likeliest, chosen * BLOCK + found)
    raw = tl.load(logits + row.to(tl.int64) * row_stride + picked)
    tl.store(tokens + row, picked.to(tl.int64))
    tl.store(log_probs + row, _scaled(raw, scale, softcap, temperature, SOFTCAP) - highest - tl.log(total))


def draw_launched(
    logits_BV: Tensor, temperature_B: Tensor, key_B: Tensor, place_B: Tensor, *, scale: float = 1.0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(token_B, its log-probability among all tokens at its temperature; at 1 where that is 0)"""
    B, V = logits_BV.shape
    X = -(-V // BLOCK)
    m_BX, l_BX = (torch.empty(B, X, dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    at_BX = torch.empty(B, X, dtype=torch.int32, device=logits_BV.device)
    token_B = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    log_prob_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    given = {"BLOCK": BLOCK, "SOFTCAP": softcap != 0.0, "num_warps": 8}
    sizes = (V, X, scale, softcap or 1.0)
    _blocks_kernel[(B, X)](logits_BV, logits_BV.stride(0), temperature_B, m_BX, l_BX, at_BX, *sizes, **given)
    _choice_kernel[(B,)](
        logits_BV, logits_BV.stride(0), temperature_B, key_B, place_B, m_BX, l_BX, at_BX, token_B, log_prob_B, *sizes,
        XP=max(16, int(triton.next_power_of_2(X))), **given,
    )  # fmt: skip
    return token_B, log_prob_B
