"""Experts in 4 and 8 bits: products as good as with the whole stack dequantized, whatever the experts' load."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_parts import Judge, truth_and_plain

from pronghorn.kernels.moe.grouped_gemm import grouped_linear_reference
from pronghorn.kernels.moe.grouped_lora import ExpertAdapter, grouped_lora_reference
from pronghorn.kernels.moe.grouped_quantized import (
    QuantizedExpertGroup,
    QuantizedStack,
    grouped_quantized_backward,
    grouped_quantized_forward,
)
from pronghorn.kernels.quant.fp8_cast import fp8_quantize
from pronghorn.kernels.quant.mxfp4 import mxfp4_quantize
from pronghorn.kernels.quant.nf4 import nf4_quantize
from pronghorn.kernels.quant.nvfp4 import nvfp4_quantize
from pronghorn.kernels.quant.stored import StoredTensor
from pronghorn.kernels.runtime.dispatch import use_triton
from tables import first_of

FORMATS = ["nf4", "nvfp4", "mxfp4", "fp8"]
LOADS = {"odd": [0, 1, 38, 45], "empty": [0, 0, 37]}
# Every dtype with every format; the first rows have each format, in the two dtypes that the interpreter multiplies.
FIRST = [(torch.float32, "nf4", "odd"), (torch.float16, "nvfp4", "empty"), (torch.float32, "mxfp4", "empty"),
         (torch.float16, "fp8", "odd")]  # fmt: skip
OTHERS = [(torch.float16, "nf4", "empty"), (torch.float32, "nvfp4", "odd"), (torch.float16, "mxfp4", "odd"),
          (torch.float32, "fp8", "empty"), *((torch.bfloat16, form, "odd") for form in FORMATS)]  # fmt: skip


def stack_of(weight: torch.Tensor, form: str, *, nested: bool = True) -> QuantizedStack:
    quantize: dict[str, Callable[[torch.Tensor], StoredTensor]] = {
        "nf4": lambda weight: nf4_quantize(weight.flatten(0, 1), nested=nested),
        "mxfp4": mxfp4_quantize,
        "fp8": fp8_quantize,
        "nvfp4": lambda weight: nvfp4_quantize(weight.flatten(0, 1)),
    }
    return QuantizedStack.of(quantize[form](weight), len(weight))


def skip_bf16(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and use_triton(torch.empty(1)) and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot multiply bf16")


@pytest.mark.parametrize(("dtype", "form", "load"), first_of([*FIRST, *OTHERS], len(FIRST)), ids=str)
def test_products_are_as_good_as_with_the_dequantized_stack(
    device: str, judge: Judge, dtype: torch.dtype, form: str, load: str
) -> None:
    skip_bf16(device, dtype)
    bounds, (D, outputs) = LOADS[load], (128, 66)
    S, E = bounds[-1], len(bounds) - 1
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    stack = stack_of(torch.randn(E, outputs, D, device=device).to(dtype) / 16, form, nested=load != "odd")
    weight = stack.dequantized(dtype)
    x, dy = torch.randn(S, D, device=device).to(dtype), torch.randn(S, outputs, device=device).to(dtype)
    results = truth_and_plain(lambda x: grouped_linear_reference(x, weight.to(x.dtype), offsets), [x], [dy])
    space = [torch.full((S, width + 3), float("nan"), dtype=dtype, device=device) for width in (outputs, D)]
    found = [grouped_quantized_forward(x, stack, offsets, out=space[0][:, :outputs]),
             grouped_quantized_backward(dy, stack, offsets, out=space[1][:, :D])]  # fmt: skip
    for name, ours, true, theirs in zip(("y", "dx"), found, *results, strict=True):
        judge(ours, theirs, true, name)
    assert space[0][:, outputs:].isnan().all()
    assert space[1][:, D:].isnan().all()
    assert torch.equal(grouped_quantized_forward(x, stack, offsets), found[0])


@pytest.mark.parametrize(("form", "rank"), first_of([("nf4", 20), ("mxfp4", 16), ("fp8", 16)]))
def test_adapters_are_in_the_same_sum(device: str, judge: Judge, form: str, rank: int) -> None:
    dtype = torch.float16
    offsets, (E, outputs, D), S = torch.tensor([0, 9, 9, 30], dtype=torch.int32, device=device), (3, 70, 128), 30
    A, B = torch.randn(E * rank, D, device=device) / D**0.5, torch.randn(outputs, rank * E, device=device) / rank**0.5
    stack = stack_of(torch.randn(E, outputs, D, device=device).to(dtype) / D**0.5, form)
    group = QuantizedExpertGroup(stack, ExpertAdapter(A, B, E, 0.5), dtype)
    x, dy = torch.randn(S, D, device=device).to(dtype), torch.randn(S, outputs, device=device).to(dtype)

    def reference(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return grouped_lora_reference(x, stack.dequantized(dtype).to(x.dtype), ExpertAdapter(A, B, E, 0.5), offsets)

    results = truth_and_plain(reference, [x, A, B], [dy])
    x_ext = torch.empty(S, group.input_width, dtype=dtype, device=device)
    dy_ext = torch.empty(S, group.grad_width, dtype=dtype, device=device)
    x_ext[:, :D], dy_ext[:, :outputs] = x, dy
    xa, dyb = group.extend(x_ext, offsets), group.extend_grad(dy_ext, offsets)
    group.adapters.add_grads(dy, dyb, x, xa, offsets)
    dA, dB = group.adapters.grads()
    found = (group.forward(x_ext, offsets), group.backward_input(dy_ext, offsets), dA, dB)
    for name, ours, true, theirs in zip(("y", "dx", "dA", "dB"), found, *results, strict=True):
        judge(ours.to(dtype), theirs, true, name)


def test_bytes_of_a_stack() -> None:
    weight = torch.randn(4, 64, 128)
    for form, most in (("nf4", 0.53), ("mxfp4", 0.54), ("fp8", 1.04)):
        assert stack_of(weight, form).stored.nbytes <= most * weight.numel()
