"""benchmarks/compile_matrix.py: every kernel is in it, and the heaviest fit the chips that have least. The whole matrix takes
minutes: `python -m benchmarks.compile_matrix --write`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tables import first_of

pytest.importorskip("triton")

import pronghorn.kernels
from benchmarks.compile_for import name_of
from benchmarks.compile_matrix import Line, compile_all, named, works
from pronghorn.kernels.lora import lora_grad_gemm
from pronghorn.kernels.runtime.compile_ahead import Kernel
from pronghorn.kernels.runtime.dispatch import CHIPS, HOPPER

# The tiles that were too much, or are nearest to it: each the heaviest of its kernel.
HEAVIEST = [
    ((8, 6), "llama-8b, lora, r=64", ("lora_grad_gemm._sums_kernel",)),
    ((8, 6), "llama-8b, lora, r=16", ("gated_lora._backward_kernel", "attention_short._dkdv_kernel")),
    ((12, 0), "qwen3-30b-a3b-4layers, qlora, r=16, on experts",
     ("grouped_quantized._forward_kernel", "grouped_quantized._backward_kernel")),
    ((8, 0), "qwen3-30b-a3b-4layers, full, 256 tokens", ("grouped_gemm._weight_kernel",)),
]  # fmt: skip
# These launch all kernels of today. A kernel that none of them launches is looked for in the others.
FIRST = (
    "formats",
    "decoding",
    "qwen3-30b-a3b-4layers, fp8, r=16, on experts",
    "gpt-oss-20b-4layers, qlora, r=16, on experts",
    "gemma-3-4b, full",
    "llama-8b, qlora, r=16, compute fp8",
    "gpt-oss-20b-4layers, full, num_local_experts=8",
    "llama-8b, lora, head_dim=64, num_attention_heads=32, num_key_value_heads=8, r=16",
    "llama-70b, lora, r=16",
    "lfm2-1.2b, full",
    "apertus-8b, full",
    "glm-4.7-flash, lora, r=16",
    "qwen3.5-9b, lora, layer_types=['full_attention'], r=16",
    "gated deltanet",
    "gemma-4-12b, lora, r=16",
)


@pytest.fixture(autouse=True)
def _own_compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is found compiled from before, on disk or in this process, or afterwards."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    for kernel in kernels().values():
        for chip in CHIPS.values():
            kernel.device_caches.pop(1000 + chip.sm, None)


def kernels() -> dict[str, Kernel]:
    """All there are: what is launched is called a kernel."""
    found = {}
    for module in pkgutil.walk_packages(pronghorn.kernels.__path__, "pronghorn.kernels."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, Kernel) and name.endswith("_kernel"):
                found[name_of(value)] = value
    return found


def compiled(capability: tuple[int, int], case: str, wanted: Callable[[str], bool]) -> list[Line]:
    return compile_all(CHIPS[capability], lambda name: name == case, wanted, lambda line: None)[0]


def test_training_launches_every_kernel_in_some_case() -> None:
    cases = [work.name for work in works(HOPPER)]
    assert set(FIRST) < set(cases)
    launched: set[str] = set()
    for case in sorted(cases, key=lambda case: case not in FIRST):
        if case in FIRST or kernels().keys() - launched:
            launched |= compile_all(HOPPER, lambda name, case=case: name == case, lambda kernel: False, lambda line: None)[1]
    assert launched == kernels().keys()


@pytest.mark.parametrize(("capability", "case", "names"), first_of(HEAVIEST))
def test_the_heaviest_kernels_fit_chips_that_are_not_here(
    capability: tuple[int, int], case: str, names: tuple[str, ...]
) -> None:
    builds = [line.build for line in compiled(capability, case, named(names))]
    assert {build.kernel for build in builds} == set(names)
    assert [build for build in builds if build.wrong] == []


@pytest.mark.later
def test_registers_that_go_to_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many registers as Hopper gives a thread are too few for 8.6."""
    before = lora_grad_gemm.Tile.registers
    monkeypatch.setattr(lora_grad_gemm.Tile, "registers", lambda tile, ranks, chip: before(tile, ranks, HOPPER))
    broken = compiled((8, 6), "llama-8b, lora, r=64", named(["lora_grad_gemm._sums"]))
    assert any("bytes of registers in local memory" in line.build.wrong for line in broken)
