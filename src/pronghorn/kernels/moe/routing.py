"""Routing: the experts of each token, their weights, and the tokens sorted by expert. Nothing synchronizes with the host.

T = packed tokens, E = experts, K = experts a token, S = T * K slots: slot t * K + k is token t's k-th choice.

    ids_TK       the K largest logits of a token, largest first; of equal ones the lower expert
    weights_TK   fp32; softmax over the K chosen logits (`normalise`), or over all E, taken at the chosen; times `scale`

A softmax over all experts, its K largest divided by their sum (Mixtral, Qwen3-MoE with norm_topk_prob) is the softmax over the
chosen logits (gpt-oss): one formula. Qwen2-MoE and DeepSeek-V2 do not divide; DeepSeek-V2 has a scale. With `bias_E` (ERNIE
4.5) the K largest are those of softmax + bias; the weights are of the logits alone.

`Sigmoid` (DeepSeek-V3, GLM-4.5, dots.llm1, MiniMax-M2): scores are sigmoids of the logits. The choice adds a bias without
gradient to the scores; the weights are the scores alone, divided by their sum or not:

    choice_TE = score_TE + bias_E, of the experts of the `kept` groups whose two largest choices have the largest sum

    order_S      slots sorted by expert, those of an expert in their own order     inverse_TK   where a slot stands in it
    offsets_E1   rows offsets[e] to offsets[e + 1] of the sorted ones are expert e's

A counting sort makes all three: each program counts the experts of its slots, a second kernel computes prefix sums, a third
places each slot. No atomics, so the result is deterministic. NaN logits choose valid experts with NaN weights: the NaN shows
downstream, and nothing reads out of bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pronghorn.kernels.runtime.dispatch import jit, tl, triton, use_triton

SLOTS = 128  # slots per program of the sort, compared pairwise
LOWEST = -3.0e38  # lower bound of a logit; columns that are no experts are below it
_LOWEST = tl.constexpr(LOWEST)


@dataclass(frozen=True, slots=True, eq=False)
class Sigmoid:
    """Sigmoid scores. `bias_E`: added for the choice. `groups`: groups of equal size, of which `kept` are chosen. `tiny`: added
    to the sum of the chosen before the division, as in transformers."""

    bias_E: Tensor | None = None
    groups: int = 1
    kept: int = 1
    tiny: float = 1e-20


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The routing of one layer and batch: int32, weights fp32, all on the device, with sizes that follow from T, E and K."""

    ids_TK: Tensor
    weights_TK: Tensor
    order_S: Tensor
    inverse_TK: Tensor
    offsets_E1: Tensor

    @property
    def counts(self) -> Tensor:
        """Tokens of each expert, [E]."""
        return self.offsets_E1[1:] - self.offsets_E1[:-1]


# ---- plain torch -----------------------------------------------------------------------------------------------------------


def route_reference(
    logits_TE: Tensor, K: int, *, normalise: bool, scale: float = 1.0, sigmoid: Sigmoid | None = None,
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights_TK, ids_TK), in transformers' order: softmax over all, the K largest, divided by their sum."""
    if sigmoid is not None:
        return _sigmoid_reference(logits_TE, K, normalise, scale, sigmoid)
    probabilities_TE = torch.softmax(logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)), dim=-1)
    choice_TE = logits_TE.detach() if bias_E is None else probabilities_TE.detach() + bias_E.to(probabilities_TE.dtype)
    ids_TK = torch.sort(choice_TE.nan_to_num(LOWEST, neginf=LOWEST), dim=-1, descending=True, stable=True)[1][:, :K]
    weights_TK = probabilities_TE.gather(1, ids_TK)
    if normalise:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return weights_TK * scale, ids_TK.int()


