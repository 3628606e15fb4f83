"""The step between the head's products alone: rows of logits against float64, in one pass and in two. What the op makes of
it is in test_linear_cross_entropy.py."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.loss import linear_cross_entropy as op
from pronghorn.kernels.loss.cross_entropy_rows import IGNORED, Terms, loss_and_gradient, takes_factors
from pronghorn.kernels.runtime.dispatch import use_triton


@pytest.mark.parametrize("terms", [Terms(), Terms(softcap=5.0, logit_scale=0.5)], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_pass_is_two_passes_but_for_the_rows_factors(device: str, dtype: torch.dtype, terms: Terms) -> None:
    if not use_triton(torch.zeros(1, device=device)):
        pytest.skip("plain torch has one way")
    rows, vocabulary = 6, 9000  # whole blocks of columns, and one that is not
    logits = torch.zeros(rows, 9024, dtype=dtype, device=device)
    logits[:, :vocabulary] = (torch.randn(rows, vocabulary, device=device) * 3).to(dtype)
    labels = torch.tensor([0, 8999, 4096, 17, IGNORED, 5], device=device)
    scale = torch.full((), 0.25, device=device)
    assert takes_factors(dtype, terms, logits)
    found = []
    for factors in (None, torch.full((rows,), float("nan"), device=device)):
        own, losses = logits.clone(), torch.full((rows,), float("nan"), device=device)
        loss_and_gradient(own[:, :vocabulary], labels, None, losses, scale, terms, True, factors)
        gradient = own[:, :vocabulary].double()
        found.append((losses, gradient if factors is None else gradient * factors.double()[:, None]))
    (losses, twice), (again, once) = found
    assert torch.equal(losses, again)
    leaf = logits[:, :vocabulary].double().requires_grad_()
    shown = leaf * terms.logit_scale
    if terms.softcap:
        shown = torch.tanh(shown / terms.softcap) * terms.softcap
    each = torch.nn.functional.cross_entropy(shown, labels, ignore_index=IGNORED, reduction="none")
    loss = each.sum()
    (truth,) = torch.autograd.grad(loss * 0.25, leaf)
    torch.testing.assert_close(losses.double(), each, rtol=2e-6, atol=2e-6)
    step = 2**-7 if dtype == torch.bfloat16 else 2e-5  # of bf16: the interpreter cuts off, twice the error of rounding
    for gradient in (once, twice):
        assert float((gradient - truth).norm() / truth.norm()) <= step
    at = torch.arange(4)
    exact = truth[at, labels[:4]]
    assert float(((once[at, labels[:4]] - exact) / exact).abs().max()) <= 2e-5  # the label's own is not rounded


def test_factors_are_multiplied_in_on_every_way(device: str) -> None:
    x, factors = torch.randn(3, 40, device=device), torch.tensor([2.0, 0.0, -1.5], device=device)
    expected = x.double() * 0.3 * factors.double()[:, None]
    op._scale_in_place(x, torch.full((), 0.3, device=device), factors)
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-7)
