"""The bytes and times of mixtures in FP8: the formulas against what real layers keep and store, and what plans make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_moe_sizes import FAMILIES, PAIRS, TARGETS, TOKENS, forward, leave_for_a_slot, slower_with_less, storages, time_a_layer
from test_moe_sizes import job_of as job_in_32_bits
from transformers import AutoModelForCausalLM

from pronghorn.bench.workloads import MODELS
from pronghorn.memory.calibrate import layer_work
from pronghorn.memory.costs import MixtureModel, predicted_costs
from pronghorn.memory.forecast import plan_report
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.sizes import Job, kept_bytes, kept_parts, shape_of, static_parts, unpacked_bytes
from pronghorn.model.causal_lm import install
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_experts_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers.fp8_linears import Fp8LinearGroup
from pronghorn.model.layers.saved import Level
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora, Recipe
from tables import table

WHOLE = {"qwen3-30b-a3b": "qwen3-30b-a3b-4layers", "gpt-oss-20b": "gpt-oss-20b-4layers"}


def model_of(family: str, targets: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    store_linears_(model, FORMATS["fp8"])
    store_experts_(model, FORMATS["fp8"])
    model = add_adapter(model, Lora(r=4, targets=targets), seed=1)
    assert not install(model)
    return model


def job_of(family: str, **changes: Any) -> Job:
    return job_in_32_bits(family, method="fp8", **changes)


@table(("family", "adapters"), PAIRS)
def test_a_layer_keeps_what_the_formula_says(family: str, adapters: str) -> None:
    engine, kept = forward(model_of(family, TARGETS[adapters]))
    assert engine.layers[0].fp8
    job = job_of(family, targets=TARGETS[adapters])
    held = sum(storages(*kept.values()).values())
    assert kept["gu"] is not None
    assert held == kept_bytes(job, "nothing")
    assert kept_bytes(job, "gate_up") == held - kept["gu"].nbytes
    assert kept_bytes(job, "layer") == kept["h"].nbytes
    assert "xa_o" in kept_parts(job)


@pytest.mark.parametrize("level", ["nothing", "gate_up", "around_attention", "layer"])
def test_what_leaves_fits_into_its_slot(level: Level) -> None:
    """The family with the most tensors."""
    leave_for_a_slot(model_of("qwen2_moe", TARGETS["experts"]), job_of("qwen2_moe", targets=TARGETS["experts"]), level)


@pytest.mark.parametrize(("family", "adapters"), PAIRS)
def test_weights_and_adapters_are_counted_as_they_are_stored_and_shared(family: str, adapters: str) -> None:
    model = model_of(family, TARGETS[adapters])
    engine, kept = forward(model)
    job = job_of(family, targets=TARGETS[adapters])
    documents = engine.documents(torch.tensor([0, 20, TOKENS], dtype=torch.int32), 28, torch.arange(TOKENS))
    with torch.no_grad():
        engine.layers[0].backward(torch.randn(TOKENS, 64), kept, documents)
    stands_for = {id(p) for p in model.parameters() if p.untyped_storage().nbytes() == p.itemsize and p.numel() > 1}
    held: list[Any] = [p for name, p in model.named_parameters()  # a stack's parameter is a single zero
                       if "lora_" not in name and not name.endswith(("bias", "sinks")) and id(p) not in stands_for]
    assert len(stands_for) == 4
    held += [module.scales for module in model.modules() if isinstance(module, StoredLinear)]
    shared: list[Any] = []
    for layer in engine.layers:
        for group in layer.groups:
            if isinstance(group, Fp8LinearGroup):
                own = group.group
                held += [own.M, own.scale_O, own.A_RD, own.sB_OR, own.factors_2R, own.bounds_2]
                shared.append(group.workspace.transposed._buffer)
        for stack in (layer.mlp.expert_gate_up, layer.mlp.expert_down):
            held += [stack.group.q_EOD, stack.group.scale_EO, stack.group.A_ERD, stack.group.sB_EOR]
    parts = static_parts(job)
    assert parts["weights"] == sum(storages(*held).values())
    assert unpacked_bytes(job) == sum(storages(*shared).values())
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p)
    sums = LoraGradBuffer(engine, torch.float32)
    assert parts["adapter sums"] == pytest.approx(sums.buffer.nbytes, abs=256 * 14 * 2)  # each is padded
    assert parts["adapters and optimizer"] == 4 * sum(p.nbytes for p in trained)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_a_layer_can_be_timed(family: str) -> None:
    time_a_layer(model_of(family, TARGETS["experts"]))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe", "dots1"])
def test_a_backward_that_is_timed_finds_the_same_numbers_each_time(family: str) -> None:
    """Gradients take the place of gate and up, also of the shared expert's: zeros would be multiplied faster."""
    engine, _ = forward(model_of(family, TARGETS["experts"]))
    documents = engine.documents(torch.tensor([0, 20, TOKENS], dtype=torch.int32), 28, torch.arange(TOKENS))
    layer = engine.layers[1]
    with torch.no_grad():
        work, found, real = layer_work(engine, documents, TOKENS, TOKENS, torch.float32), [], layer.backward

        def backward(dh: Any, kept: Any, shared: Any) -> Any:
            tensors = [kept[name] for name in ("gu", "shared_gu", "q", "h2") if name in kept]
            found.append(tuple(float(tensor.double().sum()) for tensor in tensors))
            return real(dh, kept, shared)

        layer.backward = backward
        for _ in range(3):
            work.gate_up_and_backward()
    assert len(found) == 3
    assert len(set(found)) == 1


