"""FP8 both ways with a stack of experts: casts as good as plain torch's, products within what FP8 rounds."""

from __future__ import annotations

import pytest
import torch

from pronghorn.kernels.moe.grouped_fp8 import (
    Fp8ExpertGroup,
    fp8_cast_grad_rows,
    fp8_cast_grad_rows_reference,
    fp8_gather_rows,
    fp8_grouped_mm,
    fp8_grouped_supported,
    fp8_transposed_stack,
)
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_input, grouped_linear_reference
from pronghorn.kernels.moe.grouped_lora import ExpertAdapter
from pronghorn.kernels.moe.routing import sort_by_expert
from pronghorn.kernels.quant.fp8_cast import E4M3, fp8_cast_rows
from tables import table

pytestmark = pytest.mark.usefixtures("casts_as_a_gpu")


def routed(T: int, K: int, E: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, E, (T, K), dtype=torch.int32, device=device)
    ids[ids == 1] = 0  # an expert without tokens
    order, _, offsets = sort_by_expert(ids, E)
    return ids, order, offsets


@table("gather", [True, False])
@table("width", [48, 2100])
def test_gradients_are_cast_with_their_own_experts_scales(device: str, gather: bool, width: int) -> None:
    T, K, E = 6, 2, 3
    ids, order, _ = routed(T, K, E, device)
    dy = torch.randn(T if gather else T * K, width + 8, device=device).bfloat16()[:, :width]
    dy[1] = 0
    scale = torch.rand(E, width, device=device) + 0.01
    found, row_scale = fp8_cast_grad_rows(dy, scale, ids, order, gather=gather)
    expected, true_scale = fp8_cast_grad_rows_reference(dy, scale, ids, order, gather=gather)
    torch.testing.assert_close(row_scale, true_scale)
    # A product on the border between two values may be rounded the other way.
    different = (found.float() != expected.float()).float().mean()
    assert float(different) < 2e-3
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.13, atol=2**-8)


def test_tokens_are_cast_once_and_gathered(device: str) -> None:
    _, order, _ = routed(7, 2, 3, device)
    x = torch.randn(7, 64, device=device).bfloat16()
    x8, scale = fp8_gather_rows(x, order, 2)
    all8, all_scale = fp8_cast_rows(x)
    assert x8.dtype == E4M3
    assert torch.equal(x8.float(), all8.float()[(order // 2).long()])
    assert torch.equal(scale, all_scale[(order // 2).long()])


def test_both_ways(device: str) -> None:
    """Three bits behind the first in both operands: 2 to 3 % of each product's size, less in their sum."""
    if device == "cuda" and fp8_grouped_supported("cuda") is not None:
        pytest.skip("this GPU has no grouped FP8 products")
    T, K, E, D, outputs = 40, 2, 4, 128, 96
    ids, order, offsets = routed(T, K, E, device)
    weight = torch.randn(E, outputs, D, device=device) / D**0.5
    q, scale = fp8_cast_rows(weight.flatten(0, 1).bfloat16())
    q, scale = q.view(weight.shape), scale.view(E, outputs)
    dense = q.float() * scale[..., None]
    x, dy = torch.randn(T, D, device=device).bfloat16(), torch.randn(T * K, outputs, device=device).bfloat16()
    y = fp8_grouped_mm(*fp8_gather_rows(x, order, K), q, scale, offsets)
    true = grouped_linear_reference(x.float()[(order // K).long()], dense, offsets)
    assert y.dtype == torch.bfloat16
    assert float((y.float() - true).norm() / true.norm()) < 0.03
    turned = fp8_transposed_stack(q)
    assert torch.equal(turned.float(), q.float().transpose(1, 2))
    dx = fp8_grouped_mm(*fp8_cast_grad_rows(dy, scale, ids, order, gather=False), turned, None, offsets)
    true = grouped_linear_reference(dy.float(), dense.transpose(1, 2), offsets)
    assert float((dx.float() - true).norm() / true.norm()) < 0.03
    if device == "cpu":
        torch.testing.assert_close(true, grouped_linear_backward_input(dy.float(), dense, offsets))


def test_an_experts_adapter_is_added_to_both_products(device: str) -> None:
    """Against the same group without one: what is more is the adapter's own product, in 16 bits."""
    if device == "cuda" and fp8_grouped_supported("cuda") is not None:
        pytest.skip("this GPU has no grouped FP8 products")
    T, K, E, D, outputs, rank = 20, 2, 4, 64, 48, 20
    ids, order, offsets = routed(T, K, E, device)
    q, scale = fp8_cast_rows(torch.randn(E * outputs, D, device=device).bfloat16() / D**0.5)
    q, scale = q.view(E, outputs, D), scale.view(E, outputs)
    A, B = torch.randn(E * rank, D, device=device) / D**0.5, torch.randn(outputs, rank * E, device=device)
    adapter = ExpertAdapter(A, B, E, 0.5)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain, group = Fp8ExpertGroup(q, scale, None, dtype), Fp8ExpertGroup(q, scale, adapter, dtype)
    assert group.R == 32
    x, dy = torch.randn(T * K, D, device=device).to(dtype), torch.randn(T * K, outputs, device=device).to(dtype)
    x8, dy8 = fp8_cast_rows(x), fp8_cast_grad_rows(dy, scale, ids, order, gather=False)
    xa = grouped_linear_reference(x, group.A_ERD, offsets)
    dyb = grouped_linear_backward_input(dy, group.sB_EOR, offsets)
    buffer = torch.empty(group.transposed_bytes + 256, dtype=E4M3, device=device)
    A_ErD, B_EOr = adapter.by_expert()
    delta = torch.bmm(B_EOr, A_ErD) * adapter.scale
    true_y = grouped_linear_reference(x.float(), delta, offsets)
    for found, without, true in (
        (group.forward(*x8, xa, offsets), plain.forward(*x8, None, offsets), true_y),
        (
            group.backward_input(*dy8, dyb, offsets, buffer),
            plain.backward_input(*dy8, None, offsets, buffer),
            grouped_linear_reference(dy.float(), delta.transpose(1, 2), offsets),
        ),
    ):
        more = found.float() - without.float()
        assert float((more - true).norm() / true.norm()) < (2e-2 if dtype == torch.bfloat16 else 1e-4)
        assert float(true.norm()) > 0.1 * float(without.float().norm())
