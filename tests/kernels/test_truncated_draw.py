"""Tokens drawn on a GPU from what top_k, top_p and min_p leave: the kept set is that of the definition, draws follow it."""

from __future__ import annotations

import os

import pytest
import torch

from pronghorn.generation.sampling import Rules, Sampling, drawn_by, truncated, uniforms
from pronghorn.kernels.sampling import draw, truncated_draw
from tables import table

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
RULES = [
    Sampling(0.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(min_p=0.1),
    Sampling(0.9, top_k=12, top_p=0.9, min_p=0.05),
    Sampling(1.5, top_k=1),
    Sampling(top_p=1e-9),
    Sampling(top_k=10_000_000, top_p=0.999),
    Sampling(),
    Sampling(0.0, top_k=3, top_p=0.5),
]


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not CUDA:
        monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
        monkeypatch.setattr(draw, "BLOCK", 16)
        monkeypatch.setattr(truncated_draw, "SEARCH", 32)


def rules_of(chosen: list[Sampling]) -> Rules:
    rules = Rules.empty(len(chosen), DEVICE)
    for row, rule in enumerate(chosen):
        rules.set(row, rule)
    return rules


@table("kind", ["normal", "ties", "unlikely", "impossible", "equal", "capped"])
def test_the_kept_set_is_that_of_the_definition(kind: str) -> None:
    """Also where many logits are equal, or far away, or -inf."""
    size = 3000 if CUDA else 75
    torch.manual_seed(4)
    wide = torch.full((len(RULES), size + 5), float("nan"), device=DEVICE)
    logits = wide[:, :size]
    logits.copy_(3 * torch.randn(len(RULES), size))
    if kind == "ties":
        logits.copy_((logits * 2).round() / 2)
    if kind == "unlikely":
        logits[:, ::3] -= 1e4
    if kind == "impossible":
        logits[:, 4:] = float("-inf")
    if kind == "equal":
        logits.fill_(-2.5)
    rules = rules_of(RULES)
    key, place = torch.arange(len(RULES), device=DEVICE), torch.zeros(len(RULES), dtype=torch.int64, device=DEVICE)
    scale, softcap = (0.5, 3.0) if kind == "capped" else (1.0, 0.0)
    found = truncated_draw.truncated_draw_launched(logits, *rules, key, place, scale=scale, softcap=softcap)
    token, log_prob, kept_log_prob, least = found
    logits = softcap * torch.tanh(scale * logits / softcap) if softcap else logits
    temperature = torch.where(rules.temperature_B == 0, 1.0, rules.temperature_B)
    x = logits / temperature[:, None]
    kept = truncated(x.double().log_softmax(-1), rules) > float("-inf")
    for row, rule in enumerate(RULES):
        if rule.temperature:
            near = 1e-5 if softcap else 4e-6 if CUDA else 0.0  # tanh, and a GPU's quotient, are rounded otherwise
            assert (x[row] >= least[row] - near).tolist() == kept[row].tolist(), (rule, int(kept[row].sum()))
    expected = drawn_by(logits, rules, uniforms(key, place), truncates=True)
    assert token.tolist() == expected.token_B.tolist()
    torch.testing.assert_close(log_prob, expected.log_prob_B, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kept_log_prob, expected.kept_log_prob_B, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", RULES[:4] if CUDA else RULES[3:4], ids=str)  # 10 s each in the interpreter
def test_draws_follow_what_a_rule_leaves(rule: Sampling) -> None:
    rows, size = (20_000, 5000) if CUDA else (200, 41)
    torch.manual_seed(5)
    logits = (2 * torch.randn(size, device=DEVICE)).expand(rows, size).contiguous()
    rules = rules_of([rule] * rows)
    key, place = torch.full((rows,), 77, device=DEVICE), torch.arange(rows, device=DEVICE)
    token = truncated_draw.truncated_draw_launched(logits, *rules, key, place)[0]
    true = truncated((logits[:1].double() / rule.temperature).log_softmax(-1), rules.of(place[:1]))[0].exp()
    counts = torch.bincount(token, minlength=size).double()
    assert (counts[true == 0] == 0).all()
    expected = rows * true
    often = expected > 5
    chi, freedom = float(((counts - expected).square() / expected)[often].sum()), max(1, int(often.sum()) - 1)
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (chi, freedom)
    whole = drawn_by(logits, rules, uniforms(key, place), truncates=True).token_B
    assert (whole == token).double().mean() > 0.999


def test_a_row_without_a_rule_draws_what_it_draws_among_such_rows() -> None:
    """So that a draw does not depend on its neighbours."""
    rows = 40
    logits = 2 * torch.randn(rows, 50, device=DEVICE)
    key, place = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
    rules = rules_of([Sampling(0.8)] * rows)
    alone, log_prob = draw.draw_launched(logits, rules.temperature_B, key, place)
    token, same, kept, _ = truncated_draw.truncated_draw_launched(logits, *rules, key, place)
    assert token.tolist() == alone.tolist()
    torch.testing.assert_close(same, log_prob, rtol=0, atol=0)
    torch.testing.assert_close(kept, log_prob, rtol=1e-5, atol=1e-5)
