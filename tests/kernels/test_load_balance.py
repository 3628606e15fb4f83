"""The load-balancing loss: transformers' own value and gradient over several layers, with and without padding."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from kernel_parts import Judge

from pronghorn.kernels.moe.load_balance import (
    add_load_balancing_grad,
    add_router_statistics,
    load_balancing_loss,
    load_balancing_loss_reference,
)
from pronghorn.kernels.moe.routing import route_reference
from tables import table

E, K, LAYERS = 12, 3, 2


@table("T", [7, 45, 70])
@table("dtype", [torch.float32, torch.bfloat16])
@table("padded", [False, True])
def test_loss_and_gradient(device: str, judge: Judge, T: int, dtype: torch.dtype, padded: bool) -> None:
    logits = [torch.randn(T, E + 2, device=device).to(dtype)[:, :E] for _ in range(LAYERS)]
    ids = [route_reference(layer, K, normalise=True)[1] for layer in logits]
    real = (torch.arange(T, device=device) < max(1, T - 9)).int() if padded else None
    rows = LAYERS * (T if real is None else int(real.sum()))
    results = []
    for kind in (torch.float64, dtype):
        leaves = [layer.detach().to(kind).requires_grad_() for layer in logits]
        loss = load_balancing_loss_reference(list(zip(leaves, ids, strict=True)), real)
        results.append([loss.detach(), *torch.autograd.grad(0.25 * loss, leaves)])
    totals = torch.zeros(2, E, device=device)
    for layer, chosen in zip(logits, ids, strict=True):
        add_router_statistics(totals, layer, chosen, real)
    before = [torch.randn(T, E, device=device).to(dtype) / 64 for _ in logits]
    found = [add_load_balancing_grad(start.clone(), layer, totals, rows, 0.25, real)
             for start, layer in zip(before, logits, strict=True)]  # fmt: skip
    torch.testing.assert_close(load_balancing_loss(totals, rows).double(), results[0][0], rtol=1e-6, atol=0)
    for ours, start, true, theirs in zip(found, before, results[0][1:], results[1][1:], strict=True):
        judge(ours, (start.float() + theirs.float()).to(dtype), start.double() + true, "dlogits")


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@table("padded", [False, True])
def test_it_is_transformers_own(device: str, padded: bool) -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = tuple(torch.randn(20, E, device=device) for _ in range(LAYERS))
    real = (torch.arange(20, device=device) < 13).int() if padded else None
    totals = torch.zeros(2, E, device=device)
    for layer in logits:
        add_router_statistics(totals, layer, route_reference(layer, K, normalise=True)[1], real)
    rows = LAYERS * (20 if real is None else real.sum())
    theirs = load_balancing_loss_func(logits, E, K, None if real is None else real.view(2, 10))
    torch.testing.assert_close(load_balancing_loss(totals, rows), theirs)
