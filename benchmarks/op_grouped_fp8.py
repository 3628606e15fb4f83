"""Grouped products in FP8, with the casts before them, beside bf16's; and turning a stack round for the way back."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.moe_sizes import layer_of, moe_cases
from benchmarks.ops import Line, compare
from pronghorn.kernels.moe import grouped_fp8 as op
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_input, grouped_linear_forward
from pronghorn.kernels.moe.moe_gather import gather_rows
from pronghorn.kernels.quant.fp8_cast import fp8_cast_rows


def cases() -> list[dict[str, Any]]:
    """Both with rows gathered from tokens, as gate and up's input and down's gradient are."""
    forward = moe_cases(product=["gate_up"], **{"pass": ["forward"]})
    return forward + moe_cases(product=["down"], **{"pass": ["input"]})


def run(case: dict[str, Any]) -> list[Line]:
    layer = layer_of(case)
    width, outputs = (layer.D, 2 * layer.F) if case["product"] == "gate_up" else (layer.F, layer.D)
    weight = layer.random(layer.E, outputs, width, scale=width**-0.5)
    q, scale = fp8_cast_rows(weight.flatten(0, 1))
    q, scale = q.view(weight.shape), scale.view(layer.E, outputs)
    weight = (q.float() * scale[..., None]).bfloat16()
    routing, tokens = layer.routing, layer.random(layer.T, layer.D)
    order, offsets, transposed = routing.order_S, routing.offsets_E1, op.fp8_transposed_stack(q)
    name = f"{layer.name} {case['product']} {case['pass']}"

    def eight_bits() -> torch.Tensor:
        if case["pass"] == "forward":
            return op.fp8_grouped_mm(*op.fp8_gather_rows(tokens, order, layer.K), q, scale, offsets)
        cast = op.fp8_cast_grad_rows(tokens, scale, routing.ids_TK, order, gather=True)
        return op.fp8_grouped_mm(*cast, transposed, None, offsets)

    def sixteen_bits() -> torch.Tensor:
        rows = gather_rows(tokens, order, layer.K)
        call = grouped_linear_forward if case["pass"] == "forward" else grouped_linear_backward_input
        return call(rows, weight, offsets)

    truth, flops = sixteen_bits(), 2 * layer.rows * width * outputs
    calls: dict[str, Any] = {"ours": eight_bits, "bf16": sixteen_bits}
    lines = compare("grouped_fp8", name, calls, lambda: truth, flops=flops)
    if case["pass"] == "input":
        true = q.view(torch.uint8).transpose(1, 2)
        calls = {"transposed": lambda: op.fp8_transposed_stack(q).view(torch.uint8)}
        lines += compare("grouped_fp8", name, calls, lambda: true, moved_bytes=2 * q.nbytes)
    return lines
