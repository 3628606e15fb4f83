"""A stack of experts with adapters: extra columns in one grouped product, against the frozen product alone and against the
adapters as products of their own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from benchmarks.moe_sizes import RANK, layer_of, moe_cases
from benchmarks.ops import Line, compare
from pronghorn.kernels.moe.grouped_gemm import grouped_linear_forward, grouped_linear_reference
from pronghorn.kernels.moe.grouped_lora import ExpertAdapter, ExpertGroup
from pronghorn.kernels.moe.moe_gather import gather_rows, gather_rows_reference


def cases() -> list[dict[str, Any]]:
    return moe_cases(product=["gate_up", "down"], **{"pass": ["forward", "backward", "adapter gradients"]})


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        layer = self.layer = layer_of(case)
        width, outputs = (layer.D, 2 * layer.F) if case["product"] == "gate_up" else (layer.F, layer.D)
        self.sizes = width, outputs
        self.offsets, self.order = layer.routing.offsets_E1, layer.routing.order_S
        A, B = (layer.random(*shape, scale=0.02).float() for shape in ((layer.E * RANK, width), (outputs, RANK * layer.E)))
        self.group = ExpertGroup(layer.random(layer.E, outputs, width, scale=width**-0.5), ExpertAdapter(A, B, layer.E, 1.0))
        self.x, self.dy = (layer.random(layer.rows, size) for size in (self.group.input_width, self.group.grad_width))
        self.group.extend(self.x, self.offsets)
        self.group.extend_grad(self.dy, self.offsets)
        self.name = f"{layer.name} {case['product']} r={RANK} {case['pass']}"
        self.flops = 2 * layer.rows * width * outputs

    def extended(self) -> torch.Tensor:
        self.group.extend(self.x, self.offsets)
        return self.group.forward(self.x, self.offsets)

    def apart(self) -> torch.Tensor:
        width, _ = self.sizes
        y = grouped_linear_forward(self.x[:, :width].contiguous(), self.group.weight_view(), self.offsets)
        thin = grouped_linear_forward(self.x[:, :width], self.group.A_ERD, self.offsets)
        return y.add_(grouped_linear_forward(thin, self.group.sB_EOR, self.offsets))

    def frozen(self) -> torch.Tensor:
        return grouped_linear_forward(self.x[:, : self.sizes[0]], self.group.weight_view(), self.offsets)

    def backward(self) -> torch.Tensor:
        self.group.extend_grad(self.dy, self.offsets)
        return self.group.backward_input(self.dy, self.offsets)

    def gradients(self) -> list[torch.Tensor]:
        assert self.group.adapters is not None
        for sums in self.group.adapters.make_sums():
            sums.zero_()
        (width, outputs), dy, x = self.sizes, self.dy, self.x
        self.group.adapters.add_grads(dy[:, :outputs], dy[:, outputs:], x[:, :width], x[:, width:], self.offsets)
        return list(self.group.adapters.grads())

    def truth(self, name: str) -> list[torch.Tensor]:
        """In fp32: the adapters' product added to the weight, as PEFT does; gradients by a loop."""
        width, outputs = self.sizes
        x, dy = self.x.float(), self.dy.float()
        if name == "adapter gradients":
            pairs = [(dy[:, outputs:], x[:, :width]), (x[:, width:], dy[:, :outputs])]
            sums = [torch.stack([thin[start:stop].T @ wide[start:stop] for start, stop in pairwise(self.offsets.tolist())])
                    for thin, wide in pairs]  # fmt: skip
            return [sums[0].flatten(0, 1), sums[1].permute(2, 1, 0).flatten(1)]
        weight = self.group.weight_view().float() + torch.bmm(self.group.sB_EOR.float(), self.group.A_ERD.float())
        if name == "forward":
            return [grouped_linear_reference(x[:, :width], weight, self.offsets)]
        return [grouped_linear_reference(dy[:, :outputs], weight.transpose(1, 2), self.offsets)]


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    truth = data.truth(case["pass"])
    calls: dict[str, Any] = {"ours": data.gradients}
    if case["pass"] == "adapter gradients":
        return compare("grouped_lora", data.name, calls, lambda: truth, moved_bytes=data.x.nbytes + data.dy.nbytes)
    if case["pass"] == "backward":
        calls = {"ours": lambda: [data.backward()]}
        return compare("grouped_lora", data.name, calls, lambda: truth, flops=data.flops)
    calls = {"ours": lambda: [data.extended()], "adapters apart": lambda: [data.apart()]}
    lines = compare("grouped_lora", data.name, calls, lambda: truth, flops=data.flops)
    plain, K = data.frozen(), data.layer.K
    lines += compare("grouped_lora", data.name, {"frozen product alone": data.frozen}, lambda: plain, flops=data.flops)
    if case["product"] == "gate_up":
        tokens, A = data.layer.random(data.layer.T, data.layer.D), data.group.A_ERD
        rows = gather_rows_reference(tokens, data.order, K, data.offsets, A)
        calls = {"gather with x A^T": lambda: gather_rows(tokens, data.order, K, data.offsets, A)}
        lines += compare("grouped_lora", data.name, calls, lambda: rows, moved_bytes=2 * rows.nbytes)
        calls = {"gather": lambda: gather_rows(tokens, data.order, K)}
        lines += compare("grouped_lora", data.name, calls, lambda: rows[:, : data.layer.D], moved_bytes=2 * rows.nbytes)
    return lines
