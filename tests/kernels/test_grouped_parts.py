"""Parts of a stack: bit for bit the dequantized stack's; products as with the stack in whole, however many parts there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_grouped_quantized import FORMATS, stack_of

from pronghorn.kernels.moe.grouped_lora import ExpertAdapter, grouped_lora_reference
from pronghorn.kernels.moe.grouped_parts import (
    backward_parts,
    dequantize_part,
    forward_parts,
    grouped_parts_backward,
    grouped_parts_forward,
    scratch_values,
)
from pronghorn.kernels.moe.grouped_quantized import Format, QuantizedExpertGroup
from tables import table


@table("form", FORMATS)
@table("dtype", [torch.float32, torch.bfloat16])
def test_a_part_is_a_piece_of_the_stack(device: str, form: Format, dtype: torch.dtype) -> None:
    stack = stack_of(torch.randn(2, 70, 128, device=device).to(dtype), form)
    whole = stack.dequantized_reference(dtype)
    for (first, number), (column, columns) in (((0, 70), (0, 128)), ((32, 38), (64, 64))):
        buffer = torch.full((2, number, columns + 5), float("nan"), dtype=dtype, device=device)
        part = dequantize_part(stack, buffer[:, :, :columns], first, column)
        expected = whole[:, first : first + number, column : column + columns]
        if dtype == torch.bfloat16 and device == "cpu":  # the interpreter cuts digits off
            torch.testing.assert_close(part, expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(part, expected)
        assert buffer[:, :, columns:].isnan().all()


@pytest.mark.parametrize(("form", "rank", "parts"), [("nf4", 16, 2), ("mxfp4", 0, 2), ("mxfp4", 16, 1), ("fp8", 16, 3)])
def test_products_in_parts(device: str, judge: Callable[..., None], form: Format, rank: int, parts: int) -> None:
    dtype = torch.float16
    offsets, (E, outputs, D), S = torch.tensor([0, 9, 9, 30], dtype=torch.int32, device=device), (3, 96, 192), 30
    A, B = torch.randn(E * 16, D, device=device) / D**0.5, torch.randn(outputs, 16 * E, device=device) / 4
    stack = stack_of(torch.randn(E, outputs, D, device=device).to(dtype) / D**0.5, form)
    scale = 0.5 if rank else 0.0
    group = QuantizedExpertGroup(stack, ExpertAdapter(A, B, E, scale) if rank else None, dtype)
    x_ext = torch.randn(S, group.input_width, device=device).to(dtype)
    dy_ext = torch.randn(S, group.grad_width, device=device).to(dtype)
    results = []
    for kind in (torch.float64, dtype):
        leaf = x_ext[:, :D].to(kind, copy=True).requires_grad_()
        adapter = ExpertAdapter(A.to(kind), B.to(kind), E, scale)
        y = grouped_lora_reference(leaf, stack.dequantized_reference(dtype).to(kind), adapter, offsets)
        results.append([y.detach(), *torch.autograd.grad(y, leaf, dy_ext[:, :outputs].to(kind))])
    group.extend(x_ext, offsets)
    group.extend_grad(dy_ext, offsets)
    scratch = torch.full((scratch_values(group, parts),), float("nan"), dtype=dtype, device=device)
    found = (grouped_parts_forward(group, x_ext, offsets, scratch), grouped_parts_backward(group, dy_ext, offsets, scratch))
    for name, ours, true, theirs in zip(("y", "dx"), found, *results, strict=True):
        judge(ours, theirs, true, name)
    assert len(list(forward_parts(group, x_ext, offsets, scratch))) <= parts
    assert len(list(backward_parts(group, dy_ext, offsets, scratch))) <= parts


def test_a_scratch_without_room_is_told() -> None:
    group = QuantizedExpertGroup(stack_of(torch.randn(2, 64, 64), "mxfp4"), None, torch.float32)
    with pytest.raises(AssertionError, match="too small"):
        grouped_parts_forward(group, torch.randn(4, 64), torch.tensor([0, 2, 4], dtype=torch.int32), torch.empty(100))
