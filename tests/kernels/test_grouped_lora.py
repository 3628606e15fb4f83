"""Stacks of experts with PEFT's adapters: products and gradients as good as PEFT's own way of computing them."""

from __future__ import annotations

import pytest
import torch
from kernel_parts import Judge, truth_and_plain

from pronghorn.kernels.moe.grouped_gemm import grouped_linear_reference
from pronghorn.kernels.moe.grouped_lora import ExpertAdapter, ExpertGroup, grouped_lora_reference
from pronghorn.kernels.runtime.dispatch import use_triton


def adapter_of(E: int, rank: int, D: int, outputs: int, device: str, scale: float = 0.5) -> ExpertAdapter:
    A, B = torch.randn(E * rank, D, device=device) / D**0.5, torch.randn(outputs, rank * E, device=device) / rank**0.5
    return ExpertAdapter(A, B, E, scale)


@pytest.mark.parametrize(
    ("dtype", "rank", "D", "outputs"),
    [
        (torch.float32, 16, 96, 130),
        (torch.bfloat16, 16, 96, 130),
        (torch.float16, 4, 64, 48),
        (torch.float32, 20, 40, 72),
        (torch.bfloat16, 20, 40, 72),
    ],
    ids=str,
)
def test_products_and_gradients_are_as_good_as_pefts(
    device: str, judge: Judge, dtype: torch.dtype, rank: int, D: int, outputs: int
) -> None:
    if device == "cpu" and use_triton(torch.empty(1)) and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot multiply bf16")
    offsets = torch.tensor([0, 9, 9, 50], dtype=torch.int32, device=device)
    S, E = 50, 3
    adapter, weight = adapter_of(E, rank, D, outputs, device), torch.randn(E, outputs, D, device=device).to(dtype) / D**0.5
    x, dy = torch.randn(S, D, device=device).to(dtype), torch.randn(S, outputs, device=device).to(dtype)

    def reference(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return grouped_lora_reference(x, weight.to(x.dtype), ExpertAdapter(A, B, E, adapter.scale), offsets)

    results = truth_and_plain(reference, [x, adapter.A, adapter.B], [dy])
    group = ExpertGroup(weight, adapter)
    assert torch.equal(group.weight_view(), weight)
    x_ext = torch.empty(S, group.input_width, dtype=dtype, device=device)
    dy_ext = torch.empty(S, group.grad_width, dtype=dtype, device=device)
    x_ext[:, :D], dy_ext[:, :outputs] = x, dy
    xa, dyb = group.extend(x_ext, offsets), group.extend_grad(dy_ext, offsets)
    y, dx = group.forward(x_ext, offsets), group.backward_input(dy_ext, offsets)
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
