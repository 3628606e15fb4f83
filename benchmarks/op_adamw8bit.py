"""AdamW with clipping over all linear weights of some layers, as full fine-tuning has them: fp32 weights and gradients, moments
in 32 or 8 bits, on the device or in pinned host memory.

Bytes a parameter of the device, read or written once: 4 for the norm, 12 for gradient and weight, 16 for moments of 32 bits, 4
for those of 8 bits. Moments in host memory take 8 and 2 bytes over the link each way, and the line's rate is the link's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.op_adamw import CLIP, MODELS
from benchmarks.ops import DEVICE, Line, compare, replaced
from pronghorn.kernels.optim import adamw8bit as op
from pronghorn.kernels.optim.adamw import adamw_step
from pronghorn.train.step.fused_adamw import FusedAdamW

LAYERS = {"Llama-3.1-8B": 2, "Llama-3.2-1B": 4}
# name: 8 bits, paged, bytes a parameter of whatever bounds it
OURS = {"ours": (True, False, 20), "ours, 32 bit": (False, False, 32), "ours, paged": (True, True, 4),
        "ours, paged, 32 bit": (False, True, 16)}  # fmt: skip


def cases() -> list[dict[str, Any]]:
    return [{"T": 0, "model": model} for model in LAYERS]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        linears = [(64, 96), (96, 64)] if case.get("dry") else MODELS[case["model"]][1] * LAYERS[case["model"]]
        self.start = [torch.randn(outputs, inputs, device=DEVICE) * 0.02 for inputs, outputs in linears]
        self.grads = [torch.randn_like(tensor) * 1e-4 for tensor in self.start]
        self.numbers = sum(tensor.numel() for tensor in self.start)
        self.name = f"{case['model']} {self.numbers / 1e6:.0f}M in {len(linears)}"

    def leaves(self, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        leaves = [torch.nn.Parameter(tensor.to(dtype, copy=True)) for tensor in self.start]
        for leaf, grad in zip(leaves, self.grads, strict=True):
            leaf.grad = grad.to(dtype)
        return leaves


def _ours(data: _Data, eight_bit: bool, paged: bool) -> Any:
    leaves = data.leaves()
    optimizer = FusedAdamW(leaves, lr=1e-3, clip_norm=CLIP, eight_bit=eight_bit, paged=paged)
    tensors = optimizer._gather()
    assert tensors is not None

    def call() -> list[torch.Tensor]:
        adamw_step(tensors, lr=1e-3, clip_norm=CLIP)
        return [leaf.detach() for leaf in leaves]

    call.optimizer = optimizer  # type: ignore[attr-defined]  # which holds the pinned memory
    return call


def _theirs(data: _Data, dtype: torch.dtype, make: Any, **options: Any) -> Any:
    leaves = data.leaves(dtype)
    optimizer = make(leaves, lr=1e-3, weight_decay=1e-2, **options)

    def call() -> list[torch.Tensor]:
        torch.nn.utils.clip_grad_norm_(leaves, CLIP)
        optimizer.step()
        return [leaf.detach() for leaf in leaves]

    return call


def _truth(data: _Data) -> Callable[[], list[torch.Tensor]]:
    """The first step, computed once."""
    result: list[torch.Tensor] = _theirs(data, torch.float64, torch.optim.AdamW, foreach=True)()
    return lambda: result


def run(case: dict[str, Any]) -> list[Line]:
    """Every call goes one step on from its own start; only the first is judged, against torch in fp64. Moments are zero before
    it, so those in 8 bits are judged as strictly."""
    data, lines = _Data(case), []
    truth = _truth(data)
    for name, (eight_bit, paged, each) in OURS.items():
        lines += compare("adamw8bit", data.name, {name: _ours(data, eight_bit, paged)}, truth, moved_bytes=data.numbers * each)
    for name, make, each in _others():
        call = _theirs(data, torch.float32, make)
        lines += compare("adamw8bit", data.name, {name: call}, truth, moved_bytes=data.numbers * each)
    return lines


def _others() -> list[tuple[str, Any, int]]:
    """Name, class, bytes a parameter; those that are installed."""
    found: list[tuple[str, Any, int]] = [("torch fused, 32 bit", partial(torch.optim.AdamW, fused=True), 32)]
    if find_spec("torchao"):
        from torchao import optim

        found.append(("torchao", optim.AdamW8bit, 20))
    if find_spec("bitsandbytes") and DEVICE == "cuda":
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

        found += [("bitsandbytes", AdamW8bit, 20), ("bitsandbytes, paged", PagedAdamW8bit, 4)]
    return found


def sweep(case: dict[str, Any]) -> list[Line]:
    data, lines = _Data(case), []
    truth = _truth(data)
    for config in op.CONFIGS:
        with replaced(op, "CONFIG", config):
            for paged in (False, True):
                call = _ours(data, eight_bit=True, paged=paged)
                name = f"{config}{', paged' if paged else ''}"
                lines += compare("adamw8bit", data.name, {name: call}, truth, moved_bytes=data.numbers * (4 if paged else 20))
    return lines
