"""The gated short convolution of LFM2 over packed documents, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled
from pronghorn.kernels.attention.attention_torch import spans
from pronghorn.kernels.conv import short_conv as op


def cases() -> list[dict[str, Any]]:
    passes = ("forward", "backward", "backward, taps trained")
    return [{"T": T, "D": D, "pass": name} for T, D in [(16384, 2048), (16384, 1024)] for name in passes]  # 1.2B, 350M


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, D = case["T"], case["D"]
        self.bcx = torch.randn(T, 3 * D, device=DEVICE, dtype=torch.bfloat16)
        self.dy = torch.randn(T, D, device=DEVICE, dtype=torch.bfloat16)
        self.taps = torch.randn(D, 3, device=DEVICE, dtype=torch.bfloat16)
        bounds = torch.tensor([*range(0, T, 207), T], dtype=torch.int32, device=DEVICE)
        self.spans = spans(bounds, T)
        self.trains, self.forward = case["pass"].endswith("trained"), case["pass"] == "forward"
        self.name = f"T={T} D={D} W=3 bf16 {case['pass']}"
        self.moved_bytes = (4 if self.forward else 7) * T * D * 2

    def ours(self) -> Outputs:
        if self.forward:
            return [op.short_conv_forward(self.bcx, self.taps, self.spans)]
        found = op.short_conv_backward(self.dy, self.bcx, self.taps, self.spans, need_taps=self.trains)
        return [each for each in found if each is not None]

    def plain(self, *, wide: bool = False) -> list[torch.Tensor]:
        bcx, taps, dy = ((x.float() if wide else x).detach() for x in (self.bcx, self.taps, self.dy))
        if self.forward:
            return [op.short_conv_reference(bcx, taps, self.spans)]
        leaves = [bcx.requires_grad_(), *([taps.requires_grad_()] if self.trains else [])]
        with torch.enable_grad():
            return list(torch.autograd.grad(op.short_conv_reference(bcx, taps, self.spans), leaves, dy))


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls: dict[str, Any] = {"ours": data.ours, "torch": data.plain}
    if data.forward and (function := compiled(op.short_conv_reference)) is not None:
        calls["torch.compile"] = lambda: [function(data.bcx, data.taps, data.spans)]
    return compare("short_conv", data.name, calls, lambda: data.plain(wide=True), moved_bytes=data.moved_bytes)
