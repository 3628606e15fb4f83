"""The activation of an MLP without a gate, forward and backward (which makes the activation again)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled, replaced
from pronghorn.kernels.mlp import ungated_mlp as op


def cases() -> list[dict[str, Any]]:
    sizes = [("xielu", 16384, 21504), ("relu2", 16384, 18432)]  # Apertus-8B, AFM-4.5B
    passes = ("forward", "backward", "backward with alphas")
    return [
        {"T": T, "F": F, "kind": kind, "pass": name} for kind, T, F in sizes for name in passes[: 3 if kind == "xielu" else 2]
    ]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.u, self.da = (torch.randn(case["T"], case["F"], device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        alphas = [torch.tensor([value], device=DEVICE, dtype=torch.bfloat16) for value in (0.2, -1.0)]
        self.scalars = op.Scalars(*alphas) if case["kind"] == "xielu" else None
        self.name = f"T={case['T']} F={case['F']} bf16 {case['kind']} {case['pass']}"
        self.moved_bytes = (2 if case["pass"] == "forward" else 4) * self.u.numel() * 2


def _ours(case: dict[str, Any], data: _Data) -> Outputs:
    if case["pass"] == "forward":
        return [op.ungated_activation_forward(data.u, data.scalars)]
    return op.ungated_activation_backward(data.da, data.u, data.scalars, need_alpha="alphas" in case["pass"])


def _plain(case: dict[str, Any], data: _Data, *, wide: bool = False, through_compile: bool = False) -> Any:
    u, da, scalars = data.u, data.da, data.scalars
    if wide:
        u, da = u.float(), da.float()

    def forward() -> list[torch.Tensor]:
        return [op.ungated_activation_reference(u, scalars)]

    def backward() -> list[torch.Tensor | None]:
        a, derivative, *slopes = op._activation_torch(u.float(), scalars)
        sums = None
        if scalars is not None and "alphas" in case["pass"]:
            raw = torch.cat([scalars.alpha_p, scalars.alpha_n]).float()
            sums = torch.stack([(da * slope).sum() for slope in slopes]) * torch.sigmoid(raw)
        return [(da * derivative).to(u.dtype), a.to(u.dtype), sums]

    function: Any = forward if case["pass"] == "forward" else backward
    return compiled(function) if through_compile else function


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls = {
        "ours": lambda: _ours(case, data),
        "torch": _plain(case, data),
        "torch.compile": _plain(case, data, through_compile=True),
    }
    return compare("ungated_mlp", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    data, lines = _Data(case), []
    for tile in op.CONFIGS:
        with replaced(op, "_tile", lambda *_, tile=tile: tile):
            calls = {f"columns {tile.columns} warps {tile.warps}": lambda: _ours(case, data)}
            lines += compare("ungated_mlp", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)
    return lines
