"""Routing: transformers' orders and normalisations, gradients as good as plain torch's, a stable sort whatever the load."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_parts import Judge, truth_and_plain

from pronghorn.kernels.moe.routing import (
    Sigmoid,
    route_backward,
    route_forward,
    route_reference,
    routing_forward,
    sort_by_expert,
    sort_by_expert_reference,
)
from tables import covering, table

SHAPES = [(1, 4, 1), (37, 8, 2), (33, 32, 4), (19, 128, 8), (130, 60, 4), (50, 3, 3)]  # T, E, K


def gpt_oss(logits: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest first, then a softmax over them."""
    values, ids = torch.topk(logits, K, dim=-1)
    return torch.softmax(values, dim=1), ids


def qwen(logits: torch.Tensor, K: int, divide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A softmax over all first (Qwen2-MoE, Qwen3-MoE, Mixtral)."""
    values, ids = torch.topk(torch.softmax(logits, dim=-1), K, dim=-1)
    return values / values.sum(-1, keepdim=True) if divide else values, ids


def glm(logits: torch.Tensor, K: int, divide: bool, rule: Sigmoid) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoids, a bias on the choice, groups by their two largest (GLM-4.5, dots.llm1, DeepSeek-V3), as transformers has it."""
    scores = logits.sigmoid()
    choice = scores if rule.bias_E is None else scores + rule.bias_E
    groups = choice.view(len(logits), rule.groups, -1)
    best = groups.topk(2, dim=-1)[0].sum(-1).topk(rule.kept, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(logits), rule.groups, device=logits.device).scatter_(1, best, 1)[..., None].expand_as(groups)
    ids = choice.masked_fill(~mask.reshape_as(choice).bool(), float("-inf")).topk(K, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) if divide else weights, ids


SIGMOIDS = [((37, 8, 2), 1, 1), ((19, 128, 8), 8, 4), ((33, 60, 4), 3, 1), ((5, 160, 6), 5, 2), ((1, 4, 2), 2, 1)]


def biased(E: int, groups: int, kept: int, device: str) -> Sigmoid:
    return Sigmoid(0.3 * torch.randn(E, device=device), groups, kept)


@table(("shape", "groups", "kept", "normalise"), [(*row, norm) for row in SIGMOIDS for norm in (True, False)])
def test_sigmoid_scores_are_chosen_with_a_bias_and_weigh_without(
    device: str, shape: tuple[int, int, int], groups: int, kept: int, normalise: bool
) -> None:
    T, E, K = shape
    logits = 2 * torch.randn(T, E, device=device)
    rule = biased(E, groups, kept, device)
    for each in (rule, Sigmoid(None, groups, kept)):
        weights, ids = route_forward(logits, K, normalise=normalise, scale=2.5, sigmoid=each)
        expected, their_ids = glm(logits, K, normalise, each)
        assert torch.equal(ids.long(), their_ids)
        torch.testing.assert_close(weights, 2.5 * expected, rtol=2e-6, atol=1e-7)


def ernie(logits: torch.Tensor, K: int, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A softmax over all, a bias on the choice (ERNIE 4.5), as transformers has it."""
    scores = torch.softmax(logits, dim=-1)
    ids = torch.topk(scores + bias, K, dim=-1)[1]
    weights = scores.gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-12), ids


@table("shape", SHAPES)
def test_a_softmax_is_chosen_from_with_a_bias_and_weighs_without(
    device: str, judge: Judge, shape: tuple[int, int, int]
) -> None:
    T, E, K = shape
    logits, bias = 2 * torch.randn(T, E, device=device), torch.randn(E, device=device) / E
    dweights = torch.randn(T, K, device=device)
    weights, ids = route_forward(logits, K, normalise=True, scale=2.5, bias_E=bias)
    expected, their_ids = ernie(logits, K, bias)
    assert torch.equal(ids.long(), their_ids)
    assert T < 9 or K == E or not torch.equal(ids, route_forward(logits, K, normalise=True)[1])  # the bias matters
    torch.testing.assert_close(weights, 2.5 * expected, rtol=2e-6, atol=1e-7)
    results = truth_and_plain(lambda x: 2.5 * x.gather(-1, their_ids).softmax(-1), [logits], [dweights])
    ours = route_backward(dweights, logits, weights, ids, normalise=True, scale=2.5, bias_E=bias)
    if K == 1:  # the weight is always `scale`: the gradient is 0, on a GPU but for the rounding of a division
        assert ours.abs().max() <= 1e-6 * dweights.abs().max()
    else:
        judge(ours, results[1][1], results[0][1], "dlogits")
    with pytest.raises(ValueError, match="divided by their sum"):
        route_forward(logits, K, normalise=False, bias_E=bias)


@table(("shape", "normalise"), [(shape, normalise) for shape in SHAPES for normalise in (True, False)])
def test_weights_are_transformers_own(device: str, shape: tuple[int, int, int], normalise: bool) -> None:
    T, E, K = shape
    logits = 3 * torch.randn(T, E, device=device)
    weights, ids = route_forward(logits, K, normalise=normalise)
    theirs = [qwen(logits, K, normalise), *([gpt_oss(logits, K)] if normalise else [])]
    for expected, their_ids in theirs:
        assert torch.equal(ids.long(), their_ids)
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)
    scaled, _ = route_forward(logits, K, normalise=normalise, scale=2.5)
    torch.testing.assert_close(scaled, 2.5 * weights)


# The normalisation has a backward of its own, in every dtype; a shape only fills the tile or does not.
@table(
    ("dtype", "normalise", "scale", "shape", "sigmoids"),
    [
        *((torch.float32, index % 2 == 0, 1.7, shape, tuple(groups)) for index, (shape, *groups) in enumerate(SIGMOIDS[:3])),
        *((torch.bfloat16, index % 2 == 1, 1.7, shape, tuple(groups)) for index, (shape, *groups) in enumerate(SIGMOIDS[:3])),
        *((dtype, *way, shape, None)
        for dtype, way, shape in covering(
            [torch.float32, torch.bfloat16, torch.float16],
            [(True, 1.0), (False, 1.0), (False, 1.7)],
            SHAPES[1:5],
            together=(0, 1),
        )),
    ],
)  # fmt: skip
def test_gradients_are_as_good_as_plain_torch(
    device: str, judge: Judge, dtype: torch.dtype, normalise: bool, scale: float, shape: tuple[int, int, int],
    sigmoids: tuple[int, int] | None,
) -> None:  # fmt: skip
    T, E, K = shape
    options: dict[str, Any] = {"normalise": normalise, "scale": scale}
    if sigmoids:
        options["sigmoid"] = biased(E, *sigmoids, device)
    buffer = torch.full((T, E + 3), float("nan"), dtype=dtype, device=device)
    buffer[:, :E] = 2 * torch.randn(T, E, device=device)
    logits, grad = buffer[:, :E], torch.randn(T, K, device=device)
    results = truth_and_plain(lambda x: route_reference(x, K, **options)[0], [logits], [grad])
    weights, ids = route_forward(logits, K, **options)
    out = torch.full((T, E + 5), float("nan"), dtype=dtype, device=device)
    dlogits = route_backward(grad, logits, weights, ids, **options, out=out[:, :E])
    for name, ours, true, theirs in zip(("weights", "dlogits"), (weights, dlogits), *results, strict=True):
        judge(ours, theirs, true, name)
    assert out[:, E:].isnan().all()


SIZES = [(1, 1, 1), (50, 8, 2), (129, 3, 1), (64, 60, 4)]


@table(
    ("T", "E", "K", "load"),
    [*((*size, load) for size in SIZES for load in ("even", "skewed", "one")), (600, 128, 8, "even")],  # more than 32 programs
)
def test_sort_is_stable_and_complete(device: str, T: int, E: int, K: int, load: str) -> None:
    ids = torch.randint(0, E, (T, K), dtype=torch.int32, device=device)
    if load == "skewed":  # most experts are empty, the first and the last among them
        ids = ids.clamp(E // 3, max(E // 3, E // 2))
    elif load == "one":
        ids.fill_(E - 1)
    order, inverse, offsets = sort_by_expert(ids, E)
    expected = sort_by_expert_reference(ids, E)
    for ours, theirs in zip((order, inverse, offsets), expected, strict=True):
        assert ours.dtype == torch.int32
        assert torch.equal(ours, theirs)
    assert torch.equal(order[inverse.view(-1).long()].cpu(), torch.arange(T * K, dtype=torch.int32))
    assert torch.equal(ids.view(-1)[order.long()].sort()[0], ids.view(-1)[order.long()])
    assert int(offsets[0]) == 0
    assert int(offsets[-1]) == T * K


def test_equal_logits_choose_the_lower_expert(device: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0]], device=device)
    assert route_forward(logits, 3, normalise=True)[1].tolist() == [[1, 2, 3]]
    assert route_forward(torch.full((2, 5), -torch.inf, device=device), 2, normalise=True)[1].tolist() == [[0, 1], [0, 1]]


@table("groups", [1, 3])
def test_nan_of_sigmoids_is_passed_on_and_stays_within_bounds(device: str, groups: int) -> None:
    logits = torch.randn(3, 6, device=device)
    logits[1] = float("nan")
    weights, ids = route_forward(logits, 2, normalise=True, sigmoid=Sigmoid(torch.ones(6, device=device), groups, 1))
    assert weights[1].isnan().all()
    assert weights[[0, 2]].isfinite().all()
    assert sorted(ids[1].tolist()) == [0, 1]
    saturated = torch.full((1, 6), -torch.inf, device=device)
    assert route_forward(saturated, 2, normalise=True, sigmoid=Sigmoid())[0].tolist() == [[0.0, 0.0]]


def test_nan_is_passed_on_and_stays_within_bounds(device: str) -> None:
    logits = torch.randn(4, 5, device=device)
    logits[1] = float("nan")
    logits[2, 3] = float("inf")
    routing = routing_forward(logits, 2, normalise=True)
    assert routing.weights_TK[1].isnan().all()
    assert routing.weights_TK[2].isnan().any(), "inf - inf"
    assert routing.weights_TK[[0, 3]].isfinite().all()
    assert ((routing.ids_TK >= 0) & (routing.ids_TK < 5)).all()
    assert int(routing.counts.sum()) == 8
