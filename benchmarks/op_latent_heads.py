"""The heads of multi-head latent attention out of the projections of its latents, forward and backward."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled
from pronghorn.kernels.attention import latent_heads as op


def cases() -> list[dict[str, Any]]:
    heads = {"glm-4.7-flash": (20, 192, 64, 256), "deepseek-v3": (128, 128, 64, 128)}
    return [
        {"T": 16384, "model": name, "sizes": sizes, "pass": way}
        for name, sizes in heads.items()
        for way in ("forward", "backward")
    ]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, sizes = case["T"], op.LatentHeads(*case["sizes"], neighbours=True)
        R, heads = sizes.rotary, (sizes.heads, sizes.width)
        turns = (torch.arange(T, device=DEVICE) % 512)[:, None] * 10000.0 ** (-torch.arange(0, R, 2, device=DEVICE) / R)
        self.rows = [torch.randn(T, width, device=DEVICE, dtype=torch.bfloat16) for width in sizes.columns]
        self.grads = [torch.randn(T, *heads, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        self.rest = turns.cos().float(), turns.sin().float(), sizes
        self.forward = case["pass"] == "forward"
        self.name = f"T={T} {case['model']} bf16 {case['pass']}"
        self.moved_bytes = 2 * T * (sum(sizes.columns) + 3 * sizes.heads * sizes.width) + 4 * T * R

    def ours(self) -> Outputs:
        return (
            op.latent_heads_forward(*self.rows, *self.rest)
            if self.forward
            else op.latent_heads_backward(*self.grads, *self.rest)
        )

    def plain(self, *, wide: bool = False) -> list[torch.Tensor]:
        rows, grads = ([(x.float() if wide else x).detach() for x in given] for given in (self.rows, self.grads))
        if self.forward:
            return list(op.latent_heads_reference(*rows, *self.rest))
        with torch.enable_grad():
            return list(
                torch.autograd.grad(op.latent_heads_reference(*(x.requires_grad_() for x in rows), *self.rest), rows, grads)
            )


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls: dict[str, Any] = {"ours": data.ours, "torch": data.plain}
    if data.forward and (function := compiled(op.latent_heads_reference)) is not None:
        calls["torch.compile"] = lambda: function(*data.rows, *data.rest)
    return compare("latent_heads", data.name, calls, lambda: data.plain(wide=True), moved_bytes=data.moved_bytes)
