"""Grouped products: error against float64 truth at most twice a loop's over experts, for any load of the experts."""

from __future__ import annotations

import pytest
import torch
from kernel_parts import Judge, strided, truth_and_plain

from pronghorn.kernels.moe.grouped_gemm import (
    grouped_linear,
    grouped_linear_backward_bias,
    grouped_linear_backward_input,
    grouped_linear_backward_weight,
    grouped_linear_forward,
    grouped_linear_reference,
)
from pronghorn.kernels.runtime.dispatch import use_triton

LOADS = {"odd": [0, 1, 70, 83], "empty": [0, 0, 0, 37, 37], "one": [0, 0, 131], "single": [0, 3]}
SIZES = [(64, 96), (40, 130), (16, 33)]  # D, outputs
# Every load with every size, and every dtype with every load and every size.
# Loads and sizes meet in the tiles' borders: each load with two of the three sizes, and in each dtype.
CASES = [(torch.float32, load, SIZES[(i + 1) % 3]) for i, load in enumerate(LOADS)]
CASES += [(dtype, load, SIZES[i % 3]) for i, load in enumerate(LOADS) for dtype in (torch.bfloat16, torch.float16)]


def can_multiply(device: str, dtype: torch.dtype) -> bool:
    """Triton's interpreter cannot multiply bf16."""
    return device == "cuda" or dtype != torch.bfloat16 or not use_triton(torch.empty(1))


@pytest.mark.parametrize(("dtype", "load", "size"), CASES, ids=str)
def test_all_products_are_as_good_as_a_loop(
    device: str, judge: Judge, dtype: torch.dtype, load: str, size: tuple[int, int]
) -> None:
    if not can_multiply(device, dtype):
        pytest.skip("the interpreter cannot multiply bf16")
    (D, outputs), bounds = size, LOADS[load]
    S, E = bounds[-1], len(bounds) - 1
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    x, dy = strided(S, D, 8, dtype, device), strided(S, outputs, 8, dtype, device)
    if D == 40:
        weight = torch.randn(E, D, outputs, device=device).to(dtype).transpose(1, 2)  # gpt-oss's way round
    else:
        weight = strided(E * outputs, D, 8, dtype, device).unflatten(0, (E, outputs))
    bias = torch.randn(E, outputs, device=device).to(dtype)
    results = truth_and_plain(lambda x, w, b: grouped_linear_reference(x, w, offsets, b), [x, weight, bias], [dy])
    out = torch.full((S, outputs + 3), float("nan"), dtype=dtype, device=device)
    found = [
        grouped_linear_forward(x, weight, offsets, bias, out=out[:, :outputs]),
        grouped_linear_backward_input(dy, weight, offsets),
        grouped_linear_backward_weight(dy, x, offsets), grouped_linear_backward_bias(dy, offsets),
    ]  # fmt: skip
    for name, ours, true, theirs in zip(("y", "dx", "dW", "db"), found, *results, strict=True):
        judge(ours, theirs, true, name)
    assert out[:, outputs:].isnan().all()
    plain = grouped_linear_forward(x, weight, offsets)
    judge(plain, results[1][0] - bias.repeat_interleave(offsets.diff().long(), 0),
          results[0][0] - bias.double().repeat_interleave(offsets.diff().long(), 0), "without bias")  # fmt: skip


