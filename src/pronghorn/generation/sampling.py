"""The next token of each row, drawn from its logits.

B = rows, V = vocabulary. Rules apply in transformers' order, each to what the one before left, which is renormalized:

    temperature    logits / t;  0: the likeliest token, and log-probabilities are those at t = 1
    top_k          tokens with a logit of at least the k-th largest;  0: all
    top_p          the likeliest tokens until their mass reaches p, at least one;  1: all
    min_p          tokens at least min_p times as likely as the likeliest;  0: all

Each token needs one uniform number. It is a hash of the row's key (seed, prompt and sample) and the token's place in the
answer, so a draw depends on neither slot nor neighbours nor device. The token is where the cumulative probability, in the
order of the vocabulary, exceeds it; sums are float64, on a GPU those of blocks.

`log_prob` is that of the token in the whole vocabulary at its temperature, which a learner computes too; `kept_log_prob` that
among the tokens that the rules left, from which it was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import use_triton
from pronghorn.kernels.sampling.draw import draw_launched
from pronghorn.kernels.sampling.truncated_draw import truncated_draw_launched

_MASK = (1 << 64) - 1
# Constants of splitmix64 (Steele, Lea and Flood 2014), as signed integers.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


GREEDY = Sampling(temperature=0.0)


class Rules(NamedTuple):
    """Those of each row, on the device."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> Self:
        real = torch.float32
        return cls(
            torch.ones(rows, dtype=real, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.ones(rows, dtype=real, device=device),
            torch.zeros(rows, dtype=real, device=device),
        )

    def set(self, row: int, rule: Sampling) -> None:
        for tensor, value in zip(self, (rule.temperature, rule.top_k, rule.top_p, rule.min_p), strict=True):
            tensor[row] = value

    def of(self, rows_B: Tensor) -> Rules:
        return Rules(*(tensor.index_select(0, rows_B) for tensor in self))


class Drawn(NamedTuple):
    token_B: Tensor
    log_prob_B: Tensor
    kept_log_prob_B: Tensor


def draw(
    logits_BV: Tensor,
    rules: Rules,
    key_B: Tensor,
    place_B: Tensor,
    *,
    truncates: bool,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Drawn:
    """`place_B`: the token's in its answer. `truncates`: whether some row has a rule other than a temperature. The host knows;
    else logits would be read once more, or sorted on a CPU. `scale`, `softcap`: what the model's head does to its logits."""
    if use_triton(logits_BV):
        if truncates:
            return Drawn(*truncated_draw_launched(logits_BV, *rules, key_B, place_B, scale=scale, softcap=softcap)[:3])
        token_B, log_prob_B = draw_launched(logits_BV, rules.temperature_B, key_B, place_B, scale=scale, softcap=softcap)
        return Drawn(token_B, log_prob_B, log_prob_B)
    logits_BV = logits_BV.float() * scale if scale != 1.0 else logits_BV
    if softcap:
        logits_BV = softcap * torch.tanh(logits_BV / softcap)
    return drawn_by(logits_BV, rules, uniforms(key_B, place_B), truncates=truncates)


def drawn_by(logits_BV: Tensor, rules: Rules, uniform_B: Tensor, *, truncates: bool) -> Drawn:
    greedy_B = rules.temperature_B == 0
    logits_BV = logits_BV.float() / torch.where(greedy_B, 1.0, rules.temperature_B)[:, None]
    log_probs_BV = logits_BV.log_softmax(-1)
    if logits_BV.device.type == "cpu" and bool(greedy_B.all()):  # nothing is drawn
        best = log_probs_BV.max(-1)
        return Drawn(best.indices, best.values, best.values)
    kept_BV = truncated(log_probs_BV, rules) if truncates else log_probs_BV
    cumulative_BV = kept_BV.exp().cumsum(-1, dtype=torch.float64)
    drawn_B = torch.searchsorted(cumulative_BV, (uniform_B * cumulative_BV[:, -1])[:, None], right=True)[:, 0]
    drawn_B = drawn_B.clamp(max=logits_BV.shape[1] - 1)
    token_B = torch.where(greedy_B, logits_BV.argmax(-1), drawn_B)
    log_prob_B, kept_B = (x.gather(1, token_B[:, None])[:, 0] for x in (log_probs_BV, kept_BV))
    return Drawn(token_B, log_prob_B, torch.where(greedy_B, log_prob_B, kept_B))


def truncated(log_probs_BV: Tensor, rules: Rules) -> Tensor:
    """Log-probabilities among the tokens that the rules leave; -inf elsewhere."""
    sorted_BV = log_probs_BV.sort(-1, descending=True).values
    size = log_probs_BV.shape[1]
    last_B = torch.where(rules.top_k_B > 0, rules.top_k_B, size).clamp(max=size) - 1
    least_B = sorted_BV.gather(1, last_B[:, None])
    kept_BV = sorted_BV.masked_fill(sorted_BV < least_B, float("-inf")).log_softmax(-1)
    before_BV = kept_BV.exp().cumsum(-1) - kept_BV.exp()  # mass of the likelier ones
    top_p_B = torch.where(rules.top_p_B < 1, rules.top_p_B, float("inf"))  # float32 sums reach 1 before the last token
    inside_BV = (before_BV < top_p_B[:, None]) & (kept_BV > float("-inf"))
    inside_BV[:, 0] = True
    inside_BV &= sorted_BV >= sorted_BV[:, :1] + rules.min_p_B.log()[:, None]
    least_B = sorted_BV.masked_fill(~inside_BV, float("inf")).amin(-1, keepdim=True)
    return log_probs_BV.masked_fill(log_probs_BV < least_B, float("-inf")).log_softmax(-1)


# ---- numbers ---------------------------------------------------------------------------------------------------------------


def key_of(*numbers: int) -> int:
    """One key of several numbers, signed, for a tensor."""
    key = 0
    for number in numbers:
        key = _mixed(key ^ (number & _MASK))
    return _signed(key)


def _mixed(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def uniforms(key_B: Tensor, place_B: Tensor) -> Tensor:
    """A float64 in [0, 1) for each row: splitmix64 of its key and place, as `_mixed`, in int64 that wraps around."""
    value = (key_B ^ place_B) + _signed(_GOLDEN)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    value = value ^ _shifted(value, 31)
    return _shifted(value, 11).double() * 2.0**-53


def _shifted(value: Tensor, bits: int) -> Tensor:
    """To the right, filled with zeros."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
