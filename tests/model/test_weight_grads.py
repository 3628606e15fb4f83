"""Gradients of trained linears: handed out, or added to `.grad` in place, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pronghorn.model.layers.lora_modules import weight_and_bias_grads

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def linears(device: str, dtype: torch.dtype) -> list[nn.Linear]:
    torch.manual_seed(0)
    made = [nn.Linear(24, 16), nn.Linear(24, 40, bias=False), nn.Linear(24, 8)]
    made[2].weight.requires_grad_(False)
    return [one.to(device, dtype) for one in made]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("weights", "rows"), [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
)
def test_in_place_adds_what_is_handed_out_otherwise(weights: torch.dtype, rows: torch.dtype, device: str) -> None:
    group = linears(device, weights)
    torch.manual_seed(1)
    batches = [(torch.randn(50, 24, device=device).to(rows), torch.randn(50, 64, device=device).to(rows)) for _ in range(2)]
    for linear in group[:2]:
        linear.weight.grad = torch.zeros_like(linear.weight)
    truth = [torch.zeros(linear.weight.shape, dtype=torch.float64, device=device) for linear in group]
    for x, dy in batches:
        parts = dy.split([16, 40, 8], dim=1)
        handed = weight_and_bias_grads(group, parts, x, in_place=False)
        added = weight_and_bias_grads(group, parts, x, in_place=True)
        assert [grad is None for grad in handed] == [False, False, True, False, False]  # weights, then biases
        assert [grad is None for grad in added] == [True, True, True, False, False]
        assert all(
            torch.equal(one, other)
            for one, other in zip(handed[3:], added[3:], strict=True)
            if one is not None and other is not None
        )
        truth = [total + part.double().T @ x.double() for total, part in zip(truth, parts, strict=True)]
    slack = 1e-5 if weights == torch.float32 else 2**-7
    for linear, total in zip(group[:2], truth, strict=False):
        torch.testing.assert_close(linear.weight.grad.double(), total, rtol=slack, atol=slack * float(total.abs().max()))
