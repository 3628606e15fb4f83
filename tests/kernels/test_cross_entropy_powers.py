"""The head's loss by powers of 2 that the product writes: with a product that torch does in its place, on a CPU."""

from __future__ import annotations

import pytest
import torch
from powers_in_torch import Product
from torch import Tensor

from pronghorn.kernels.loss import cross_entropy_powers
from pronghorn.kernels.loss import linear_cross_entropy as head
from pronghorn.kernels.loss.cross_entropy_powers import Powers
from pronghorn.kernels.loss.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

# Where there is a GPU its kernels are compiled, and tests/kernels/test_hopper_gemm.py has the product itself.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
ROWS, WIDTH, VOCABULARY = 70, 24, 500  # 3 tiles of columns, the last of 116; 5 programs of rows, and chunks of 16 below


@pytest.fixture
def product(monkeypatch: pytest.MonkeyPatch) -> Product:
    stand_in = Product()
    monkeypatch.setattr(cross_entropy_powers, "covered", lambda *_: True)
    monkeypatch.setattr(cross_entropy_powers, "powers_mm", stand_in)
    monkeypatch.setattr(head, "chunk_rows", lambda *_: 16)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return stand_in


def sample(steep: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(ROWS, WIDTH) * steep, torch.randn(VOCABULARY, WIDTH) * 0.5
    labels = torch.randint(0, VOCABULARY, (ROWS,))
    labels[::7] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype), labels


def compare(
    hidden: Tensor, weight: Tensor, labels: Tensor, tolerance: float, of_losses: float = 1e-5, **options: object
) -> None:
    loss, rows = linear_cross_entropy(hidden, weight, labels, **options)  # type: ignore[arg-type]
    (loss * 0.3).backward()
    exact = hidden.detach().double().requires_grad_()
    weights = options.pop("weights_N", None)
    expected, expected_rows = linear_cross_entropy_reference(
        exact, weight.double(), labels, weights_N=weights.double() if isinstance(weights, Tensor) else None, **options
    )  # type: ignore[arg-type]
    (expected * 0.3).backward()
    torch.testing.assert_close(rows.double(), expected_rows, rtol=1e-6, atol=of_losses)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-6, atol=of_losses)
    assert float((hidden.grad.double() - exact.grad).norm() / exact.grad.norm()) < tolerance
    assert not hidden.grad[::7].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_loss_and_gradient_of_every_row(product: Product, dtype: torch.dtype, tolerance: float) -> None:
    compare(*sample(dtype=dtype), tolerance)
    assert product.wanted == [False] * 5  # chunks


def test_a_label_that_lies_far_below_the_largest_asks_for_the_product_once_more(product: Product) -> None:
    hidden, weight, labels = sample(steep=40.0)
    logits = hidden.detach() @ weight.T
    low = 16 + 3  # one row of the second chunk; the others have their largest, so that nothing rises there
    labels = torch.where(labels == -100, labels, logits.argmax(1))
    labels[low] = logits[low].argmin()
    assert float(logits[low].max() - logits[low].min()) > 90 * 0.6931
    compare(hidden, weight, labels, 1.5e-5, of_losses=1e-4)  # logits of up to 300: their last digits are 3e-5
    assert product.wanted == [False, True, False, False, False]


@pytest.mark.parametrize("options", [{"weights_N": torch.linspace(0, 2, ROWS)}, {"logit_scale": 0.25}])
def test_weights_and_a_scale(product: Product, options: dict[str, object]) -> None:
    compare(*sample(), 1e-6, **options)
    assert product.wanted


@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"label_smoothing": 0.1}, {"z_loss": 0.01}])
def test_what_needs_the_logits_has_them(product: Product, options: dict[str, object]) -> None:
    compare(*sample(), 1e-6, **options)
    assert not product.wanted


def test_a_broken_row_breaks_no_other(product: Product) -> None:
    hidden, weight, labels = sample()
    broken = hidden.detach().clone()
    broken[9] = torch.nan
    _, rows = linear_cross_entropy(broken.requires_grad_(), weight, labels)
    assert rows.isnan().nonzero().flatten().tolist() == [9]


def test_where_the_product_is_not_done_the_two_steps_are(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Powers, "loss_and_gradient", lambda *_: False)
    compare(*sample(), 1e-6)
