"""Few rows times NF4 weights with their adapters (kernels/lora/nf4_rows.py), beside dequantizing first and weights in bf16.

Bytes: the stored bits once. `dequantized` is what groups of many rows do: all weights into one buffer, then a GEMM.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.ops import DEVICE, Line, compare, replaced
from pronghorn.kernels.lora import nf4_rows as op
from pronghorn.kernels.lora.lora_linear import Adapter, LoraGroup
from pronghorn.kernels.lora.shared_buffers import SharedBuffer
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.quant.nf4 import nf4_quantize

GROUPS = {
    "8B qkv": ((4096, 1024, 1024), 4096),
    "8B o": ((4096,), 4096),
    "8B gate, up": ((14336, 14336), 4096),
    "8B down": ((4096,), 14336),
    "1B qkv": ((2048, 512, 512), 2048),
    "1B down": ((2048,), 8192),
}


def cases() -> list[dict[str, Any]]:
    sizes = (1, 16, 64)
    return [{"name": f"{name}, {rows} rows", "T": rows, "group": group} for name, group in GROUPS.items() for rows in sizes]


class _Data:
    def __init__(self, case: dict[str, Any]) -> None:
        widths, D = case["group"]
        D, widths = (256, [64 for _ in widths]) if case.get("dry") else (D, widths)
        generator = torch.Generator(DEVICE).manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE, generator=generator)

        stored = [nf4_quantize((random(width, D) / 64).bfloat16()) for width in widths]
        adapters = [Adapter(i, random(16, D) / 64, random(width, 16) / 4, 2.0) for i, width in enumerate(widths)]
        self.group = StoredLoraGroup(stored, adapters, SharedBuffer(torch.bfloat16, torch.device(DEVICE)))
        self.plain = LoraGroup([weight.dequantize() for weight in stored], adapters)
        self.x_ext = random(case["T"], D + self.group.R).bfloat16()
        self.plain.extend(self.x_ext)
        self.bytes = sum(weight.nbytes for weight in stored)

    def ours(self) -> torch.Tensor:
        with op.reading_bits(True):
            self.group.load(self.x_ext)
            return self.group.forward(self.x_ext, extended=True)

    def dequantized(self) -> torch.Tensor:
        self.group.forget()
        self.group.load()
        return self.group.forward(self.x_ext, extended=True)

    def truth(self) -> torch.Tensor:
        return self.x_ext.float() @ self.plain.M[: self.plain.O].float().T


def run(case: dict[str, Any]) -> list[Line]:
    data = _Data(case)
    calls = {"bf16": lambda: data.plain.forward(data.x_ext, extended=True), "dequantized": data.dequantized, "ours": data.ours}
    return compare("nf4 rows", case["name"], calls, data.truth, moved_bytes=data.bytes)


def sweep(case: dict[str, Any]) -> list[Line]:
    data, lines = _Data(case), []
    for tile in op.CONFIGS:
        with replaced(op, "_config", lambda tile=tile: tile):
            name = f"{case['name']} {tuple(tile)}"
            lines += compare("nf4 rows", name, {"ours": data.ours}, data.truth, moved_bytes=data.bytes)
    return lines
