"""Products with what follows them inside (Hopper), beside the product and then the kernel that follows it.

"apart" is `mm` of x with the adapters' 64 terms behind it in one tensor, then the gated activation, the loss of each row,
or the rotary positions in place; "ours" reads those terms from a tensor of their own. Operations counted are the product's,
over all its terms. The error is that of all that is written; of the head's gradient with each row multiplied by its factor.

Where the product is not done, "ours" has no line; in a dry run it is what a caller does there, the same two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.ops import DEVICE, Line, compare
from pronghorn.kernels.attention.rope import qk_rope_forward, qk_rope_reference
from pronghorn.kernels.gemm.hopper_gemm import gated_mm, rope_mm
from pronghorn.kernels.gemm.mm import mm
from pronghorn.kernels.loss import cross_entropy_rows
from pronghorn.kernels.loss.cross_entropy_powers import powers_for
from pronghorn.kernels.loss.cross_entropy_rows import Terms
from pronghorn.kernels.mlp.gated_mlp import gated_activation_forward, gated_activation_reference

BEHIND = 64  # terms that carry the adapters (lora_linear.default_padding); results have as many columns of room behind them


def cases() -> list[dict[str, Any]]:
    llama_1b, llama_8b = {"K": 2048}, {"K": 4096}
    heads = {"T": 16384, "heads": 32, "kv_heads": 8}
    return [
        {"what": "gated", "T": 16384, "F": 8192} | llama_1b,
        {"what": "gated", "T": 16384, "F": 14336} | llama_8b,
        {"what": "powers", "T": 2048, "V": 128256} | llama_1b,  # a chunk of the head's rows
        {"what": "powers", "T": 2048, "V": 128256} | llama_8b,
        {"what": "rope", "head_width": 64} | heads | llama_1b,
        {"what": "rope", "head_width": 128} | heads | llama_8b,
    ]


def _random(*shape: int, by: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * by).bfloat16()


class _Operands:
    """x with the terms behind it as one tensor, those terms as one of their own, and a weight for both."""

    def __init__(self, T: int, K: int, columns: int) -> None:
        self.both = _random(T, K + BEHIND)
        self.x, self.behind = self.both[:, :K], self.both[:, K:].contiguous()
        self.weight = _random(columns, K + BEHIND, by=(K + BEHIND) ** -0.5)
        self.flops = 2 * T * (K + BEHIND) * columns

    def exact(self) -> Tensor:
        return self.both.float() @ self.weight.float().T


class _Case(Protocol):
    name: str
    flops: int
    places: list[Tensor]  # that are written

    def inside(self) -> bool: ...
    def apart(self) -> None: ...
    def results(self) -> list[Tensor]: ...
    def truth(self) -> list[Tensor]: ...


class _Gated:
    def __init__(self, case: dict[str, Any]) -> None:
        T, (K, width) = case["T"], (64, 128) if case.get("dry") else (case["K"], case["F"])
        self.operands = _Operands(T, K, 2 * width)
        self.gu, self.a = _random(T, 2 * width + BEHIND)[:, : 2 * width], _random(T, width + BEHIND)[:, :width]
        self.places, self.flops = [self.gu, self.a], self.operands.flops
        self.name = f"T={T} K={K}+{BEHIND} F={width} bf16 gated"

    def inside(self) -> bool:
        own = self.operands
        return gated_mm(own.x, own.weight, "silu", gu_out=self.gu, a_out=self.a, lora_TR=own.behind)

    def apart(self) -> None:
        mm(self.operands.both, self.operands.weight.T, out=self.gu)
        gated_activation_forward(self.gu, "silu", out=self.a)

    def results(self) -> list[Tensor]:
        return self.places

    def truth(self) -> list[Tensor]:
        gu = self.operands.exact()
        return [gu, gated_activation_reference(gu, "silu")]


class _Powers:
    def __init__(self, case: dict[str, Any]) -> None:
        T, (K, V) = case["T"], (64, 1024) if case.get("dry") else (case["K"], case["V"])
        self.hidden, self.weight = _random(T, K), _random(V, K, by=K**-0.5)
        self.labels = torch.randint(V, (T,), device=DEVICE)
        self.logits, self.scale = _random(T, V), torch.ones((), device=DEVICE)
        self.losses, self.factors = (torch.empty(T, device=DEVICE) for _ in range(2))
        self.places, self.flops = [self.logits, self.losses, self.factors], 2 * T * K * V
        self.name = f"T={T} K={K} V={V} bf16 powers"

    def inside(self) -> bool:
        """With the anchors, which a head finds for all its chunks at once."""
        rows = len(self.hidden)
        powers = powers_for(self.hidden, self.weight, self.labels, Terms(), rows, self.logits)
        return powers is not None and powers.loss_and_gradient(
            slice(0, rows), self.logits, None, self.losses, self.scale, self.factors
        )

    def apart(self) -> None:
        mm(self.hidden, self.weight.T, out=self.logits)
        if not cross_entropy_rows.takes_factors(torch.bfloat16, Terms(), self.logits):
            self.factors.fill_(1.0)
        cross_entropy_rows.loss_and_gradient(
            self.logits, self.labels, None, self.losses, self.scale, Terms(), True, self.factors
        )

    def results(self) -> list[Tensor]:
        """Powers have another anchor on each side; times the factors they are the same."""
        return [self.losses, self.logits.float() * self.factors[:, None]]

    def truth(self) -> list[Tensor]:
        logits = self.hidden.float() @ self.weight.float().T
        gradient = torch.softmax(logits, -1)
        gradient[torch.arange(len(logits), device=DEVICE), self.labels] -= 1
        return [F.cross_entropy(logits, self.labels, reduction="none"), gradient]


class _Rope:
    def __init__(self, case: dict[str, Any]) -> None:
        T, (K, heads, kv_heads) = case["T"], (64, 4, 2) if case.get("dry") else (case["K"], case["heads"], case["kv_heads"])
        self.shape = {"heads": heads, "kv_heads": kv_heads, "head_width": case["head_width"]}
        width = case["head_width"]
        columns = (heads + 2 * kv_heads) * width
        self.operands = _Operands(T, K, columns)
        turns = (torch.arange(T, device=DEVICE) % 512)[:, None] * 10000.0 ** (-torch.arange(0, width, 2, device=DEVICE) / width)
        self.cos, self.sin = turns.cos().float(), turns.sin().float()
        self.qkv = _random(T, columns + BEHIND)[:, :columns]
        self.places, self.flops = [self.qkv], self.operands.flops
        self.name = f"T={T} K={K}+{BEHIND} N={heads} KV={kv_heads} H={width} bf16 rope"

    def inside(self) -> bool:
        own, rope_heads = self.operands, self.shape["heads"] + self.shape["kv_heads"]
        return rope_mm(own.x, own.weight, self.cos, self.sin, rope_heads=rope_heads, head_width=self.shape["head_width"],
                              out=self.qkv, lora_TR=own.behind)  # fmt: skip

    def apart(self) -> None:
        mm(self.operands.both, self.operands.weight.T, out=self.qkv)
        qk_rope_forward(self.qkv, self.cos, self.sin, in_place=True, **self.shape)

    def results(self) -> list[Tensor]:
        return self.places

    def truth(self) -> list[Tensor]:
        parts = qk_rope_reference(self.operands.exact(), self.cos, self.sin, **self.shape)
        return [torch.cat([part.flatten(1) for part in parts], dim=1)]


KINDS: dict[str, Callable[[dict[str, Any]], _Case]] = {"gated": _Gated, "powers": _Powers, "rope": _Rope}


def _judged(data: _Case, call: Callable[[], object]) -> Callable[[], list[Tensor]]:
    """What is there before the first call is nobody's, and its results are looked at: neither is timed."""
    first = True

    def run() -> list[Tensor]:
        nonlocal first
        if not first:
            call()
            return []
        first = False
        for place in data.places:
            place.fill_(float("nan"))
        call()
        return data.results()

    return run


def run(case: dict[str, Any]) -> list[Line]:
    torch.manual_seed(0)
    data = KINDS[case["what"]](case)

    def ours() -> None:
        if not data.inside():
            data.apart()

    there = case.get("dry") or data.inside()
    calls: dict[str, Any] = {"ours": _judged(data, ours) if there else None, "apart": _judged(data, data.apart)}
    return compare("hopper_gemm", data.name, calls, data.truth, flops=data.flops)
