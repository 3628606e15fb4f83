"""Log-probabilities, entropy and the likeliest token of a head, against float64, on both paths and by the Hopper product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from powers_in_torch import Product
from torch import Tensor

from pronghorn.kernels.loss import cross_entropy_powers
from pronghorn.kernels.loss import linear_cross_entropy as head
from pronghorn.kernels.loss import linear_log_probs as op
from pronghorn.kernels.loss.linear_log_probs import LogProbs, linear_log_probs, linear_log_probs_reference, sampled_entropy
from tables import table

ROWS, WIDTH, VOCABULARY = 70, 24, 500
BARS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def sample(dtype: torch.dtype, device: str = "cpu", steep: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH) * steep, torch.randn(VOCABULARY, WIDTH) * 0.5
    labels = (hidden @ weight.T).argmax(1)  # every third is the likeliest
    labels[torch.arange(ROWS) % 3 > 0] = torch.randint(0, VOCABULARY, (int((torch.arange(ROWS) % 3 > 0).sum()),))
    return hidden.to(dtype).to(device).requires_grad_(), weight.to(dtype).to(device), labels.to(device)


def check(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> LogProbs:
    bar = BARS[hidden.dtype]
    found = linear_log_probs(hidden, weight, labels, top=True, **options)
    exact = hidden.detach().double().requires_grad_()
    entropy = options.pop("entropy", False)
    doubles = {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}
    expected = linear_log_probs_reference(exact, weight.double(), labels, **doubles)
    pull = torch.randn(ROWS, generator=torch.Generator().manual_seed(1)).to(hidden.device)  # a gradient for each row
    pull[::5] = 0.0
    (found.log_probs * pull).sum().backward()
    (expected.log_probs * pull).sum().backward()
    torch.testing.assert_close(found.log_probs.double(), expected.log_probs, rtol=bar, atol=bar)
    assert float((hidden.grad.double() - exact.grad).norm() / exact.grad.norm()) < bar
    assert not hidden.grad[::5].any()
    if entropy:
        assert expected.entropy is not None
        torch.testing.assert_close(found.entropy.double(), expected.entropy, rtol=bar, atol=2 * bar)
    assert torch.equal(found.top, expected.top)
    assert 20 < int(found.top.sum()) < 40
    return found


@table(
    ("dtype", "options"),
    [(torch.float32, {"entropy": True}), (torch.bfloat16, {"entropy": True, "logit_scale": 0.4}), (torch.float16, {})],
)
def test_values_and_a_gradient_for_each_row(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    check(*sample(dtype, device), **options)


def test_a_bias(device: str) -> None:
    hidden, weight, labels = sample(torch.float32, device)
    bias = torch.randn(VOCABULARY, device=device) * 0.01
    check(hidden, weight, labels, bias_V=bias)
    with pytest.raises(ValueError, match="need the logits"):
        linear_log_probs(hidden, weight, labels, bias_V=bias, entropy=True)
    with pytest.raises(ValueError, match="need the logits"):
        linear_log_probs(hidden, weight.requires_grad_(), labels, top=True)


@table(
    ("dtype", "softcap", "trained"),
    [(torch.float32, 4.0, True), (torch.bfloat16, 0.0, True), (torch.float16, 0.0, True), (torch.float32, 4.0, False)],
)
def test_a_trained_head_and_a_softcap(device: str, dtype: torch.dtype, softcap: float, trained: bool) -> None:
    """Gradients of hidden, weight and bias, where each row has a gradient of its own, as small as 1 / 65,536; against float64,
    with plain torch's error as the yardstick."""
    hidden, weight, labels = sample(dtype, device)
    bias = (torch.randn(VOCABULARY, device=device) * 0.1).to(dtype)
    labels[3] = head.IGNORED
    pull = torch.randn(ROWS, generator=torch.Generator().manual_seed(1)).to(device) / 65_536
    pull[3] = 0.0

    def measured(kind: torch.dtype, op: Any) -> list[Tensor]:
        frozen = (tensor.detach().to(kind).requires_grad_(trained) for tensor in (weight, bias))
        inputs = [hidden.detach().to(kind).requires_grad_(), *frozen]
        known = labels if op is linear_log_probs else labels.clamp_min(0)
        found = op(inputs[0], inputs[1], known, bias_V=inputs[2], softcap=softcap).log_probs
        (found * pull.to(found.dtype)).sum().backward()
        real = (labels != head.IGNORED).to(found.dtype)
        return [(found * real).detach().double(), *(one.grad.double() for one in inputs if one.grad is not None)]

    truth = measured(torch.float64, linear_log_probs_reference)
    ours, theirs = measured(dtype, linear_log_probs), measured(dtype, linear_log_probs_reference)
    assert len(truth) == len(ours) == (4 if trained else 2)
    for true, our, their in zip(truth, ours, theirs, strict=True):
        error, yardstick = ((one - true).norm() / true.norm() for one in (our, their))
        assert float(error) <= 2 * float(yardstick) + 1e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steep", [1.0, 30.0])