def _sigmoid_reference(logits_TE: Tensor, K: int, normalise: bool, scale: float, rule: Sigmoid) -> tuple[Tensor, Tensor]:
    scores_TE = torch.sigmoid(logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32)))
    choice_TE = scores_TE.detach() if rule.bias_E is None else scores_TE.detach() + rule.bias_E.to(scores_TE.dtype)
    choice_TE = choice_TE.nan_to_num(LOWEST, neginf=LOWEST)
    if rule.kept < rule.groups:
        T, E = choice_TE.shape
        grouped_TGX = choice_TE.view(T, rule.groups, E // rule.groups)
        sums_TG = grouped_TGX.topk(2, dim=-1)[0].sum(-1)
        best_TG = torch.sort(sums_TG, dim=-1, descending=True, stable=True)[1][:, : rule.kept]
        chosen_TG = torch.zeros_like(sums_TG, dtype=torch.bool).scatter_(1, best_TG, True)
        choice_TE = grouped_TGX.masked_fill(~chosen_TG[..., None], float("-inf")).view(T, E)
    ids_TK = torch.sort(choice_TE, dim=-1, descending=True, stable=True)[1][:, :K]
    weights_TK = scores_TE.gather(1, ids_TK)
    if normalise:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + rule.tiny)
    return weights_TK * scale, ids_TK.int()


