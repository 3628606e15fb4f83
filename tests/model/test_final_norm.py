"""The norm before the head: the same gradients as plain torch's, in rows with grad_buffer for the last layer's columns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pronghorn.kernels.norm.rms_norm import rms_norm_reference
from pronghorn.model.final_norm import final_norm
from pronghorn.model.layers.norms import Norm
from pronghorn.model.layers.types import GradBuffer


@pytest.mark.parametrize("trains", [False, True])
def test_gradients_are_plain_torch_s_with_room_behind(trains: bool) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(12, dtype=torch.float64), requires_grad=trains)
    h, dy = torch.randn(5, 12, dtype=torch.float64, requires_grad=True), torch.randn(5, 12, dtype=torch.float64)
    grad_buffer = GradBuffer()
    norm = Norm(SimpleNamespace(norm=SimpleNamespace(weight=weight, variance_epsilon=1e-6)), "norm", one_plus=False)
    wanted = [h, weight] if trains else [h]
    y = final_norm(h, norm, grad_buffer, 16)
    found = torch.autograd.grad(y, wanted, dy)
    truth = rms_norm_reference(h, weight, 1e-6)[0]
    torch.testing.assert_close(y, truth)
    for one, other in zip(found, torch.autograd.grad(truth, wanted, dy), strict=True):
        torch.testing.assert_close(one, other)
    assert grad_buffer.with_columns(found[0], 16) is not None