def test_where_the_product_writes_the_powers(dtype: torch.dtype, steep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steep rows: their labels lie so low that the product is done once more, with another anchor."""
    stand_in = Product()
    monkeypatch.setattr(cross_entropy_powers, "covered", lambda *_: True)
    monkeypatch.setattr(cross_entropy_powers, "powers_mm", stand_in)
    monkeypatch.setattr(head, "chunk_rows", lambda *_: 16)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    hidden, weight, labels = sample(dtype, steep=steep)
    if steep == 1.0:
        check(hidden, weight, labels, entropy=True)
    else:
        found = linear_log_probs(hidden, weight, labels, top=True)
        expected = linear_log_probs_reference(hidden.detach().double(), weight.double(), labels)
        torch.testing.assert_close(found.log_probs.double(), expected.log_probs, rtol=BARS[dtype], atol=BARS[dtype])
        assert torch.equal(found.top, expected.top)  # type: ignore[arg-type]
    assert any(stand_in.wanted) == (steep > 1.0)


def test_chunks_of_rows_for_the_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "ROWS", 16)
    check(*sample(torch.float32), entropy=True)


def test_backward_again_and_the_entropys_gradient() -> None:
    hidden, weight, labels = sample(torch.float32)
    found = linear_log_probs(hidden, weight, labels, entropy=True)
    (first,) = torch.autograd.grad(found.log_probs.sum(), hidden, retain_graph=True)
    (second,) = torch.autograd.grad(found.log_probs.sum(), hidden, retain_graph=True)
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.autograd.grad((found.log_probs - found.entropy).sum(), hidden)  # type: ignore[operator]
    with torch.no_grad():
        assert torch.equal(linear_log_probs(hidden, weight, labels).log_probs, found.log_probs)


@pytest.mark.parametrize(("rows", "given"), [(300, {"softcap": 2.0, "logit_scale": 0.7}), (5, {"logit_scale": 1.5})])
def test_the_entropy_of_some_rows_of_any_head(rows: int, given: dict[str, float]) -> None:
    """As the formula says in float64; nan of the others."""
    chance = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=chance) for shape in ((rows, 8), (40, 8), (40,)))
    found = sampled_entropy(hidden, weight.requires_grad_(), bias_V=bias, **given)
    logits = (hidden.double() @ weight.double().T + bias.double()) * given["logit_scale"]
    if cap := given.get("softcap"):
        logits = torch.tanh(logits / cap) * cap
    expected = torch.distributions.Categorical(logits=logits).entropy()
    known = ~found.isnan()
    assert known.nonzero()[:, 0].tolist() == list(range(0, rows, 3 if rows == 300 else 1))
    torch.testing.assert_close(found[known].double(), expected[known], rtol=1e-5, atol=1e-6)
    assert not found.requires_grad
