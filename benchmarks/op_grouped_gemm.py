"""Grouped products of a layer's experts: torch's and Triton's, a loop over the experts, and one dense product of the same size.

`ours` is what a layer gets. The loop knows the experts' loads on the host, which no training step should."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.moe_sizes import Layer, layer_of, moe_cases
from benchmarks.ops import Line, compare, replaced
from pronghorn.kernels.moe import grouped_gemm as op
from pronghorn.kernels.moe.moe_gather import gather_rows


def cases() -> list[dict[str, Any]]:
    return moe_cases(product=["gate_up", "down"], **{"pass": ["forward", "input", "weight"]})


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        self.layer: Layer = layer_of(case)
        layer = self.layer
        width, outputs = (layer.D, 2 * layer.F) if case["product"] == "gate_up" else (layer.F, layer.D)
        self.offsets, self.order = layer.routing.offsets_E1, layer.routing.order_S
        self.bounds = self.offsets.tolist()
        self.tokens = layer.random(layer.T, width)
        self.x, self.dy = gather_rows(self.tokens, self.order, layer.K), layer.random(layer.rows, outputs)
        self.weight = layer.random(layer.E, outputs, width, scale=width**-0.5)
        self.flops = 2 * layer.rows * width * outputs
        self.name = f"{layer.name} {case['product']} {case['pass']}"
        self.which: str = case["pass"]

    def product(self) -> list[torch.Tensor]:
        if self.which == "forward":
            return [op.grouped_linear_forward(self.x, self.weight, self.offsets)]
        if self.which == "input":
            return [op.grouped_linear_backward_input(self.dy, self.weight, self.offsets)]
        return [op.grouped_linear_backward_weight(self.dy, self.x, self.offsets)]

    def gathered(self) -> list[torch.Tensor]:
        with replaced(op, "_torch_can", lambda *_: False):
            return [op.grouped_linear_forward(self.tokens, self.weight, self.offsets, order_S=self.order, K=self.layer.K)]

    def gather_first(self) -> list[torch.Tensor]:
        rows = gather_rows(self.tokens, self.order, self.layer.K)
        return [op.grouped_linear_forward(rows, self.weight, self.offsets)]

    def triton(self) -> list[torch.Tensor]:
        with replaced(op, "_torch_can", lambda *_: False):
            return self.product()

    def loop(self, wide: bool = False) -> list[torch.Tensor]:
        def number(part: torch.Tensor) -> torch.Tensor:
            return part.float() if wide else part

        parts = []
        for expert, (start, stop) in enumerate(zip(self.bounds[:-1], self.bounds[1:], strict=True)):
            x, dy, weight = number(self.x[start:stop]), number(self.dy[start:stop]), number(self.weight[expert])
            parts.append(x @ weight.T if self.which == "forward" else dy @ weight if self.which == "input" else dy.T @ x)
        return [torch.stack(parts) if self.which == "weight" else torch.cat(parts)]

    def dense(self) -> torch.Tensor:
        one = self.weight[0]
        return self.x @ one.T if self.which == "forward" else self.dy @ one if self.which == "input" else self.dy.T @ self.x


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls: dict[str, Any] = {"ours": data.product, "triton": data.triton, "loop": data.loop}
    if case["pass"] == "forward" and case["product"] == "gate_up":
        calls |= {"triton, rows gathered in it": data.gathered, "gather, then ours": data.gather_first}
    lines = compare("grouped_gemm", data.name, calls, lambda: data.loop(wide=True), flops=data.flops)
    dense = data.dense()  # judged by itself: it is only the ceiling
    return lines + compare("grouped_gemm", data.name, {"one dense product": data.dense}, lambda: dense, flops=data.flops)


def sweep(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    lines = []
    for tile in op.CONFIGS:
        name = "_weight_tile" if case["pass"] == "weight" else "_tile"
        with replaced(op, name, lambda *_, tile=tile: tile):
            calls: dict[str, Any] = {"x".join(map(str, tile)): data.triton}
            lines += compare("grouped_gemm", data.name, calls, lambda: data.loop(wide=True), flops=data.flops)
    return lines
