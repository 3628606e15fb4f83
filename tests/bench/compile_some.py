"""A process of its own (test_compile_matrix.py): which kernels the cases of the matrix launch, and some of them compiled."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pronghorn.kernels
from benchmarks.compile_matrix import compile_all, named
from pronghorn.kernels.lora import lora_grad_gemm
from pronghorn.kernels.runtime.compile_ahead import Kernel
from pronghorn.kernels.runtime.compile_for import name_of
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER

# The tiles that were too much, or are nearest to it: each the heaviest of its kernel.
SOME = [
    ((8, 6), "llama-8b, lora, r=64", ("lora_grad_gemm._sums", "gated_lora._backward", "gated_lora._forward")),
    ((8, 6), "llama-8b, lora, r=16", ("gated_lora._backward", "attention_short._dkdv")),
    ((12, 0), "qwen3-30b-a3b-4layers, qlora, r=16, on experts", ("grouped_quantized",)),
    ((12, 0), "llama-8b, lora, r=64", ("gated_lora._forward",)),
    ((8, 0), "qwen3-30b-a3b-4layers, full", ("grouped_gemm._weight",)),
]


def kernels() -> set[str]:
    """All there are: what is launched is called a kernel."""
    found = set()
    for module in pkgutil.walk_packages(pronghorn.kernels.__path__, "pronghorn.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Kernel) and name.endswith("_kernel"):
                found.add(name_of(value))
    return found


def enough(case: str) -> bool:
    """Without those that differ in sizes only."""
    return not case.startswith("llama-8b, lora") or "head_dim=64" in case


def main() -> None:
    launched = compile_all(HOPPER, enough, lambda name: False, lambda line: None)[1]
    lines = []
    for capability, case, names in SOME:
        lines += compile_all(CHIPS[capability], lambda name, case=case: name == case or name.startswith(f"{case}, 256"),
                             named(names), lambda line: None)[0]
    before = lora_grad_gemm.Tile.registers
    lora_grad_gemm.Tile.registers = lambda tile, ranks, chip: before(tile, ranks, HOPPER)  # type: ignore[method-assign]
    broken = compile_all(CHIPS[8, 6], named(["llama-8b, lora, r=64"]), named(["lora_grad_gemm._sums"]), lambda line: None)[0]
    print(json.dumps({
        "missing": sorted(kernels() - launched), "unknown": sorted(launched - kernels()),
        "builds": [[line.build.chip.sm, line.build.kernel, line.build.shared, line.build.wrong] for line in lines],
        "broken": [line.build.wrong for line in broken],
    }))


if __name__ == "__main__":
    main()
