"""Stacks of experts with PEFT's adapters; and all the kernels of a layer together: their chain is autograd's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pronghorn.kernels.dispatch import use_triton
from pronghorn.kernels.grouped_gemm import grouped_linear_backward_bias, grouped_linear_reference
from pronghorn.kernels.grouped_lora import ExpertAdapter, ExpertGroup, grouped_lora_reference
from pronghorn.kernels.moe_combine import bias_weight_grad, combine
from pronghorn.kernels.moe_gated import ExpertActivation, expert_gated_backward, expert_gated_forward, expert_gated_reference
from pronghorn.kernels.moe_gather import gather_rows
from pronghorn.kernels.routing import route_backward, route_reference, routing_forward, sort_by_expert_reference


def adapter_of(E: int, rank: int, D: int, outputs: int, device: str, scale: float = 0.5) -> ExpertAdapter:
    A, B = torch.randn(E * rank, D, device=device) / D**0.5, torch.randn(outputs, rank * E, device=device) / rank**0.5
    return ExpertAdapter(A, B, E, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rank", "D", "outputs"), [(16, 96, 130), (4, 64, 48), (20, 40, 72)])
def test_products_and_gradients_are_as_good_as_pefts(
    device: str, judge: Callable[..., None], dtype: torch.dtype, rank: int, D: int, outputs: int
) -> None:
    if device == "cpu" and use_triton(torch.empty(1)) and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot multiply bf16")
    offsets = torch.tensor([0, 9, 9, 50], dtype=torch.int32, device=device)
    S, E = 50, 3
    adapter, weight = adapter_of(E, rank, D, outputs, device), torch.randn(E, outputs, D, device=device).to(dtype) / D**0.5
    x, dy = torch.randn(S, D, device=device).to(dtype), torch.randn(S, outputs, device=device).to(dtype)
    results = []
    for kind in (torch.float64, dtype):
        A, B = (part.to(kind, copy=True).requires_grad_() for part in (adapter.A, adapter.B))
        leaf = x.to(kind, copy=True).requires_grad_()
        y = grouped_lora_reference(leaf, weight.to(kind), ExpertAdapter(A, B, E, adapter.scale), offsets)
        results.append([y.detach(), *torch.autograd.grad(y, (leaf, A, B), dy.to(kind))])
    group = ExpertGroup(weight, adapter)
    assert torch.equal(group.weight_view(), weight)
    x_ext = torch.empty(S, group.input_width, dtype=dtype, device=device)
    dy_ext = torch.empty(S, group.grad_width, dtype=dtype, device=device)
    x_ext[:, :D], dy_ext[:, :outputs] = x, dy
    xa, dyb = group.extend(x_ext, offsets), group.extend_grad(dy_ext, offsets)
    y, dx = group.forward(x_ext, offsets), group.backward_input(dy_ext, offsets)
    assert group.adapters is not None
    for part in (slice(0, 20), slice(20, S)):  # two micro-batches: the sums add up
        own = (offsets.clamp(part.start, part.stop) - part.start).int()
        group.adapters.add_grads(dy[part], dyb[part], x[part], xa[part], own)
    dA, dB = group.adapters.grads()
    for name, ours, true, theirs in zip(("y", "dx", "dA", "dB"), (y, dx, dA, dB), *results, strict=True):
        judge(ours.to(dtype), theirs, true, name)
    adapter.B.mul_(2)
    group.refresh()
    doubled = group.forward(x_ext, offsets)
    judge(doubled - grouped_linear_reference(x, weight, offsets), 2 * (y - grouped_linear_reference(x, weight, offsets)),
          2 * (results[0][0] - grouped_linear_reference(x.double(), weight.double(), offsets)), "refreshed")  # fmt: skip


def test_peft_layout(device: str) -> None:
    """Against PEFT's own einsum (ParamWrapper.get_delta_weight)."""
    adapter = adapter_of(3, 4, 10, 6, device)
    expected = torch.einsum("o r e, e r i -> e o i", adapter.B.view(6, 4, 3), adapter.A.view(3, 4, 10))
    A, B = adapter.by_expert()
    torch.testing.assert_close(torch.bmm(B, A), expected)


def test_without_an_adapter_nothing_is_copied(device: str) -> None:
    weight = torch.randn(2, 8, 12, device=device).transpose(1, 2)
    group = ExpertGroup(weight)
    assert group.M.data_ptr() == weight.data_ptr()
    offsets, x = torch.tensor([0, 2, 5], dtype=torch.int32, device=device), torch.randn(5, 8, device=device)
    torch.testing.assert_close(group.forward(x, offsets), grouped_linear_reference(x, weight, offsets))
    assert group.extend(x, offsets).shape == (5, 0)


# ---- a whole layer -----------------------------------------------------------------------------------------------------------

T, D, F, E, K, RANK = 23, 48, 40, 5, 2, 8
KINDS = {"gpt-oss": (True, ExpertActivation("clamped", limit=1.5)), "qwen": (False, ExpertActivation("silu"))}


