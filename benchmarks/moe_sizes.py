"""What the benchmarks of the kernels of mixtures of experts share: sizes of real layers, and tokens routed unevenly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.ops import DEVICE
from pronghorn.kernels.moe.routing import Routing, routing_forward

# D, width of an expert, experts, experts a token
SIZES = {"gpt-oss-20b": (2880, 2880, 32, 4), "qwen3-30b-a3b": (2048, 768, 128, 8), "mixtral-8x7b": (4096, 14336, 8, 2)}
TOKENS = 8192
RANK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    name: str
    D: int
    F: int
    E: int
    K: int
    T: int
    routing: Routing
    logits_TE: torch.Tensor

    @property
    def rows(self) -> int:
        return self.T * self.K

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * scale


def moe_cases(**more: list[Any]) -> list[dict[str, Any]]:
    """One case a model and combination of what else is given."""
    found = [{"model": model, "T": TOKENS} for model in SIZES]
    for name, values in more.items():
        found = [case | {name: value} for case in found for value in values]
    return found


def layer_of(case: dict[str, Any]) -> Layer:
    """Some experts are liked more than others: the busiest of 32 has about three times the mean."""
    torch.manual_seed(0)
    D, F, E, K = (128, 64, 4, 2) if case.get("dry") else SIZES[case["model"]]
    logits = torch.randn(case["T"], E, device=DEVICE) + 0.5 * torch.randn(E, device=DEVICE)
    name = f"{case['model']} T={case['T']}"
    return Layer(name, D, F, E, K, case["T"], routing_forward(logits, K, normalise=True), logits)
