"""The gated delta rule of Qwen3.5 over packed documents, forward and backward, beside the same chunks in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare
from pronghorn.kernels.delta import delta_rule as op
from pronghorn.kernels.delta.delta_chunks import chunk_table
from pronghorn.kernels.delta.delta_inputs import Heads
from pronghorn.kernels.delta.delta_rule_torch import backward_torch, inverse_torch, put_rows, scan_torch

HEADS = {"9B": Heads(16, 128, 32, 128), "27B": Heads(16, 128, 48, 128)}


def cases() -> list[dict[str, Any]]:
    sizes = [("9B", 207), ("9B", 4096), ("9B", 16384), ("27B", 207)]
    return [
        {"T": 16384, "model": model, "mean": mean, "pass": name} for model, mean in sizes for name in ("forward", "backward")
    ]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, heads, self.forward = case["T"], HEADS[case["model"]], case["pass"] == "forward"
        q, k, v = heads.split(torch.randn(T, heads.columns, device=DEVICE))
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        self.g = -torch.rand(T, heads.N, device=DEVICE) * torch.linspace(0.02, 4, heads.N, device=DEVICE)
        self.beta = torch.rand(T, heads.N, device=DEVICE)
        self.qkv = [x.to(torch.bfloat16).contiguous() for x in (q, k, v)]
        self.do = torch.randn_like(self.qkv[2])
        bounds = torch.tensor([*range(0, T, case["mean"]), T], dtype=torch.int32, device=DEVICE)
        self.where = chunk_table(bounds, T), bounds
        self.R = op.delta_rule_forward(*self.qkv, self.g, self.beta, *self.where)[1]
        J, K, N, _ = heads
        self.name = f"T={T} heads {J}/{N} of {K} documents of {case['mean']} bf16 {case['pass']}"
        self.flops = op.operations(self.qkv[0], self.qkv[2], forward=self.forward)

    def ours(self) -> Outputs:
        if self.forward:
            return [op.delta_rule_forward(*self.qkv, self.g, self.beta, *self.where)[0]]
        return list(op.delta_rule_backward(self.do, *self.qkv, self.g, self.beta, self.R, *self.where))

    def plain(self, *, wide: bool = False) -> list[torch.Tensor]:
        q, k, v, do = ((x.float() if wide else x) for x in (*self.qkv, self.do))
        R = inverse_torch(k, self.g, self.beta, *self.where) if wide or self.forward else self.R
        if self.forward:
            return [put_rows(scan_torch(q, k, v, self.g, self.beta, R, *self.where).o, torch.empty_like(v), *self.where)]
        outs = tuple(torch.empty_like(x) for x in (q, k, v, self.g, self.beta))
        backward_torch(do, q, k, v, self.g, self.beta, R, *self.where, outs)
        return list(outs)


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls: dict[str, Any] = {"ours": data.ours, "torch": data.plain}
    return compare("delta_rule", data.name, calls, lambda: data.plain(wide=True), flops=data.flops)
