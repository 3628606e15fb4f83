"""The gated activation with its adapters' products in one kernel, beside the same as ops of their own, adapters of rank 16.

"separate" is the activation's kernel (gated_mlp.py) and a product for each group of adapters, backward's added to fp32 sums.
Bytes are what one pass must move: 5 F values a token backward, 3 F forward. The error is that of dgu and of the sums
(forward: of a and a A^T).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.ops import DEVICE, Line, compare, replaced
from pronghorn.kernels.gemm.mm import mm, mm_accumulate_
from pronghorn.kernels.lora import gated_lora as op
from pronghorn.kernels.mlp.gated_mlp import Kind, _activation_torch, gated_activation_backward, gated_activation_forward

RANK, PADDED = 16, 64  # gate and up share 64 columns, of which 32 are theirs (lora_linear.default_padding)
GATE, UP = slice(0, RANK), slice(RANK, 2 * RANK)


def cases() -> list[dict[str, Any]]:
    sizes = [(16384, 8192, 2048, "silu"), (16384, 14336, 4096, "silu"), (16384, 9216, 2304, "gelu_tanh")]  # 1B, 8B, Gemma-2-2B
    return [{"T": T, "F": F, "D": D, "kind": kind, "pass": name} for T, F, D, kind in sizes for name in ("backward", "forward")]


class _Data:
    """Row strides as a layer has them: da and gu alone, dgu with 64 columns more, dyb and A as parts of wider buffers."""

    def __init__(self, case: dict[str, Any]) -> None:
        torch.manual_seed(0)
        T, F = case["T"], case["F"] // (16 if case.get("dry") else 1)
        self.T, self.F, self.kind = T, F, case["kind"]
        self.backward = case["pass"] == "backward"

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)

        self.gu, self.da = random(T, 2 * F), random(T, F)
        self.dyb, self.xa = random(T, case["D"] + RANK)[:, case["D"] :], random(T, PADDED)
        self.xa[:, 2 * RANK :] = 0
        self.A = random(RANK, F + RANK)[:, :F] * F**-0.5
        self.dgu = torch.zeros(T, 2 * F + PADDED, device=DEVICE, dtype=torch.bfloat16)
        self.a_ext = torch.zeros(T, F + RANK, device=DEVICE, dtype=torch.bfloat16)
        self.down = torch.zeros(RANK, F, device=DEVICE)
        self.gate_up = torch.zeros(PADDED, 2 * F, device=DEVICE)
        self.name = f"T={T} F={F} r={RANK} bf16 {self.kind} {case['pass']}"
        self.moved_bytes = (5 if self.backward else 3) * T * F * 2

    def results(self) -> list[Tensor]:
        F = self.F
        if not self.backward:
            return [self.a_ext[:, :F], self.a_ext[:, F:]]
        return [self.dgu[:, : 2 * F], self.down, self.gate_up[GATE, :F], self.gate_up[UP, F:]]


def _fresh(data: _Data, call: Any) -> Any:
    """The sums are those of one call when they are judged; timed repeats go on adding."""
    first = True

    def run() -> list[Tensor]:
        nonlocal first
        if first:
            data.down.zero_()
            data.gate_up.zero_()
            first = False
        call()
        return data.results()

    return run


def _ours(data: _Data) -> Any:
    if not data.backward:
        return _fresh(data, lambda: op.gated_lora_forward(data.gu, data.kind, data.A, out_ext=data.a_ext))
    return _fresh(
        data,
        lambda: op.gated_lora_backward(
            data.da, data.gu, data.kind, dgu_out=data.dgu, dyb_TR=data.dyb, xa_TR=data.xa, gate_columns=GATE, up_columns=UP,
            sums_down_RF=data.down, sums_gate_up_RG=data.gate_up,
        ),
    )  # fmt: skip


def _separate(data: _Data) -> Any:
    F = data.F

    def forward() -> None:
        a = gated_activation_forward(data.gu, data.kind, out=data.a_ext[:, :F])
        mm(a, data.A.T, out=data.a_ext[:, F:])

    def backward() -> None:
        _, a = gated_activation_backward(data.da, data.gu, data.kind, out=data.dgu[:, : 2 * F])
        assert a is not None
        mm_accumulate_(data.down, data.dyb.T, a)
        mm_accumulate_(data.gate_up, data.xa.T, data.dgu[:, : 2 * F])

    return _fresh(data, backward if data.backward else forward)


def _truth(data: _Data, rows: int = 2048) -> list[Tensor]:
    """In fp32, some rows at a time."""
    kind: Kind = data.kind
    dgu, sums, forward = [], [torch.zeros(RANK, data.F, device=DEVICE) for _ in range(3)], []
    for first in range(0, data.T, rows):
        some = slice(first, first + rows)
        gate, up = data.gu[some].float().chunk(2, dim=-1)
        activated, derivative = _activation_torch(gate, kind)
        a, da = activated * up, data.da[some].float()
        if not data.backward:
            forward.append((a.bfloat16(), a @ data.A.float().T))
            continue
        parts = (a, da * up * derivative, da * activated)
        dgu.append(torch.cat(parts[1:], dim=-1).bfloat16())
        for total, thin, part in zip(sums, (data.dyb, data.xa[:, GATE], data.xa[:, UP]), parts, strict=True):
            total.addmm_(thin[some].float().T, part)
    if not data.backward:
        return [torch.cat(column) for column in zip(*forward, strict=True)]
    return [torch.cat(dgu), *sums]


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls = {"ours": _ours(data), "separate": _separate(data)}
    return compare("gated_lora", data.name, calls, lambda: _truth(data), moved_bytes=data.moved_bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    truth = _truth(data)
    name = "_backward_tile" if data.backward else "_forward_tile"
    lines = []
    for tile in op.BACKWARD_CONFIGS if data.backward else op.FORWARD_CONFIGS:
        with replaced(op, name, lambda *_, tile=tile: tile):
            way = " [R, F]" if data.backward and tile.ranks_first else ""
            label = f"{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages} p{tile.programs}{way}"
            lines += compare("gated_lora", data.name, {label: _ours(data)}, lambda: truth, moved_bytes=data.moved_bytes)
    return lines
