"""What the forward and backward of a layer with experts hold at most, against every allocation they make, at real sizes."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from allocations import Allocations, stand_in_for_experts, stand_in_for_kernels
from transformers import AutoConfig, AutoModelForCausalLM

from pronghorn.bench.workloads import MODELS
from pronghorn.memory.sizes import Job, Recompute, kept_bytes, shape_of
from pronghorn.memory.working import evaluation_bytes, forward_bytes, working_bytes
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.layers.saved import leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora
from tables import covering, gpu_rows

TOKENS = 8192
LEVELS: list[Recompute] = ["nothing", "gate_up", "around_attention", "layer"]
# As published, cut to two layers; Qwen1.5-MoE has an expert that all tokens share. Of one narrow expert a token, what a layer
# holds is elsewhere: in attention, in the shared expert, in the gradients of many experts' adapters.
SIZES: dict[str, dict[str, Any]] = {
    "gpt_oss": MODELS["gpt-oss-20b-4layers"],
    "qwen3_moe": MODELS["qwen3-30b-a3b-4layers"],
    "qwen2_moe": {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
                  "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4,
                  "num_attention_heads": 16, "num_key_value_heads": 16},
    "mixtral": {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8,
                "num_experts_per_tok": 2, "num_attention_heads": 32, "num_key_value_heads": 8},
    "solar_open": {"model_type": "solar_open", "hidden_size": 4096, "moe_intermediate_size": 1280, "n_routed_experts": 128,
                   "num_experts_per_tok": 8, "n_shared_experts": 1, "num_attention_heads": 64, "num_key_value_heads": 8},
    "hy_v3": {"model_type": "hy_v3", "hidden_size": 2048, "intermediate_size": 4096, "moe_intermediate_size": 512,
              "num_experts": 64, "num_experts_per_tok": 4, "num_shared_experts": 2, "num_attention_heads": 16,
              "num_key_value_heads": 4, "mlp_layer_types": ["sparse", "sparse"]},
}
NARROW = {"moe_intermediate_size": 128, "num_experts": 256, "num_experts_per_tok": 1}
SIZES |= {f"{family}, narrow": SIZES[family] | NARROW for family in ("qwen3_moe", "qwen2_moe")}
TARGETS: dict[str, Any] = {"q": ("q_proj",), "linears": "all-linear", "experts": ("all-linear", "experts")}


def config_of(family: str) -> Any:
    settings = SIZES[family] | {"num_hidden_layers": 2, "vocab_size": 512}
    return AutoConfig.for_model(settings["model_type"], **{k: v for k, v in settings.items() if k != "model_type"})


def model_of(family: str, adapters: str, dtype: torch.dtype = torch.float32) -> Any:
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=dtype)
    model = add_adapter(model, Lora(r=16, targets=TARGETS[adapters]), seed=0) if adapters != "full" else model
    assert not install(model)
    return model


def documents(engine: Any) -> Documents:
    with torch.device("meta"):
        half = engine.layers[0].head_width // 2
        tables = {kind: (torch.empty(TOKENS, half), torch.empty(TOKENS, half)) for kind in engine.positions.kinds}
        return Documents(torch.empty(80, dtype=torch.int32), 1408, tables, torch.empty(2, TOKENS, dtype=torch.int32), 324)


# Where the most is held depends on the sizes, and for each on what is adapted: all pairs of the two extremes, else in turn.
@pytest.mark.parametrize(("family", "adapters"), sorted({
    *covering(SIZES, [*TARGETS, "full"]), *itertools.product(("gpt_oss", "qwen2_moe, narrow"), [*TARGETS, "full"])}))
def test_a_layer_holds_what_the_formulas_say(family: str, adapters: str) -> None:
    """On torch's `meta` device; fp32, because products of bf16 on other devices than a GPU make copies. Eager, then graphed."""
    with torch.device("meta"):
        model = model_of(family, adapters)
    engine = engine_of(model)
    assert engine is not None
    engine.prepare(torch.float32)
    known = [h := torch.empty(TOKENS, config_of(family).hidden_size, device="meta"), *model.parameters()]
    options: dict[str, Any] = {"method": "full"} if adapters == "full" else {"targets": TARGETS[adapters]}
    for graphed in (False, True):
        if graphed:
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
            known.append(LoraGradBuffer(engine, torch.float32).buffer)
        job = Job(shape_of(config_of(family)), TOKENS, element=4, graphed=graphed, **options)
        with pytest.MonkeyPatch.context() as patch:
            stand_in_for_kernels(patch)
            stand_in_for_experts(patch)
            assert_held_as_told(job, engine, h, known)


