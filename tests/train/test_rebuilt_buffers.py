"""What happens to the model between two steps may make its layers rebuild buffers: graphs read no freed one.

A DPO run with held-out rows ended in an illegal memory access after its first evaluation, in which the reference model's pass
switched the adapters off and on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import test_every_kind_of_step
import test_graphed_step
import test_moe_steps
import torch
from test_graphed_step import DEVICE, eager, graphed, losses, mixed_table, steps_of
from transformers import AutoModelForCausalLM, LlamaConfig

from pronghorn.model.causal_lm import base_of, engine_of, install
from pronghorn.packs import PackedBatch
from pronghorn.train.objectives.objective import outputs_of

GPU = DEVICE.type == "cuda"
FP8_DTYPE = torch.bfloat16 if GPU else torch.float32  # FP8 GEMMs of a GPU give bf16
MODELS: dict[str, Callable[[], Any]] = {
    "lora": test_graphed_step.model_of,
    "nf4": test_every_kind_of_step.some_in_4_bits,
    "experts": lambda: test_moe_steps.model_of("qwen3_moe", "experts"),
    "experts alone": lambda: test_moe_steps.model_of("gpt_oss", "experts alone"),
    "experts in nf4": lambda: test_moe_steps.model_of("gpt_oss", "experts", bits=4),
    "experts in fp8": lambda: test_moe_steps.model_of("gpt_oss", "experts", FP8_DTYPE, bits=8),
}


def adapters_off(model: Any, batch: PackedBatch) -> None:
    with torch.no_grad(), model.disable_adapter():
        outputs_of(model, batch.to(DEVICE))


def weights_saved(model: Any, batch: PackedBatch) -> None:
    base_of(model).state_dict()


@pytest.mark.parametrize(
    ("kind", "event"), [*((kind, adapters_off) for kind in MODELS), ("lora", weights_saved), ("experts", weights_saved)]
)
def test_the_next_steps_are_those_of_a_run_without_it(kind: str, event: Callable[[Any, PackedBatch], None]) -> None:
    batches, said = (steps_of(mixed_table(300), 5) if GPU else steps_of(mixed_table(40), 4, packs=1)), list[str]()
    model = MODELS[kind]()
    precision = "bf16" if kind.endswith("fp8") and GPU else "fp32"
    step = graphed(model, precision, said)
    ours = losses(step, batches[:2])
    with step.autocast():
        event(model, batches[0].batches[0])
    overwrite_freed_memory()
    ours += losses(step, batches[2:])
    theirs = losses(eager(MODELS[kind](), precision), batches)
    exact = precision == "fp32"
    assert [loss for loss, _ in ours] == pytest.approx([loss for loss, _ in theirs], rel=1e-5 if exact else 5e-3)
    assert [norm for _, norm in ours] == pytest.approx([norm for _, norm in theirs], rel=1e-3 if exact else 5e-2)
    assert sum("captured again" in line for line in said) == int(GPU)


def overwrite_freed_memory() -> None:
    if GPU:
        sizes = [2**exponent for exponent in range(8, 24, 2)]
        blocks = [torch.full((size,), float("nan"), device=DEVICE) for size in sizes for _ in range(32)]
        del blocks


def test_saving_trained_weights_rebuilds_nothing() -> None:
    """They are in memory of their own; the FP8 copies of `compute: fp8`, which the step's graphs write, stay where they are."""
    config = LlamaConfig(**test_graphed_step.SMALL)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE, torch.bfloat16)
    assert install(model, fp8=True) == ""
    engine = engine_of(model)
    engine.prepare(torch.bfloat16)
    groups = [group for layer in engine.layers for group in layer.groups]
    assert all(group.fp8 for group in groups)
    before = engine.rebuilt, [id(group.gemms.matrix) for group in groups]
    model.state_dict()
    assert (engine.rebuilt, [id(group.gemms.matrix) for group in groups]) == before
