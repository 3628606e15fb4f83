"""Draws a token of each row from its logits, in two kernels that read the logits once.

B = rows, V = vocabulary, X = blocks of BLOCK tokens. For a row with temperature t (0: the likeliest token), x = logit / t:

    blocks      m_X = max x,  l_X = sum exp(x - m_X),  the place of the maximum                    program = row and block
    choice      the token at which the mass so far, sum exp(x - m) in the order of the vocabulary,  program = row
                exceeds u times all of it: first the block, then the token in it
                log_prob = x - m - log l

A sum over the vocabulary is thus one of X sums of BLOCK terms, so that float32 is enough, and a block of likely tokens is read
twice. u is splitmix64 (Steele, Lea and Flood 2014) of the row's key and the token's place in its answer, as in
generation/sampling.py: it depends on no other row, and the token is the one that a CPU draws, but for roundings. Logits may be
scaled and soft-capped on the way, as a model's head says. truncated_draw.py draws among fewer tokens.
"""

from __future__ import annotations

from typing import NamedTuple, Self

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
def _at_temperature(x, temperature):
    return x.to(tl.float32) / tl.where(temperature == 0, 1.0, temperature)


@jit
def _scaled(logits, scale, softcap, temperature, SOFTCAP: tl.constexpr):
    x = logits.to(tl.float32) * scale
    if SOFTCAP:
        power = tl.exp(-2.0 * tl.abs(x) / softcap)
        x = softcap * tl.where(x < 0, -1.0, 1.0) * (1.0 - power) / (1.0 + power)
    return _at_temperature(x, temperature)


@jit
def _blocks_kernel(
    logits, row_stride, temperatures, m_out, l_out, at_out, low_out, V, X, scale, softcap, BLOCK: tl.constexpr,
    SOFTCAP: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < V, other=0.0)
    x = _scaled(raw, scale, softcap, tl.load(temperatures + row), SOFTCAP)
    x = tl.where(token < V, x, _LEAST)
    m = tl.maximum(tl.max(x, 0), _LEAST)  # a block of impossible tokens has a mass of 0
    tl.store(m_out + row * X + block, m)
    tl.store(l_out + row * X + block, tl.sum(tl.where(token < V, tl.exp(x - m), 0.0), 0))
    tl.store(at_out + row * X + block, tl.min(tl.where(x == m, token, 2147483647), 0))
    if LOW:
        tl.store(low_out + row * X + block, tl.min(tl.where(x > _LEAST, x, -_LEAST), 0))


@jit
def _blocks_of(m_in, l_in, at_in, row, X, XP: tl.constexpr):
    """(mass of each block, the row's largest x, its mass, its likeliest token)"""
    block = tl.arange(0, XP)
    m = tl.load(m_in + row * X + block, mask=block < X, other=_LEAST)
    at = tl.load(at_in + row * X + block, mask=block < X, other=2147483647)
    highest = tl.max(m, 0)
    mass = tl.load(l_in + row * X + block, mask=block < X, other=0.0) * tl.exp(m - highest)
    return mass, highest, tl.sum(mass, 0), tl.min(tl.where(m == highest, at, 2147483647), 0)


@jit
def _token_of(
    row_logits, temperature, keys, places, row, mass, highest, least, V, scale, softcap, BLOCK: tl.constexpr,
    XP: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The token drawn among those with x >= least, of which blocks have this mass. What is before a token is float64, so that
    it does not depend on how many blocks there are."""
    seed = _mixed(tl.load(keys + row).to(tl.uint64, bitcast=True) ^ tl.load(places + row).to(tl.uint64, bitcast=True))
    mass = mass.to(tl.float64)
    goal = (seed >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16 * tl.sum(mass, 0)
    block, place = tl.arange(0, XP), tl.arange(0, BLOCK)
    chosen = tl.sum((tl.cumsum(mass, 0) <= goal).to(tl.int32), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(mass > 0, block, 0), 0))  # rounding must not lead beyond the last one
    goal -= tl.sum(tl.where(block < chosen, mass, 0.0), 0)
    token = chosen * BLOCK + place
    raw = tl.load(row_logits + token, mask=token < V, other=0.0)
    x = _scaled(raw, scale, softcap, temperature, SOFTCAP)
    weight = tl.where((token < V) & (x >= least), tl.exp(x - highest), 0.0)
    found = tl.sum((tl.cumsum(weight, 0).to(tl.float64) <= goal).to(tl.int32), 0)
    return chosen * BLOCK + tl.minimum(found, tl.max(tl.where(weight > 0, place, 0), 0))


@jit
def _choice_kernel(
    logits, row_stride, temperatures, keys, places, m_in, l_in, at_in, tokens, log_probs, V, X, scale, softcap,
    BLOCK: tl.constexpr, XP: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    logits += row.to(tl.int64) * row_stride
    mass, highest, total, likeliest = _blocks_of(m_in, l_in, at_in, row, X, XP)
    drawn = _token_of(
        logits, temperature, keys, places, row, mass, highest, float("-inf"), V, scale, softcap, BLOCK, XP, SOFTCAP
    )
    picked = tl.where(temperature == 0, likeliest, drawn)
    tl.store(tokens + row, picked.to(tl.int64))
    x = _scaled(tl.load(logits + picked), scale, softcap, temperature, SOFTCAP)
    tl.store(log_probs + row, x - highest - tl.log(total))


class Blocks(NamedTuple):
    """What the first kernel finds in each row's blocks."""

    m_BX: Tensor
    l_BX: Tensor
    at_BX: Tensor
    low_BX: Tensor  # the least finite x, where it is wanted

    @classmethod
    def of(cls, logits_BV: Tensor, temperature_B: Tensor, scale: float = 1.0, softcap: float = 0.0, low: bool = False) -> Self:
        B, V = logits_BV.shape
        X = -(-V // BLOCK)
        m_BX, l_BX, low_BX = (torch.empty(B, X, dtype=torch.float32, device=logits_BV.device) for _ in range(3))
        at_BX = torch.empty(B, X, dtype=torch.int32, device=logits_BV.device)
        _blocks_kernel[(B, X)](
            logits_BV, logits_BV.stride(0), temperature_B, m_BX, l_BX, at_BX, low_BX, V, X, scale, softcap or 1.0, BLOCK=BLOCK,
            SOFTCAP=softcap != 0.0, LOW=low, num_warps=8,
        )  # fmt: skip
        return cls(m_BX, l_BX, at_BX, low_BX)

    @property
    def width(self) -> int:
        return self.m_BX.shape[1]

    @property
    def padded(self) -> int:
        return max(16, int(triton.next_power_of_2(self.m_BX.shape[1])))


def draw_launched(
    logits_BV: Tensor, temperature_B: Tensor, key_B: Tensor, place_B: Tensor, *, scale: float = 1.0, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(token_B, its log-probability among all tokens at its temperature; at 1 where that is 0)"""
    B, V = logits_BV.shape
    blocks = Blocks.of(logits_BV, temperature_B, scale, softcap)
    token_B = torch.empty(B, dtype=torch.int64, device=logits_BV.device)
    log_prob_B = torch.empty(B, dtype=torch.float32, device=logits_BV.device)
    _choice_kernel[(B,)](
        logits_BV, logits_BV.stride(0), temperature_B, key_B, place_B, *blocks[:3], token_B, log_prob_B, V, blocks.width, scale,
        softcap or 1.0, BLOCK=BLOCK, XP=blocks.padded, SOFTCAP=softcap != 0.0, num_warps=8,
    )  # fmt: skip
    return token_B, log_prob_B