def assert_held_as_told(job: Job, engine: Any, h: torch.Tensor, known: list[torch.Tensor]) -> None:
    layer, D, shared = engine.layers[0], job.shape.width, documents(engine)
    for recompute in LEVELS:
        with torch.no_grad(), Allocations() as counted:
            counted.know(*known)
            out, kept = layer.forward_at(recompute, h, shared)
            forward = counted.peak + h.nbytes
            left = leave(kept, 0, None)
            del kept, out
            assert counted.alive + h.nbytes == kept_bytes(job, recompute)
            assert forward == pytest.approx(kept_bytes(job, recompute) + forward_bytes(job, recompute), rel=0.005)
            shared.grad_buffer.buffer = torch.empty(TOKENS, D + layer.down.extra, device="meta")
            counted.peak = counted.alive
            found = layer.restored(left, shared, None)
            del left
            layer.backward(shared.grad_buffer.buffer[:, :D], found, shared)
            held = counted.peak + h.nbytes
            del found
        told = kept_bytes(job, recompute) + working_bytes(job, recompute)
        assert held == pytest.approx(told, rel=0.01), (recompute, job.graphed)


def test_an_evaluation_holds_a_layers_forward_or_the_head() -> None:
    job = Job(shape_of(MODELS["qwen3-30b-a3b-4layers"]), TOKENS)
    half = job.with_capacity(4096)
    assert evaluation_bytes(job, 4096) >= kept_bytes(half, "nothing") + forward_bytes(half, "nothing")


def ready_on_a_gpu(model: Any) -> tuple[Any, LoraGradBuffer, Documents]:
    """Engine, sums of its adapters' gradients as a captured step has them, and documents of 256 tokens."""
    gc.collect()  # models of earlier tests, which would be counted as freed in the middle of this one
    engine = engine_of(model)
    assert engine is not None
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    bounds = torch.arange(0, TOKENS + 1, 256, dtype=torch.int32, device="cuda")
    shared = engine.documents(bounds, 256, torch.arange(TOKENS, device="cuda") % 256, 256)
    return engine, LoraGradBuffer(engine, torch.bfloat16), shared


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("family", "adapters", "recompute"), gpu_rows(
    itertools.product(["gpt_oss", "qwen3_moe", "qwen2_moe"], ["linears", "experts"], LEVELS)))
def test_the_allocator_of_a_gpu_agrees(family: str, adapters: str, recompute: Recompute) -> None:
    """Layers of real width in bf16, their own kernels, 8,192 tokens of short documents."""
    with torch.device("cuda"):
        model = model_of(family, adapters, torch.bfloat16)
    engine, sums, shared = ready_on_a_gpu(model)
    layer, job = engine.layers[0], Job(shape_of(config_of(family)), TOKENS, targets=TARGETS[adapters])
    D = job.shape.width
    h = torch.randn(TOKENS, D, device="cuda", dtype=torch.bfloat16)
    found: dict[str, int] = {}

    def mark(name: str, before: int) -> None:
        found[name] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()

    with torch.no_grad():
        for _ in range(2):  # kernels are compiled, and libraries take their workspaces, in the first round
            shared.grad_buffer.buffer = torch.empty(TOKENS, D + layer.down.extra, device="cuda", dtype=torch.bfloat16).normal_()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - h.nbytes
            kept = layer.forward_at(recompute, h, shared)[1]
            mark("forward", before)
            left = leave(kept, 0, None)
            del kept
            assert torch.cuda.memory_allocated() - before == pytest.approx(kept_bytes(job, recompute), rel=0.01)
            again = layer.restored(left, shared, None)
            del left
            layer.backward(shared.grad_buffer.buffer[:, :D], again, shared)
            mark("backward", before - shared.grad_buffer.buffer.nbytes)
            del again
    sums.release()
    kept_size = kept_bytes(job, recompute)
    assert found["forward"] == pytest.approx(kept_size + forward_bytes(job, recompute), rel=0.02)
    assert found["backward"] == pytest.approx(kept_size + working_bytes(job, recompute), rel=0.03)
