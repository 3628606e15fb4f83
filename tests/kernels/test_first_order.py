"""A backward without a second derivative: the first is as it is, a second one an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.kernels.runtime.first_order import first_order


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        return factor * x.square()

    @staticmethod
    @first_order
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, None]:
        assert not torch.is_grad_enabled()
        return 2 * incoming[0] * ctx.saved_tensors[0], None


def test_a_second_backward_is_refused_even_if_the_incoming_gradient_requires_none() -> None:
    x = torch.tensor([3.0], requires_grad=True)
    y = Square.apply(x, 1.0)
    (plain,) = torch.autograd.grad(y, x, retain_graph=True)
    assert plain == 6
    assert not plain.requires_grad
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    assert gradient == 6
    with pytest.raises(ModelError, match="gradients of gradients"):
        (x + gradient).sum().backward()