# ---- times and plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", WHOLE.values())
@pytest.mark.parametrize("targets", [TARGETS["linears"], TARGETS["experts"]], ids=["linears", "experts"])
def test_less_memory_takes_more_time(model: str, targets: Any) -> None:
    slower_with_less(Job(replace(shape_of(MODELS[model]), layers=8), 8192, method="fp8", targets=targets))


@pytest.mark.parametrize("model", WHOLE.values())
def test_the_methods_stand_in_their_order(model: str) -> None:
    job = Job(shape_of(MODELS[model]), 8192)
    in_fp8, in_4_bits = replace(job, method="fp8"), replace(job, method="qlora")
    layers = [static_parts(one)["weights"] - 2 * 2 * job.shape.vocabulary * job.shape.width for one in (in_4_bits, in_fp8, job)]
    assert layers == sorted(layers)
    assert layers[1] == pytest.approx(0.5 * layers[2], rel=0.1)
    plain, fp8 = predicted_costs(job, GPUS["h200"]), predicted_costs(in_fp8, GPUS["h200"])
    assert fp8.forward < plain.forward < predicted_costs(in_4_bits, GPUS["h200"]).forward
    assert fp8.backward < plain.backward
    assert fp8.rest == plain.rest
    # A chip that has FP8, but no grouped products of it, dequantizes: no faster than 16 bits
    assert predicted_costs(in_fp8, GPUS["l40s"]).forward > predicted_costs(job, GPUS["l40s"]).forward


def test_stacks_are_turned_round_once_a_backward() -> None:
    job = Job(shape_of(MODELS["gpt-oss-20b-4layers"]), 8192, method="fp8")
    h200, l40s = (MixtureModel(job, GPUS[name]) for name in ("h200", "l40s"))
    weights = 32 * 3 * 2880 * 2880
    assert (h200.unpack(turned=True) - h200.unpack()) * h200.bytes == pytest.approx(2 * weights, rel=0.05)
    assert l40s.unpack(turned=True) * l40s.bytes < 0.1 * weights
    assert h200.forward().unpack == 0


def test_a_plan_for_a_recipe() -> None:
    recipe = Recipe.model_validate({"model": "m", "method": "fp8", "data": {"train": "a.jsonl"}, "memory": {"budget": "30GB"}})
    report = plan_report(recipe, MODELS["gpt-oss-20b"], gpu="h100")
    assert len(report.plan.counts()) > 1  # less than everything is kept
    assert report.plan.needed_bytes <= 30e9
    assert sum(static_parts(report.plan.problem.job).values()) > 20e9  # a byte a weight