def plain_layer(x: Tensor, parts: dict[str, Tensor], family: str) -> Tensor:
    normalise, activation = KINDS[family]
    weights, ids = route_reference(x @ parts["router"].T, K, normalise=normalise)
    order, inverse, offsets = sort_by_expert_reference(ids, E)
    rows = x[(order // K).long()]
    gate_up = ExpertAdapter(parts["A1"], parts["B1"], E, 0.5)
    down = ExpertAdapter(parts["A2"], parts["B2"], E, 2.0)
    gu = grouped_lora_reference(rows, parts["gate_up"], gate_up, offsets, parts["bias1"])
    y = grouped_lora_reference(expert_gated_reference(gu, activation), parts["down"], down, offsets, parts["bias2"])
    return (y[inverse.long()] * weights[..., None]).sum(1)


def our_layer(x: Tensor, dout: Tensor, parts: dict[str, Tensor], family: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The kernels as a layer's hand-written passes call them."""
    normalise, activation = KINDS[family]
    first = ExpertGroup(parts["gate_up"], ExpertAdapter(parts["A1"], parts["B1"], E, 0.5))
    second = ExpertGroup(parts["down"], ExpertAdapter(parts["A2"], parts["B2"], E, 2.0))
    assert first.adapters is not None
    assert second.adapters is not None
    logits = x @ parts["router"].T
    routing = routing_forward(logits, K, normalise=normalise)
    order, offsets, S = routing.order_S, routing.offsets_E1, T * K
    biased: dict[str, Any] = {"bias_EG": parts["bias1"], "ids_TK": routing.ids_TK}

    x_ext = gather_rows(x, order, K, offsets, first.A_ERD)
    gu = first.forward(x_ext, offsets)
    a_ext = torch.empty(S, second.input_width, dtype=x.dtype, device=x.device)
    expert_gated_forward(gu, activation, order_S=order, out=a_ext[:, :F], **biased)
    aa = second.extend(a_ext, offsets)
    out = combine(second.forward(a_ext, offsets), routing.inverse_TK, routing.weights_TK, bias_ED=parts["bias2"],
                  ids_TK=routing.ids_TK)  # fmt: skip

    dy_ext = gather_rows(dout, order, K, offsets, second.sB_EOR.transpose(1, 2))
    da = second.backward_input(dy_ext, offsets)
    dgu_ext = torch.empty(S, first.grad_width, dtype=x.dtype, device=x.device)
    _, dweights, wa = expert_gated_backward(da, gu, activation, order, weights_TK=routing.weights_TK,
                                            out=dgu_ext[:, : 2 * F], **biased)  # fmt: skip
    assert dweights is not None
    assert wa is not None
    w_S = routing.weights_TK.view(-1)[order.long()][:, None]
    second.adapters.add_grads(dy_ext[:, :D], dy_ext[:, D:], wa, (aa * w_S).to(x.dtype), offsets)
    dgub = first.extend_grad(dgu_ext, offsets)
    first.adapters.add_grads(dgu_ext[:, : 2 * F], dgub, x_ext[:, :D], x_ext[:, D:], offsets)
    dweights += bias_weight_grad(dout, parts["bias2"], routing.ids_TK)
    dlogits = route_backward(dweights, logits, routing.weights_TK, routing.ids_TK, normalise=normalise)
    dx = combine(first.backward_input(dgu_ext, offsets), routing.inverse_TK, add_TD=dlogits @ parts["router"])
    grads = dict(zip(("A1", "B1", "A2", "B2"), (*first.adapters.grads(), *second.adapters.grads()), strict=True))
    grads["router"] = dlogits.T @ x
    grads["gate_up"] = first.backward_weight(dgu_ext[:, : 2 * F], x_ext[:, :D], offsets)
    grads["down"] = second.backward_weight(dy_ext[:, :D], wa, offsets)
    grads["bias1"] = grouped_linear_backward_bias(dgu_ext[:, : 2 * F], offsets)
    grads["bias2"] = grouped_linear_backward_bias(dy_ext[:, :D], offsets, weights_TK=routing.weights_TK, order_S=order)
    return out, dx, grads


@pytest.mark.parametrize("family", KINDS)
def test_the_kernels_of_a_layer_make_autograds_gradients(device: str, family: str) -> None:
    shapes = {
        "router": (E, D), "gate_up": (E, 2 * F, D), "down": (E, D, F), "bias1": (E, 2 * F), "bias2": (E, D),
        "A1": (E * RANK, D), "B1": (2 * F, RANK * E), "A2": (E * RANK, F), "B2": (D, RANK * E),
    }  # fmt: skip
    parts = {name: torch.randn(shape, device=device) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    parts["router"][2] -= 100 * parts["router"].mean(0)  # an unloved expert
    x, dout = torch.randn(T, D, device=device), torch.randn(T, D, device=device)
    leaves = {name: part.double().requires_grad_() for name, part in parts.items()}
    leaf = x.double().requires_grad_()
    expected = plain_layer(leaf, leaves, family)
    true = torch.autograd.grad(expected, [leaf, *leaves.values()], dout.double())
    out, dx, grads = our_layer(x, dout, parts, family)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx.double(), true[0], rtol=1e-4, atol=2e-5)
    for name, wanted in zip(leaves, true[1:], strict=True):
        assert torch.allclose(grads[name].double(), wanted, rtol=1e-4, atol=5e-5), name
