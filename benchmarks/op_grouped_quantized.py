"""Grouped products with experts in 4 and 8 bits: dequantized inside, and, for comparison, the whole stack first (which
takes the memory that 4 bits save)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.moe_sizes import layer_of, moe_cases
from benchmarks.ops import Line, compare, replaced
from pronghorn.kernels.moe import grouped_quantized as op
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_backward_input, grouped_linear_forward
from pronghorn.kernels.quant.fp8_cast import fp8_quantize
from pronghorn.kernels.quant.mxfp4 import mxfp4_quantize
from pronghorn.kernels.quant.nf4 import nf4_quantize
from pronghorn.kernels.quant.nvfp4 import nvfp4_quantize


def cases() -> list[dict[str, Any]]:
    more = [
        ("gpt-oss-20b", "mxfp4"),
        ("gpt-oss-20b", "nf4"),
        ("qwen3-30b-a3b", "nf4"),
        ("qwen3-30b-a3b", "nvfp4"),
        ("qwen3-30b-a3b", "fp8"),
    ]
    every = moe_cases(format=["mxfp4", "nf4", "nvfp4", "fp8"], product=["gate_up", "down"], **{"pass": ["forward", "input"]})
    return [case for case in every if (case["model"], case["format"]) in more]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        layer = layer_of(case)
        width, outputs = (layer.D, 2 * layer.F) if case["product"] == "gate_up" else (layer.F, layer.D)
        weight = layer.random(layer.E, outputs, width, scale=width**-0.5)
        self.stack = self._stack(weight, case["format"])
        self.offsets = layer.routing.offsets_E1
        self.forward: bool = case["pass"] == "forward"
        self.rows = layer.random(layer.rows, width if self.forward else outputs)
        self.name = f"{layer.name} {case['format']} {case['product']} {case['pass']}"
        self.flops = 2 * layer.rows * width * outputs

    @staticmethod
    def _stack(weight: torch.Tensor, form: str) -> op.QuantizedStack:
        quantize: dict[str, Any] = {
            "nf4": lambda weight: nf4_quantize(weight.flatten(0, 1)),
            "mxfp4": mxfp4_quantize,
            "fp8": fp8_quantize,
            "nvfp4": lambda weight: nvfp4_quantize(weight.flatten(0, 1)),
        }
        return op.QuantizedStack.of(quantize[form](weight), len(weight))

    def ours(self) -> torch.Tensor:
        call = op.grouped_quantized_forward if self.forward else op.grouped_quantized_backward
        return call(self.rows, self.stack, self.offsets)

    def _dense(self) -> torch.Tensor:
        return self.stack.stored.dequantize(dtype=torch.bfloat16).view(self.stack.shape)

    def whole(self) -> torch.Tensor:
        call = grouped_linear_forward if self.forward else grouped_linear_backward_input
        return call(self.rows, self._dense(), self.offsets)


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    truth = data.whole()
    calls: dict[str, Any] = {"ours": data.ours, "whole stack first": data.whole}
    return compare("grouped_quantized", data.name, calls, lambda: truth, flops=data.flops)


def sweep(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    truth, lines = data.whole(), []
    for tile in op.CONFIGS:
        with replaced(op, "_tile", lambda *_, tile=tile: tile):
            calls: dict[str, Any] = {"x".join(map(str, tile)): data.ours}
            lines += compare("grouped_quantized", data.name, calls, lambda: truth, flops=data.flops)
    return lines
