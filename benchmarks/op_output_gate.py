"""The gate of attention's output (Qwen3.5), forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled
from pronghorn.kernels.attention import output_gate as op


def cases() -> list[dict[str, Any]]:
    return [{"T": 16384, "N": 16, "H": 256, "pass": name} for name in ("forward", "backward")]  # 9B


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, N, H = case["T"], case["N"], case["H"]
        self.both = torch.randn(T, N, 2 * H, device=DEVICE, dtype=torch.bfloat16)
        self.o, self.dy = (torch.randn(T, N, H, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        self.out, self.grads = torch.empty_like(self.o), torch.empty_like(self.both)
        self.forward = case["pass"] == "forward"
        self.name = f"T={T} N={N} H={H} bf16 {case['pass']}"
        self.moved_bytes = (3 if self.forward else 5) * T * N * H * 2

    def ours(self) -> Outputs:
        H = self.o.shape[-1]
        gate, dgate = self.both[..., H:], self.grads[..., H:]
        if self.forward:
            return [op.output_gate_forward(self.o, gate, out=self.out)]
        return [op.output_gate_backward(self.dy, self.o, gate, out=self.out, gate_out=dgate), dgate]

    def plain(self, *, wide: bool = False) -> list[torch.Tensor]:
        o, both, dy = ((x.float() if wide else x).detach() for x in (self.o, self.both, self.dy))
        gate = both[..., o.shape[-1] :]
        if self.forward:
            return [op.output_gate_reference(o, gate)]
        leaves = [o.requires_grad_(), gate.requires_grad_()]
        with torch.enable_grad():
            return list(torch.autograd.grad(op.output_gate_reference(o, gate), leaves, dy))


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls: dict[str, Any] = {"ours": data.ours, "torch": data.plain}
    if data.forward and (function := compiled(op.output_gate_reference)) is not None:
        calls["torch.compile"] = lambda: [function(data.o, data.both[..., data.o.shape[-1] :])]
    return compare("output_gate", data.name, calls, lambda: data.plain(wide=True), moved_bytes=data.moved_bytes)
