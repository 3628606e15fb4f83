"""Choice of experts, weights and the sort, together; beside it the torch calls that transformers' grouped experts make."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.moe_sizes import layer_of, moe_cases
from benchmarks.ops import Line, compare
from pronghorn.kernels.moe.routing import route_backward, routing_forward


def cases() -> list[dict[str, Any]]:
    return moe_cases(**{"pass": ["forward", "backward"]})


def _plain(logits: torch.Tensor, K: int) -> list[torch.Tensor]:
    E = logits.shape[1]
    weights, ids = torch.topk(torch.softmax(logits, dim=-1), K, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    found, order = torch.sort(ids.reshape(-1), stable=True)
    counts = torch.histc(found.int() if found.is_cuda else found.float(), bins=E, min=0, max=E - 1)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return [weights, order, inverse, torch.cumsum(counts, dim=0, dtype=torch.int32)]


def run(case: dict[str, Any]) -> list[Line]:
    layer = layer_of(case)
    logits, routing = layer.logits_TE, layer.routing
    if case["pass"] == "backward":
        grad = torch.randn_like(routing.weights_TK)
        leaf = logits.clone().requires_grad_()
        values = torch.softmax(leaf.gather(1, routing.ids_TK.long()), dim=-1)
        calls: dict[str, Any] = {
            "ours": lambda: [route_backward(grad, logits, routing.weights_TK, routing.ids_TK, normalise=True)],
            "torch": lambda: list(torch.autograd.grad(values, leaf, grad, retain_graph=True)),
        }
        return compare("routing", f"{layer.name} backward", calls, calls["torch"], moved_bytes=2 * logits.nbytes)

    def ours() -> list[torch.Tensor]:
        found = routing_forward(logits, layer.K, normalise=True)
        return [found.weights_TK, found.order_S, found.inverse_TK.view(-1), found.offsets_E1[1:]]

    calls = {"ours": ours, "torch": lambda: _plain(logits, layer.K)}
    moved = logits.nbytes + 5 * 4 * layer.rows  # weights, ids twice, order, inverse
    return compare("routing", f"{layer.name} forward", calls, calls["torch"], moved_bytes=moved)
