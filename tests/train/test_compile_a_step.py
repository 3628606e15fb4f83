"""Before a step's first capture all its kernels are compiled on a few tokens: for a Hopper that this machine need not have.

Triton is told of a GPU, every kernel's launch is a compilation (compile_ahead.py), and tensors are on the CPU and hold no
numbers: a step is gone through as before its first capture, on a few tokens, and then on a whole batch. Which ways a kernel is
asked for is what counts, so only the first of its ways is compiled in earnest, and none of the three heaviest files, of which
test_compile_matrix.py compiles more.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import pronghorn.kernels
from benchmarks.without_numbers import WithoutNumbers
from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.packing import pack
from pronghorn.kernels.attention import attention
from pronghorn.kernels.runtime.compile_ahead import Kernel
from pronghorn.kernels.runtime.dispatch import compile_kernels
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Lora
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_step import DRY_TOKENS, GraphedStep
from samples import random_table, small

LORA = {"adamw", "attention_short", "cross_entropy_rows", "gated_lora", "gated_lora_thin", "linear_cross_entropy",
        "multi_gather", "multi_copy", "rms_norm", "rope", "lora_grad_gemm"}  # fmt: skip
SMALL = small(vocab_size=512, hidden_size=256, intermediate_size=512, head_dim=64)
CAPACITY = 2048
THERE = 1077  # the device's number, under which Triton keeps what it compiled


class NoGpu:
    """What Triton's compiler asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return THERE

    def get_current_stream(self, device: int) -> int:
        return 0


def modules() -> list[ModuleType]:
    return [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(pronghorn.kernels.__path__, "pronghorn.kernels.")
    ]


def kernels() -> dict[str, Kernel]:
    return {
        f"{module.__name__.rsplit('.', 1)[-1]}.{name}": kernel
        for module in modules()
        for name, kernel in vars(module).items()
        if isinstance(kernel, Kernel) and kernel.__module__ == module.__name__
    }


def compiled() -> dict[str, int]:
    """Kernels by name, and in how many ways."""
    found = {name: len(kernel.device_caches[THERE][0]) for name, kernel in kernels().items() if THERE in kernel.device_caches}
    return {name: count for name, count in found.items() if count}


@pytest.fixture(autouse=True)
def _for_a_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A kernel's other ways get the result of the first; one that cannot be compiled is missing in all of them."""
    own, made, locks = triton.compiler.compile, dict[int, Any](), defaultdict[int, Any](Lock)

    def first(source: Any, *args: Any, **options: Any) -> Any:
        kernel = id(source.fn)
        with locks[kernel]:
            if kernel not in made:
                heavy = source.fn.module.rsplit(".", 1)[-1] in ("attention_short", "gated_lora", "lora_grad_gemm")
                made[kernel] = SimpleNamespace() if heavy else own(source, *args, **options)
        return made[kernel]

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoGpu())
    monkeypatch.setattr(triton.compiler, "compile", first)
    monkeypatch.setitem(attention.REFUSALS, "short", lambda case: None)
    attention._pick.cache_clear()  # of what other tests of this process asked for
    for module in modules():
        if hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    yield
    for kernel in kernels().values():
        kernel.device_caches.pop(THERE, None)
        if getattr(kernel, "compile", None) is first:  # Triton keeps the compiler that it found at the first launch
            kernel.compile = own
    attention._pick.cache_clear()


def batch() -> PackedBatch:
    table = random_table(400, longest=100)
    packs = pack(table.lengths, CAPACITY, seed=0, epoch=0)
    return build_batch(table, packs[0], CAPACITY, shapes=Shapes.planned(table, packs, CAPACITY))


def model_of(kind: str) -> Any:
    config = Qwen3Config(**SMALL) if kind == "full" else LlamaConfig(**SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if kind == "qlora":
        store_linears_(model, FORMATS["nf4"])
    if kind != "full":
        model = add_adapter(model, Lora(r=16), seed=0)
    assert not install(model)
    return model.train()


@pytest.mark.later
def test_a_few_tokens_need_the_kernels_of_a_whole_batch() -> None:
    whole = batch()
    with WithoutNumbers():
        for kind in ("lora", "full", "qlora"):
            made: list[Any] = []
            compile_kernels(lambda made=made, kind=kind: made.append(model_of(kind)))
            model = made[0]
            engine = engine_of(model)
            assert engine.can_run_dry
            optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            step = GraphedStep(model, optimizer, device=torch.device("cpu"), precision="bf16", clip=1.0, say=print)
            compile_kernels(lambda step=step: step._set_up(whole))
            compile_kernels(lambda step=step: step._run_dry(whole.beginning(DRY_TOKENS)))
            few = compiled()
            compile_kernels(lambda step=step: step._run_dry(whole))
            assert compiled() == few, kind
    assert {name.split(".")[0] for name in compiled()} >= LORA | {"gated_mlp", "nf4"}
