"""Draws follow the distribution that each rule leaves; a draw depends on its key and place alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pronghorn.generation.sampling import GREEDY, Rules, Sampling, _mixed, draw, key_of, uniforms

RULES = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(temperature=0.9, top_k=12, top_p=0.9, min_p=0.05),
    Sampling(top_p=1e-9),
]
V, MANY = 40, 20_000


def rules_of(rule: Sampling, rows: int) -> Rules:
    rules = Rules.empty(rows, torch.device("cpu"))
    for tensor, value in zip(rules, (rule.temperature, rule.top_k, rule.top_p, rule.min_p), strict=True):
        tensor.fill_(value)
    return rules


def left(logits: torch.Tensor, rule: Sampling) -> torch.Tensor:
    """Probabilities by transformers' own rules."""
    scores = TemperatureLogitsWarper(rule.temperature)(None, logits[None])
    if rule.top_k:
        scores = TopKLogitsWarper(rule.top_k)(None, scores)
    if rule.top_p < 1:
        scores = TopPLogitsWarper(rule.top_p)(None, scores)
    if rule.min_p:
        scores = MinPLogitsWarper(rule.min_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("rule", RULES)
def test_draws_follow_what_each_rule_leaves(rule: Sampling) -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(V)
    key = torch.full((MANY,), key_of(1, 2, 3))
    found = draw(logits.expand(MANY, V), rules_of(rule, MANY), key, torch.arange(MANY), truncates=rule.truncates)
    true = left(logits, rule)
    counts = torch.bincount(found.token_B, minlength=V).double()
    assert (counts[true == 0] == 0).all()
    expected = MANY * true.double()
    kept = expected > 5
    chi = float(((counts - expected).square() / expected)[kept].sum())
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 4 * (2 * max(1, freedom)) ** 0.5, (chi, freedom)  # four standard deviations
    torch.testing.assert_close(found.kept_log_prob_B, true.log()[found.token_B], rtol=1e-4, atol=1e-4)
    whole = (logits / rule.temperature).log_softmax(-1)
    torch.testing.assert_close(found.log_prob_B, whole[found.token_B], rtol=1e-5, atol=1e-5)


def test_rows_have_their_own_rules_and_no_neighbours() -> None:
    torch.manual_seed(1)
    logits = 3 * torch.randn(8, V)
    chosen = [
        GREEDY,
        Sampling(top_k=3),
        Sampling(),
        Sampling(top_p=0.5),
        GREEDY,
        Sampling(min_p=0.3),
        Sampling(2.0),
        Sampling(),
    ]
    rules = Rules.empty(8, torch.device("cpu"))
    rules.set(torch.arange(len(chosen)), chosen)
    key = torch.tensor([key_of(7, row) for row in range(8)])
    together = draw(logits, rules, key, torch.zeros(8, dtype=torch.int64), truncates=True)
    for row in range(8):
        rows = torch.tensor([row])
        alone = draw(logits[rows], rules.of(rows), key[rows], torch.zeros(1, dtype=torch.int64), truncates=True)
        assert alone.token_B == together.token_B[row]
        assert alone.log_prob_B == together.log_prob_B[row]
    assert together.token_B[0] == logits[0].argmax()
    assert together.token_B[4] == logits[4].argmax()


def test_uniform_numbers_are_those_of_splitmix64() -> None:
    keys, places = [key_of(3, i) for i in range(2000)], [i % 7 for i in range(2000)]
    got = uniforms(torch.tensor(keys), torch.tensor(places)).numpy()
    assert got.tolist() == [
        (_mixed((key & (2**64 - 1)) ^ place) >> 11) * 2.0**-53 for key, place in zip(keys, places, strict=True)
    ]
    assert abs(np.mean(got) - 0.5) < 0.03
    assert len(set(got.tolist())) == 2000
    neighbours = uniforms(torch.full((5000,), key_of(1)), torch.arange(5000)).numpy()
    assert abs(float(np.corrcoef(neighbours[1:], neighbours[:-1])[0, 1])) < 0.06