def sort_by_expert_reference(ids_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order_S, inverse_TK, offsets_E1): one stable sort and one bincount."""
    flat = ids_TK.reshape(-1)
    order_S = torch.argsort(flat, stable=True)
    inverse_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(len(flat), device=flat.device))
    offsets_E1 = torch.zeros(E + 1, dtype=torch.int32, device=flat.device)
    offsets_E1[1:] = torch.bincount(flat, minlength=E).cumsum(0)
    return order_S.int(), inverse_S.int().view_as(ids_TK), offsets_E1


def _route_backward_torch(
    dweights_TK: Tensor,
    logits_TE: Tensor,
    weights_TK: Tensor,
    ids_TK: Tensor,
    normalise: bool,
    scale: float,
    rule: Sigmoid | None,
) -> Tensor:
    wide = torch.promote_types(logits_TE.dtype, torch.float32)
    grad_TK, ids = dweights_TK.to(wide) * scale, ids_TK.long()
    if rule is not None:
        scores_TK = torch.sigmoid(logits_TE.to(wide).gather(1, ids))
        if normalise:
            total_T1 = scores_TK.sum(-1, keepdim=True) + rule.tiny
            grad_TK = (grad_TK - (scores_TK / total_T1 * grad_TK).sum(-1, keepdim=True)) / total_T1
        chosen_TK = grad_TK * scores_TK * (1 - scores_TK)
        return torch.zeros_like(logits_TE).scatter_(1, ids, chosen_TK.to(logits_TE.dtype))
    if normalise:
        w_TK = weights_TK.to(wide) / scale
        chosen_TK = w_TK * (grad_TK - (w_TK * grad_TK).sum(-1, keepdim=True))
        return torch.zeros_like(logits_TE).scatter_(1, ids, chosen_TK.to(logits_TE.dtype))
    probabilities_TE = torch.softmax(logits_TE.to(wide), dim=-1)
    grad_TE = torch.zeros_like(probabilities_TE).scatter_(1, ids, grad_TK)
    return (probabilities_TE * (grad_TE - (probabilities_TE * grad_TE).sum(-1, keepdim=True))).to(logits_TE.dtype)


# ---- Triton: choice and weights --------------------------------------------------------------------------------------------


def _route_rows(block: int) -> int:
    """2048 logits a program: 16 a thread with 4 warps."""
    return int(max(1, 2048 // block))


@jit
def _without_lesser_groups(
    choice, expert, E: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, KEPT: tl.constexpr
):
    """choice [ROWS, E_BLOCK], -inf outside the KEPT groups with the largest sum of two largest choices."""
    group = tl.where(expert < E, expert // (E // GROUPS), -1)
    number = tl.arange(0, GROUPS_BLOCK)
    sums = tl.full((ROWS, GROUPS_BLOCK), float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        here = tl.where(group[None, :] == g, choice, float("-inf"))
        first = tl.argmax(here, axis=1, tie_break_left=True)
        rest = tl.where(expert[None, :] == first[:, None], float("-inf"), here)
        both = tl.max(here, axis=1) + tl.max(rest, axis=1)
        sums = tl.where(number[None, :] == g, tl.where(both > _LOWEST, both, _LOWEST)[:, None], sums)
    chosen_group = group[None, :] < 0
    for _ in tl.static_range(KEPT):
        best = tl.argmax(sums, axis=1, tie_break_left=True)
        sums = tl.where(number[None, :] == best[:, None], float("-inf"), sums)
        chosen_group = chosen_group | (group[None, :] == best[:, None])
    return tl.where(chosen_group, choice, float("-inf"))


@jit
def _route_kernel(
    logits, logits_row, bias, weights, ids, T, scale, E: tl.constexpr, K: tl.constexpr, E_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr, ROWS: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, KEPT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, E_BLOCK)
    inside = (row[:, None] < T) & (expert[None, :] < E)
    given = tl.load(logits + row[:, None] * logits_row + expert[None, :], mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        given = 1.0 / (1.0 + tl.exp(-given))
    choice = given
    if BIASED and not SIGMOID:
        power = tl.exp(given - tl.max(given, axis=1)[:, None])
        choice = power / tl.sum(power, axis=1)[:, None]
    if BIASED:
        choice += tl.load(bias + expert, mask=expert < E, other=0.0).to(tl.float32)[None, :]
    left = tl.where(inside, tl.where(choice > _LOWEST, choice, _LOWEST), float("-inf"))  # NaN is not greater than anything
    if KEPT < GROUPS:
        left = _without_lesser_groups(left, expert, E, ROWS, GROUPS, GROUPS_BLOCK, KEPT)
    place = tl.arange(0, K_BLOCK)
    chosen = tl.zeros((ROWS, K_BLOCK), tl.int32)
    value = tl.full((ROWS, K_BLOCK), float("-inf"), tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        is_best = expert[None, :] == best[:, None]
        its = tl.sum(tl.where(is_best, given, 0.0), axis=1)
        left = tl.where(is_best, float("-inf"), left)
        chosen = tl.where(place[None, :] == k, best[:, None], chosen)
        value = tl.where(place[None, :] == k, its[:, None], value)
    if SIGMOID:
        result = tl.where(place[None, :] < K, value, 0.0)
        if NORMALISE:
            result = result / (tl.sum(result, axis=1) + TINY)[:, None]
        result *= scale
    else:
        largest = tl.max(value, axis=1)
        power = tl.exp(value - largest[:, None])
        if NORMALISE:
            total = tl.sum(power, axis=1)
        else:
            total = tl.sum(tl.exp(given - largest[:, None]), axis=1)
        result = power / total[:, None] * scale
    target = row[:, None] * K + place[None, :]
    stored = (row[:, None] < T) & (place[None, :] < K)
    tl.store(weights + target, result, mask=stored)
    tl.store(ids + target, chosen, mask=stored)


@jit
def _route_backward_kernel(
    dweights, logits, logits_row, weights, ids, dlogits, dlogits_row, T, scale, E: tl.constexpr, K: tl.constexpr,
    E_BLOCK: tl.constexpr, ROWS: tl.constexpr, NORMALISE: tl.constexpr, SIGMOID: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, E_BLOCK)
    here = row < T
    inside = here[:, None] & (expert[None, :] < E)
    grad = tl.zeros((ROWS, E_BLOCK), tl.float32)
    weight = tl.zeros((ROWS, E_BLOCK), tl.float32)
    taken = tl.zeros((ROWS, E_BLOCK), tl.float32)
    for k in tl.static_range(K):
        chosen = tl.load(ids + row * K + k, mask=here, other=0)
        is_chosen = expert[None, :] == chosen[:, None]
        grad = tl.where(is_chosen, tl.load(dweights + row * K + k, mask=here, other=0.0).to(tl.float32)[:, None], grad)
        weight = tl.where(is_chosen, tl.load(weights + row * K + k, mask=here, other=0.0)[:, None], weight)
        taken = tl.where(is_chosen, 1.0, taken)
    grad *= scale
    if SIGMOID:
        given = tl.load(logits + row[:, None] * logits_row + expert[None, :], mask=inside, other=0.0).to(tl.float32)
        score = tl.where(taken > 0, 1.0 / (1.0 + tl.exp(-given)), 0.0)
        if NORMALISE:
            total = tl.sum(score, axis=1) + TINY
            grad = (grad - (tl.sum(score * grad, axis=1) / total)[:, None]) / total[:, None]
        result = grad * score * (1.0 - score)
    elif NORMALISE:
        weight /= scale
        result = weight * (grad - tl.sum(weight * grad, axis=1)[:, None])
    else:
        given = tl.load(logits + row[:, None] * logits_row + expert[None, :], mask=inside, other=float("-inf")).to(tl.float32)
        power = tl.exp(given - tl.max(given, axis=1)[:, None])
        weight = power / tl.sum(power, axis=1)[:, None]
        result = weight * (grad - tl.sum(weight * grad, axis=1)[:, None])
    tl.store(dlogits + row[:, None] * dlogits_row + expert[None, :], result.to(dlogits.dtype.element_ty), mask=inside)


# ---- Triton: the sort ------------------------------------------------------------------------------------------------------


@jit
def _count_kernel(ids, counts, S, E: tl.constexpr, E_BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """counts [programs, E]: slots of each expert among a program's."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    found = tl.load(ids + slot, mask=slot < S, other=-1)
    expert = tl.arange(0, E_BLOCK)
    number = tl.sum((found[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * E + expert, number, mask=expert < E)


@jit
def _offsets_kernel(counts, starts, offsets, PROGRAMS, S, E: tl.constexpr, E_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """One program an expert: slots of the experts before it, then of the programs before each, in `starts`."""
    own = tl.program_id(0)
    expert = tl.arange(0, E_BLOCK)
    before = tl.zeros((E_BLOCK,), tl.int32)
    for first in range(0, PROGRAMS, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < PROGRAMS) & (expert[None, :] < own)
        before += tl.sum(tl.load(counts + row[:, None] * E + expert[None, :], mask=inside, other=0), axis=0)
    start = tl.sum(before, axis=0)
    tl.store(offsets + own, start)
    if own == E - 1:
        tl.store(offsets + E, S)
    for first in range(0, PROGRAMS, ROWS):
        row = first + tl.arange(0, ROWS)
        number = tl.load(counts + row * E + own, mask=row < PROGRAMS, other=0)
        tl.store(starts + row * E + own, start + tl.cumsum(number, axis=0) - number, mask=row < PROGRAMS)
        start += tl.sum(number, axis=0)


@jit
def _place_kernel(ids, starts, order, inverse, S, E: tl.constexpr, SLOTS: tl.constexpr):
    number = tl.arange(0, SLOTS)
    slot = tl.program_id(0) * SLOTS + number
    inside = slot < S
    own = tl.load(ids + slot, mask=inside, other=0)
    others = tl.load(ids + slot, mask=inside, other=-1)
    before = (own[:, None] == others[None, :]) & (number[None, :] < number[:, None])
    place = tl.load(starts + tl.program_id(0) * E + own, mask=inside, other=0) + tl.sum(before.to(tl.int32), axis=1)
    tl.store(inverse + slot, place, mask=inside)
    tl.store(order + place, slot, mask=inside)


# ---- raw functions ---------------------------------------------------------------------------------------------------------


def route_forward(
    logits_TE: Tensor, K: int, *, normalise: bool, scale: float = 1.0, sigmoid: Sigmoid | None = None,
    bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights_TK fp32, ids_TK int32)"""
    if bias_E is not None and (sigmoid is not None or not normalise):
        raise ValueError("a bias of softmax scores is for weights that are divided by their sum; sigmoids have their own")
    T, E = logits_TE.shape
    if not use_triton(logits_TE):
        return route_reference(logits_TE.detach(), K, normalise=normalise, scale=scale, sigmoid=sigmoid, bias_E=bias_E)
    rule = sigmoid or Sigmoid(bias_E)
    weights_TK = torch.empty(T, K, dtype=torch.float32, device=logits_TE.device)
    ids_TK = torch.empty(T, K, dtype=torch.int32, device=logits_TE.device)
    block = triton.next_power_of_2(E)
    rows = _route_rows(block)
    _route_kernel[(triton.cdiv(T, rows),)](
        logits_TE, logits_TE.stride(0), logits_TE if rule.bias_E is None else rule.bias_E, weights_TK, ids_TK, T, scale, E=E,
        K=K, E_BLOCK=block, K_BLOCK=triton.next_power_of_2(K), ROWS=rows, NORMALISE=normalise, SIGMOID=sigmoid is not None,
        BIASED=rule.bias_E is not None, GROUPS=rule.groups, GROUPS_BLOCK=triton.next_power_of_2(rule.groups), KEPT=rule.kept,
        TINY=rule.tiny,
        num_warps=8 if rule.groups > 1 else 4,  # with 4, groups of 128 experts spill on 8.0
    )  # fmt: skip
    return weights_TK, ids_TK


def route_backward(
    dweights_TK: Tensor, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor, *, normalise: bool, scale: float = 1.0,
    sigmoid: Sigmoid | None = None, bias_E: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dlogits_TE in the logits' dtype. `bias_E` has decided the choice and nothing else."""
    T, E = logits_TE.shape
    dlogits_TE = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device) if out is None else out
    if not use_triton(logits_TE):
        return dlogits_TE.copy_(_route_backward_torch(dweights_TK, logits_TE, weights_TK, ids_TK, normalise, scale, sigmoid))
    block = triton.next_power_of_2(E)
    rows = _route_rows(block)
    _route_backward_kernel[(triton.cdiv(T, rows),)](
        dweights_TK.contiguous(), logits_TE, logits_TE.stride(0), weights_TK, ids_TK, dlogits_TE, dlogits_TE.stride(0), T,
        scale, E=E, K=ids_TK.shape[1], E_BLOCK=block, ROWS=rows, NORMALISE=normalise,
        SIGMOID=sigmoid is not None, TINY=(sigmoid or Sigmoid()).tiny, num_warps=4,
    )  # fmt: skip
    return dlogits_TE


def sort_by_expert(ids_TK: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order_S, inverse_TK, offsets_E1), int32: the counting sort."""
    if not use_triton(ids_TK):
        return sort_by_expert_reference(ids_TK, E)
    S, device = ids_TK.numel(), ids_TK.device
    programs = triton.cdiv(S, SLOTS)
    counts, starts = torch.empty(2, programs, E, dtype=torch.int32, device=device)
    order_S, inverse_TK = torch.empty(S, dtype=torch.int32, device=device), torch.empty_like(ids_TK)
    offsets_E1 = torch.empty(E + 1, dtype=torch.int32, device=device)
    block = triton.next_power_of_2(E)
    _count_kernel[(programs,)](ids_TK, counts, S, E=E, E_BLOCK=block, SLOTS=SLOTS, num_warps=4)
    _offsets_kernel[(E,)](counts, starts, offsets_E1, programs, S, E=E, E_BLOCK=block, ROWS=max(16, 4096 // block), num_warps=4)
    _place_kernel[(programs,)](ids_TK, starts, order_S, inverse_TK, S, E=E, SLOTS=SLOTS, num_warps=4)
    return order_S, inverse_TK, offsets_E1


def routing_forward(
    logits_TE: Tensor,
    K: int,
    *,
    normalise: bool,
    scale: float = 1.0,
    sigmoid: Sigmoid | None = None,
    bias_E: Tensor | None = None,
) -> Routing:
    """All a layer needs. Its backward is `route_backward(dweights, logits, routing.weights_TK, routing.ids_TK, ...)`."""
    weights_TK, ids_TK = route_forward(logits_TE, K, normalise=normalise, scale=scale, sigmoid=sigmoid, bias_E=bias_E)
    return Routing(ids_TK, weights_TK, *sort_by_expert(ids_TK, logits_TE.shape[1]))
