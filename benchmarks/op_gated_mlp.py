"""The gated activation between an MLP's projections, forward and backward (which makes the activation again)."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled, peer, replaced
from pronghorn.kernels.mlp import gated_mlp as op


def cases() -> list[dict[str, Any]]:
    sizes = [(16384, 14336), (16384, 8192), (8192, 17408)]  # Llama-3.1-8B, Llama-3.2-1B, Qwen3-14B
    kinds = [("silu", "forward"), ("silu", "backward"), ("silu", "backward in place"), ("gelu_tanh", "forward"),
             ("gelu_tanh", "backward")]  # fmt: skip
    return [{"T": T, "F": F, "kind": kind, "pass": name} for T, F in sizes for kind, name in kinds]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, F = case["T"], case["F"]
        self.gu = torch.randn(T, 2 * F, device=DEVICE, dtype=torch.bfloat16)
        self.da = torch.randn(T, F, device=DEVICE, dtype=torch.bfloat16)
        self.scratch = torch.empty_like(self.gu)
        self.name = f"T={T} F={F} bf16 {case['kind']} {case['pass']}"
        self.moved_bytes = (3 if case["pass"] == "forward" else 6) * T * F * 2


def _ours(case: dict[str, Any], data: _Data) -> Outputs:
    kind = case["kind"]
    if case["pass"] == "forward":
        return [op.gated_activation_forward(data.gu, kind)]
    if case["pass"] == "backward":
        return op.gated_activation_backward(data.da, data.gu, kind)
    # In place: gu is used up, so repeats run on what is left of it; the time does not depend on the values.
    return op.gated_activation_backward(data.da, data.scratch, kind, out=data.scratch)


def _plain_forward(gu: torch.Tensor, kind: op.Kind) -> list[torch.Tensor]:
    return [op.gated_activation_reference(gu, kind)]


def _plain_backward(da: torch.Tensor, gu: torch.Tensor, kind: op.Kind) -> list[torch.Tensor]:
    gate, up = gu.float().chunk(2, dim=-1)
    activated, derivative = op._activation_torch(gate, kind)
    grad = da.float()
    return [torch.cat([grad * up * derivative, grad * activated], dim=-1).to(gu.dtype), (activated * up).to(gu.dtype)]


def _plain(case: dict[str, Any], data: _Data, *, wide: bool = False, through_compile: bool = False) -> Any:
    gu, da = (data.gu.float(), data.da.float()) if wide else (data.gu, data.da)
    function: Any = _plain_forward if case["pass"] == "forward" else _plain_backward
    arguments = (gu, case["kind"]) if case["pass"] == "forward" else (da, gu, case["kind"])
    function = compiled(function) if through_compile else function
    return None if function is None else lambda: function(*arguments)


def _liger(case: dict[str, Any], data: _Data) -> Any:
    """Liger takes gate and up apart, contiguous; its backward overwrites them, so only the forward is compared."""
    if case["pass"] != "forward":
        return None
    if case["kind"] == "silu":
        function = peer("liger_kernel.ops.swiglu", "swiglu_forward")
    else:
        function = peer("liger_kernel.ops.geglu", "geglu_forward")
    if function is None:
        return None
    gate, up = (half.contiguous() for half in data.gu.chunk(2, dim=-1))

    def call() -> list[torch.Tensor]:
        outputs = function(gate, up)
        return [outputs if isinstance(outputs, torch.Tensor) else outputs[-1]]

    return call


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    in_place = case["pass"] == "backward in place"
    calls: dict[str, Any] = {"ours": lambda: _ours(case, data)}
    if in_place:
        data.scratch.copy_(data.gu)
    else:
        calls |= {
            "torch": _plain(case, data),
            "torch.compile": _plain(case, data, through_compile=True),
            "liger": _liger(case, data),
        }
    return compare("gated_mlp", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    lines = []
    for tile in op.CONFIGS:
        data.scratch.copy_(data.gu)
        name = "_forward_tile" if case["pass"] == "forward" else "_backward_tile"
        with replaced(op, name, lambda *_, tile=tile: tile):
            calls = {f"columns {tile.columns} warps {tile.warps}": lambda: _ours(case, data)}
            lines += compare("gated_mlp", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)
    return lines
