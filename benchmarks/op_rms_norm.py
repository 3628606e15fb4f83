"""RMSNorm with residual addition: forward, backward, and the form of the sandwich norms."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, Outputs, compare, compiled, peer, replaced
from pronghorn.kernels.norm import rms_norm as op

EPS = 1e-5


def cases() -> list[dict[str, Any]]:
    widths = [(16384, 2048), (16384, 4096), (8192, 5120)]
    passes = ["forward", "forward+residual", "backward", "backward+add", "backward+add+weight", "then add"]
    return [{"T": T, "D": D, "pass": name} for T, D in widths for name in passes]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        shape = (case["T"], case["D"])
        self.x, self.residual, self.dy, self.dh = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
        self.weight = torch.randn(case["D"], device=DEVICE, dtype=torch.bfloat16)
        self.rstd = op.rms_norm_forward(self.x, self.weight, EPS)[2]
        self.name = f"T={case['T']} D={case['D']} bf16 {case['pass']}"
        # Tensors of T x D that must be read or written once.
        streams = {"forward": 2, "forward+residual": 4, "then add": 3}
        streams |= {"backward": 3, "backward+add": 4, "backward+add+weight": 4}
        self.moved_bytes = streams[case["pass"]] * self.x.numel() * 2


def _ours(case: dict[str, Any], data: _Data) -> Outputs:
    x, weight = data.x, data.weight
    match case["pass"]:
        case "forward":
            return op.rms_norm_forward(x, weight, EPS)[:1]
        case "forward+residual":
            return op.rms_norm_forward(x, weight, EPS, residual_TD=data.residual)[:2]
        case "then add":
            return op.rms_norm_then_add_forward(x, weight, EPS, data.residual)[:1]
        case name:
            add = data.dh if "add" in name else None
            return op.rms_norm_backward(data.dy, x, weight, data.rstd, add_TD=add, need_weight_grad="weight" in name)


def _plain_forward(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> list[torch.Tensor]:
    y, h = op.rms_norm_reference(x, weight, EPS, residual_TD=residual)
    return [y] if residual is None else [y, h]


def _plain_then_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
    return [residual + op.rms_norm_reference(x, weight, EPS)[0]]


def _plain_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, add: torch.Tensor | None, need_weight: bool
) -> list[torch.Tensor | None]:
    """The same formula in torch operations: what torch.compile is given to fuse."""
    grad, normed = dy.float(), x.float() * rstd[:, None]
    dw = (grad * normed).sum(0) if need_weight else None
    grad = grad * weight.float()
    dx = rstd[:, None] * (grad - normed * (grad * normed).mean(-1, keepdim=True))
    return [(dx if add is None else dx + add).to(x.dtype), dw]


def _plain(case: dict[str, Any], data: _Data, *, wide: bool = False, through_compile: bool = False) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if wide else tensor

    name = case["pass"]
    arguments: tuple[Any, ...]
    if name.startswith("forward"):
        function: Any = _plain_forward
        arguments = (cast(data.x), cast(data.weight), cast(data.residual) if "residual" in name else None)
    elif name == "then add":
        function, arguments = _plain_then_add, (cast(data.x), cast(data.weight), cast(data.residual))
    else:
        add = cast(data.dh) if "add" in name else None
        arguments = (cast(data.dy), cast(data.x), cast(data.weight), data.rstd, add, "weight" in name)
        function = _plain_backward
    function = compiled(function) if through_compile else function
    return None if function is None else lambda: function(*arguments)


def _liger(case: dict[str, Any], data: _Data) -> Any:
    """Liger's raw forward; its backward always makes the weight gradient and overwrites dy."""
    if case["pass"] == "forward":
        function = peer("liger_kernel.ops.rms_norm", "rms_norm_forward")
        return function and (lambda: [function(data.x, data.weight, EPS, 0.0, "llama", None)[0]])
    if case["pass"] == "forward+residual":
        function = peer("liger_kernel.ops.fused_add_rms_norm", "fused_add_rms_norm_forward")
        return function and (lambda: list(function(data.x, data.residual, data.weight, EPS, 0.0, "llama")[:2]))
    return None


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls = {
        "ours": lambda: _ours(case, data),
        "torch": _plain(case, data),
        "torch.compile": _plain(case, data, through_compile=True),
        "liger": _liger(case, data),
    }
    return compare("rms_norm", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    """The two wider rows, one pass of each kind: the others follow."""
    if case["D"] == 2048 or case["pass"] not in {"forward", "backward+add", "backward+add+weight"}:
        return []
    data = _Data(case)
    lines = []
    weight_grad = case["pass"].endswith("weight")
    whole = op.triton.next_power_of_2(case["D"])
    for blocks in dict.fromkeys([op._blocks(case["D"]), (whole, 0)]):  # a row in two blocks, where that is the rule, or in one
        for tile in op.WEIGHT_GRAD_CONFIGS if weight_grad else op.CONFIGS:
            if not 4 <= tile.rows * sum(blocks) // (32 * tile.warps) <= 64:  # values a thread: neither idle nor spilling
                continue
            with (
                replaced(op, "_weight_grad_tile" if weight_grad else "_tile", lambda *_, tile=tile: tile),
                replaced(op, "_blocks", lambda _, blocks=blocks: blocks),
            ):
                words = f"{blocks[0]}+{blocks[1]} " + " ".join(str(value) for value in tile)
                calls = {words: lambda: _ours(case, data)}
                lines += compare("rms_norm", data.name, calls, _plain(case, data, wide=True), moved_bytes=data.moved_bytes)
    return lines
