"""Loss and gradients of packed steps, on real families: what must not depend on packing or on micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Phi3Config, Qwen3Config

from pronghorn.data.pack.batches import build_batch
from pronghorn.data.pack.loader import StepBatch
from pronghorn.data.pack.packing import pack_in_order
from pronghorn.model.lora import add_adapter
from pronghorn.recipe_parts import Lora
from pronghorn.train.step.step import EagerStep, StepResult
from samples import ListTable, random_table, small

SMALL = small()
FAMILIES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "gemma2": Gemma2Config(**SMALL, head_dim=8, sliding_window=16, query_pre_attn_scalar=8),
    "phi3": Phi3Config(**SMALL),
}


def model_of(family: str, lora: bool = True) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    if lora:
        model = add_adapter(model, Lora(r=4), seed=1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start: A would get no gradient
                torch.nn.init.normal_(parameter, std=0.05)
    return model


def step_of(table: ListTable, capacity: int) -> StepBatch:
    batches = [build_batch(table, rows, capacity) for rows in pack_in_order(table.lengths, capacity)]
    return StepBatch(tuple(batches), table, after={}, epoch=0.0)


def eager(model: Any, kind: Any = torch.optim.AdamW, precision: Any = "fp32", clip: float = 1.0, **options: float) -> EagerStep:
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
    return EagerStep(model, optimizer, device=torch.device("cpu"), precision=precision, clip=clip)


def take(step: EagerStep, step_batch: StepBatch) -> StepResult:
    step.begin(step_batch)
    return step.finish()


def gradients(model: Any, step_batch: StepBatch) -> tuple[float, dict[str, torch.Tensor]]:
    step = eager(model, torch.optim.SGD, clip=1e9)
    model.zero_grad()
    loss, *_ = step._forward_backward(step_batch)
    return float(loss), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    assert a
    return max(float((a[k] - b[k]).norm() / b[k].norm()) for k in a if float(b[k].norm()) > 0)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_batch_equals_its_documents_alone(family: str, lora: bool) -> None:
    model, table = model_of(family, lora), random_table(16)
    together = step_of(table, 512)
    assert len(together.batches) == 1
    packed_loss, packed = gradients(model, together)
    alone = StepBatch(tuple(build_batch(table, np.array([i]), int(table.lengths[i])) for i in range(16)), table, {}, 0.0)
    alone_loss, single = gradients(model, alone)
    assert packed_loss == pytest.approx(alone_loss, rel=1e-6)
    assert worst(packed, single) < 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradients_do_not_depend_on_the_number_of_micro_batches(family: str) -> None:
    model, table = model_of(family), random_table(20)
    steps = [step_of(table, capacity) for capacity in (1024, 512, 320, 192)]
    assert [len(step.batches) for step in steps] == [1, 2, 3, 4]
    loss, reference = gradients(model, steps[0])
    for step in steps[1:]:
        other_loss, other = gradients(model, step)
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert worst(other, reference) < 1e-5


@pytest.mark.parametrize("broken", ["loss", "gradient", "zero"])
def test_nothing_is_updated_by_a_step_that_is_not_sound(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, step_batch = model_of("llama"), step_of(random_table(12), 512)
    before = {name: p.clone() for name, p in model.named_parameters()}
    step = eager(model, lr=1e-2)
    factors = {"loss": (float("nan"), 1.0), "gradient": (1.0, float("inf")), "zero": (1.0, 0.0)}[broken]
    real = step._forward_backward

    def spoilt(batch: StepBatch) -> tuple[torch.Tensor, ...]:
        loss, norm, watched = real(batch)
        return loss * factors[0], norm * factors[1], watched

    monkeypatch.setattr(step, "_forward_backward", spoilt)
    take(step, step_batch)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def test_clipping_bounds_the_update() -> None:
    model, step_batch = model_of("llama"), step_of(random_table(12), 512)
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    step = eager(model, torch.optim.SGD, lr=1.0, clip=0.01)
    result = take(step, step_batch)
    moved = torch.cat([(p - b).flatten() for p, b in zip(parameters, before, strict=True)]).norm().detach()
    assert result.grad_norm > 0.01
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_products_run_in_the_precision_asked_for(precision: Any, dtype: torch.dtype) -> None:
    model, step_batch = model_of("llama"), step_of(random_table(4), 256)
    step = eager(model, precision=precision)
    seen = []
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    take(step, step_batch)
    assert set(seen) == {dtype}


def test_fp16_overflow_skips_the_update_and_lowers_the_scale() -> None:
    model, step_batch = model_of("llama"), step_of(random_table(4), 256)
    step = eager(model, precision="fp16")
    before = {name: p.clone() for name, p in model.named_parameters()}
    step.scaler.scale(torch.zeros(1))  # makes the scale exist
    step.scaler._scale.fill_(2.0**40)
    result = take(step, step_batch)
    assert result.skipped
    assert step.scaler.get_scale() == 2.0**39
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_checkpoint_s_copies_are_waited_for_before_the_weights_change() -> None:
    model, step_batch = model_of("llama"), step_of(random_table(4), 256)
    weight = next(p for p in model.parameters() if p.requires_grad)
    step = eager(model)
    before, seen = weight.detach().clone(), []
    step.hold_update(lambda: seen.append(weight.detach().clone()))
    take(step, step_batch)
    take(step, step_batch)
    assert len(seen) == 1
    assert torch.equal(seen[0], before)
    assert not torch.equal(weight, before)
