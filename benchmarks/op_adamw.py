"""AdamW with clipping over all adapters of a model (LoRA r=16 on every linear layer, fp32).

Bytes a parameter, read or written once: 4 for the norm, 28 for the update.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare, replaced
from pronghorn.kernels.optim import adamw as op
from pronghorn.train.step.fused_adamw import FusedAdamW

RANK = 16
CLIP = 1.0
MODELS = {
    # layers, then (inputs, outputs) of q, k, v, o, gate, up, down
    "Llama-3.1-8B": (32, [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), *[(4096, 14336)] * 2, (14336, 4096)]),
    "Llama-3.2-1B": (16, [(2048, 2048), (2048, 512), (2048, 512), (2048, 2048), *[(2048, 8192)] * 2, (8192, 2048)]),
}


def cases() -> list[dict[str, Any]]:
    return [{"T": 0, "model": model} for model in MODELS]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        layers, linears = MODELS[case["model"]]
        if case.get("dry"):
            layers, linears = 1, [(64, 96), (96, 64)]
        layer = [shape for inputs, outputs in linears for shape in ((RANK, inputs), (outputs, RANK))]
        shapes = layer * layers
        self.start = [torch.randn(shape, device=DEVICE) * 0.02 for shape in shapes]
        self.grads = [torch.randn(shape, device=DEVICE) * 1e-4 for shape in shapes]
        numbers = sum(tensor.numel() for tensor in self.start)
        self.name = f"{case['model']} {numbers / 1e6:.1f}M in {len(shapes)}"
        self.moved_bytes = numbers * (4 + 28)

    def leaves(self, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        leaves = [torch.nn.Parameter(tensor.to(dtype, copy=True)) for tensor in self.start]
        for leaf, grad in zip(leaves, self.grads, strict=True):
            leaf.grad = grad.to(dtype, copy=True)
        return leaves


def _ours(data: _Data, *, as_optimizer: bool = False) -> Any:
    """The raw step with its table built, as a captured graph has it; or the optimizer, which looks up every tensor."""
    leaves = data.leaves()
    optimizer = FusedAdamW(leaves, lr=1e-3, clip_norm=CLIP)
    tensors = optimizer._gather()
    assert tensors is not None

    def call() -> list[torch.Tensor]:
        if as_optimizer:
            optimizer.step()
        else:
            op.adamw_step(tensors, lr=1e-3, clip_norm=CLIP)
        return [leaf.detach() for leaf in leaves]

    return call


def _torch(data: _Data, dtype: torch.dtype = torch.float32, **options: bool) -> Any:
    leaves = data.leaves(dtype)
    optimizer = torch.optim.AdamW(leaves, lr=1e-3, **options)

    def call() -> list[torch.Tensor]:
        torch.nn.utils.clip_grad_norm_(leaves, CLIP)
        optimizer.step()
        return [leaf.detach() for leaf in leaves]

    return call


def _truth(data: _Data) -> Any:
    return _torch(data, torch.float64, foreach=True)


def run(case: dict[str, Any]) -> list[Line]:
    """Every call goes one step on from its own start; only the first is judged, against torch in fp64."""
    data = _Data(case)
    calls = {
        "ours": _ours(data),
        "ours, optimizer.step()": _ours(data, as_optimizer=True),
        "torch fused": _torch(data, fused=True),
        "torch foreach": _torch(data, foreach=True),
    }
    return compare("adamw", data.name, calls, _truth(data), moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    lines: list[Line] = []
    for config in op.CONFIGS:
        with replaced(op, "CONFIG", config):
            lines += compare("adamw", data.name, {str(config): _ours(data)}, _truth(data), moved_bytes=data.moved_bytes)
    return lines
