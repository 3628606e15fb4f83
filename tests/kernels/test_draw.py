"""Tokens drawn on a GPU follow the softmax of their logits; log-probabilities are as good as plain torch's."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from pronghorn.kernels.sampling import draw

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if not CUDA:
        monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
        monkeypatch.setattr(draw, "BLOCK", 16)


@pytest.mark.parametrize(("scale", "softcap", "temperature"), [(1.0, 0.0, 1.0), (0.5, 0.0, 0.7), (2.0, 3.0, 1.5)])
def test_draws_follow_the_softmax(judge: Callable[..., None], scale: float, softcap: float, temperature: float) -> None:
    rows, size = (20_000, 5000) if CUDA else (600, 41)
    wide = torch.full((rows, size + 3), float("nan"), device=DEVICE)
    wide[:, :size] = 2 * torch.randn(size, device=DEVICE)
    logits = wide[:, :size]
    key = torch.randint(-(2**62), 2**62, (rows,), device=DEVICE)
    place = torch.arange(rows, device=DEVICE)
    at = torch.full((rows,), temperature, device=DEVICE)
    token, log_prob = draw.draw_launched(logits, at, key, place, scale=scale, softcap=softcap)
    again, _ = draw.draw_launched(logits[7:9], at[7:9], key[7:9], place[7:9], scale=scale, softcap=softcap)
    assert again.tolist() == token[7:9].tolist()

    def log_probs(number: torch.dtype) -> torch.Tensor:
        x = logits[:1].to(number) * scale
        x = softcap * torch.tanh(x / softcap) if softcap else x
        return (x / temperature).log_softmax(-1)[0]

    true = log_probs(torch.float64)
    judge(log_prob, log_probs(torch.float32)[token], true[token], "log-probabilities")
    counts = torch.bincount(token, minlength=size).double()
    expected = rows * true.exp()
    often = expected > 5
    chi = float(((counts - expected).square() / expected)[often].sum())
    freedom = int(often.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5, (chi, freedom)


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.randn(9, 50, device=DEVICE)
    logits[3, 7] = logits[3, 40] = 9.0  # the first of equals, as torch's argmax
    zero, place = torch.zeros(9, device=DEVICE), torch.arange(9, device=DEVICE)
    token, log_prob = draw.draw_launched(logits, zero, place, place)
    assert token.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(log_prob, logits.log_softmax(-1).amax(-1), rtol=1e-5, atol=1e-5)