def test_rows_are_gathered_inside(device: str) -> None:
    T, K, D, outputs = 17, 2, 48, 70
    offsets = torch.tensor([0, 5, 5, 34], dtype=torch.int32, device=device)
    order = torch.randperm(T * K, device=device).int()
    x, weight = torch.randn(T, D, device=device), torch.randn(3, outputs, D, device=device)
    expected = grouped_linear_reference(x[(order // K).long()], weight, offsets)
    torch.testing.assert_close(grouped_linear_forward(x, weight, offsets, order_S=order, K=K), expected)


def test_a_product_can_be_added(device: str) -> None:
    """The adapters' second product, onto one that torch made in FP8."""
    offsets = torch.tensor([0, 9, 9, 30], dtype=torch.int32, device=device)
    x, weight, y = (torch.randn(size, device=device) for size in ((30, 16), (3, 70, 16), (30, 70)))
    expected = y + grouped_linear_reference(x, weight, offsets)
    torch.testing.assert_close(grouped_linear_forward(x, weight, offsets, out=y, add=True), expected)


def test_weight_gradients_add_up_in_any_layout(device: str) -> None:
    """dA [E, R, D] of an adapter, as the transpose of what the product makes, on top of what is there; summed in fp32."""
    offsets = torch.tensor([0, 9, 9, 30], dtype=torch.int32, device=device)
    thin, wide = torch.randn(30, 16, device=device).half(), torch.randn(30, 50, device=device).half()
    sums = torch.randn(3, 16, 50, device=device)
    expected = sums.double().clone()
    for expert, (start, stop) in enumerate(((0, 9), (9, 9), (9, 30))):
        expected[expert] += thin[start:stop].double().T @ wide[start:stop].double()
    grouped_linear_backward_weight(wide, thin, offsets, out=sums.transpose(1, 2), add=True)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-5)


def test_bias_gradient_can_be_weighted(device: str) -> None:
    offsets, order = torch.tensor([0, 3, 8], dtype=torch.int32, device=device), torch.randperm(8, device=device).int()
    dy, weights = torch.randn(8, 70, device=device), torch.rand(4, 2, device=device)
    weighted = dy * weights.view(-1)[order.long()][:, None]
    found = grouped_linear_backward_bias(dy, offsets, weights_TK=weights, order_S=order)
    torch.testing.assert_close(found, torch.stack([weighted[:3].sum(0), weighted[3:].sum(0)]))


def test_autograd_and_determinism(device: str) -> None:
    offsets = torch.tensor([0, 11, 40], dtype=torch.int32, device=device)
    x, weight, bias = (torch.randn(size, device=device, requires_grad=True) for size in ((40, 24), (2, 20, 24), (2, 20)))
    ours = torch.autograd.grad(grouped_linear(x, weight, offsets, bias).square().sum(), (x, weight, bias))
    again = torch.autograd.grad(grouped_linear(x, weight, offsets, bias).square().sum(), (x, weight, bias))
    theirs = torch.autograd.grad(grouped_linear_reference(x, weight, offsets, bias).square().sum(), (x, weight, bias))
    for mine, twice, other in zip(ours, again, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-4)
        assert torch.equal(mine, twice)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_torch_and_triton_agree_in_a_graph_without_the_host() -> None:
    """Captured with one load, replayed with another; extra columns beside the rows, an expert without rows."""
    E, outputs, D, S = 8, 192, 320, 1024
    x, dy = strided(S, D, 8, torch.bfloat16, "cuda"), strided(S, outputs, 8, torch.bfloat16, "cuda")
    weight = torch.randn(E, outputs, D, device="cuda").bfloat16() / 16
    offsets = torch.arange(0, S + 1, S // E, dtype=torch.int32, device="cuda")

    def calls() -> list[torch.Tensor]:
        return [grouped_linear_forward(x, weight, offsets), grouped_linear_backward_input(dy, weight, offsets),
                grouped_linear_backward_weight(dy, x, offsets)]  # fmt: skip

    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = calls()
        offsets.copy_(torch.tensor([0, 0, 17, 500, 500, 501, 800, 1000, S], dtype=torch.int32).pin_memory(), non_blocking=True)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    leaves = [x.float().requires_grad_(), weight.float().requires_grad_()]
    y = grouped_linear_reference(leaves[0], leaves[1], offsets)
    expected = [y, *torch.autograd.grad(y, leaves, dy.float())]
    for ours, true in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), true, rtol=2e-2, atol=2e-2 * float(true.abs().max()))
