"""A process of its own (test_compile_a_step.py): our kernels of whole training steps, compiled for a Hopper that is not here.

Triton is told of a GPU, every kernel's launch is a compilation (compile_ahead.py), and tensors are on the CPU: a step
is gone through as before its first capture, on a few tokens, and then on a whole batch. Prints, for each kind of training, the
kernels of the first and those that the second has more. Products are left out, whose results nobody looks at: in bf16 they take
an ARM core six minutes. Which ways a kernel is asked for is what counts, so only the first of its ways is compiled in earnest,
and none of the three heaviest files, of which test_compile_matrix.py compiles more.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import pronghorn.kernels
from pronghorn.data.batches import PackedBatch, Shapes, build_batch
from pronghorn.data.packing import pack
from pronghorn.kernels.attention import attention
from pronghorn.kernels.runtime.compile_ahead import Kernel
from pronghorn.kernels.runtime.dispatch import compile_kernels
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Lora
from pronghorn.train.fused_adamw import FusedAdamW
from pronghorn.train.graphed_step import DRY_TOKENS, GraphedStep
from samples import random_table

SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "head_dim": 64}
CAPACITY = 2 * DRY_TOKENS
MODULES = [importlib.import_module(module.name)
           for module in pkgutil.walk_packages(pronghorn.kernels.__path__, "pronghorn.kernels.")]


class NoGpu:
    """What Triton's compiler asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class NoProducts(TorchDispatchMode):
    """A product's result is memory as it comes."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = function.overloadpacket
        if packet not in (torch.ops.aten.mm, torch.ops.aten.addmm):
            return function(*args, **kwargs)
        if "out" in kwargs:
            return kwargs["out"]
        left, right = args[-2:]
        return left.new_empty(left.shape[0], right.shape[1])


def batch() -> PackedBatch:
    table = random_table(400, longest=100)
    packs = pack(table.lengths, CAPACITY, seed=0, epoch=0)
    return build_batch(table, packs[0], CAPACITY, shapes=Shapes.planned(table, packs, CAPACITY))


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(**SMALL) if kind == "full" else LlamaConfig(**SMALL)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if kind == "qlora":
        store_linears_(model, FORMATS["nf4"])
    if kind != "full":
        model = add_adapter(model, Lora(r=16), seed=0)
    assert not install(model)
    return model.train()


def compiled() -> dict[str, int]:
    """Kernels by name, and in how many ways."""
    found = {}
    for module in MODULES:
        for name, kernel in vars(module).items():
            if isinstance(kernel, Kernel) and kernel.__module__ == module.__name__ and 0 in kernel.device_caches:
                found[f"{module.__name__.rsplit('.', 1)[-1]}.{name}"] = len(kernel.device_caches[0][0])
    return {name: count for name, count in found.items() if count}


def compile_once() -> None:
    """A kernel's other ways get the result of the first; one that cannot be compiled is missing in all of them."""
    own, made, locks = triton.compiler.compile, dict[int, Any](), defaultdict[int, Any](Lock)

    def first(source: Any, *args: Any, **options: Any) -> Any:
        kernel = id(source.fn)
        with locks[kernel]:
            if kernel not in made:
                heavy = source.fn.module.rsplit(".", 1)[-1] in ("attention_short", "gated_lora", "lora_grad_gemm")
                made[kernel] = SimpleNamespace() if heavy else own(source, *args, **options)
        return made[kernel]

    triton.compiler.compile = first


def main() -> None:
    driver.set_active(NoGpu())
    compile_once()
    for module in MODULES:
        if hasattr(module, "use_triton"):
            module.use_triton = lambda tensor: True
    attention.REFUSALS["short"] = lambda case: None
    whole = batch()
    for kind in ("lora", "full", "qlora"):
        made: list[Any] = []
        compile_kernels(lambda made=made, kind=kind: made.append(model_of(kind)))
        model = made[0]
        engine = engine_of(model)
        assert engine is not None
        assert engine.can_run_dry
        optimizer = FusedAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        step = GraphedStep(model, optimizer, device=torch.device("cpu"), precision="bf16", clip=1.0, say=print)
        compile_kernels(lambda step=step: step._set_up(whole))
        compile_kernels(lambda step=step: step._run_dry(whole.beginning(DRY_TOKENS)))
        few = compiled()
        compile_kernels(lambda step=step: step._run_dry(whole))
        more = {name: count - few.get(name, 0) for name, count in compiled().items() if count != few.get(name, 0)}
        print(kind, len(few), "more:", more, flush=True)
    print(*sorted(compiled()))


if __name__ == "__main__":
    with NoProducts():
        main()
