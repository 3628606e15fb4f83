"""What a layer with experts in FP8 holds at most, against every allocation it makes, at real sizes (as test_moe_working.py)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from allocations import Allocations, stand_in_for_experts, stand_in_for_kernels
from test_fp8_working import stand_in_for_fp8, without_contents
from test_moe_working import LEVELS, NARROW, SIZES, TARGETS, TOKENS, config_of, documents, ready_on_a_gpu
from transformers import AutoModelForCausalLM

from pronghorn.bench.workloads import MODELS
from pronghorn.kernels.moe.grouped_fp8 import fp8_grouped_supported
from pronghorn.kernels.quant.fp8_cast import FP8Tensor, fp8_supported
from pronghorn.memory.sizes import Job, Recompute, kept_bytes, shape_of, unpacked_bytes
from pronghorn.memory.working import evaluation_bytes, forward_bytes, working_bytes
from pronghorn.model import experts
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.experts import STACKS, stored_experts_
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers import fp8_linears
from pronghorn.model.layers.fp8_linears import Fp8LinearGroup
from pronghorn.model.layers.saved import leave
from pronghorn.model.layers.types import Documents
from pronghorn.model.lora import add_adapter
from pronghorn.model.lora_grad_buffer import LoraGradBuffer
from pronghorn.recipe import Lora
from tables import covering, gpu_rows

# What no published model is like, but tells other moments apart: many narrow experts a token, few heads, a narrow expert for
# all tokens; and so few tokens that the gradients of many experts' adapters are larger than gate and up.
OTHERS: dict[str, dict[str, Any]] = {
    "many a token": SIZES["qwen3_moe"] | NARROW | {"num_experts_per_tok": 8},
    "few heads": SIZES["qwen3_moe"] | NARROW | {"num_attention_heads": 4, "num_key_value_heads": 1},
    "narrow shared": SIZES["qwen2_moe"] | {"shared_expert_intermediate_size": 256},
    "few tokens": SIZES["qwen3_moe"] | {"moe_intermediate_size": 512, "num_experts_per_tok": 16},
}
FEW = 832


def stand_in_for_thin_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of adapters' gradients, in bf16 and summed in fp32: elsewhere than on a GPU they copy what they read."""

    def mm(a: Any, b: Any, dtype: Any = None, out: Any = None) -> Any:
        return a.new_empty(len(a), b.shape[1], dtype=dtype or a.dtype) if out is None else out

    adapters = fp8_linears.Fp8Group.add_adapter_grads.__globals__
    for own in (adapters, fp8_linears.Fp8Group.extend.__globals__, vars(fp8_linears)):
        monkeypatch.setitem(own, "mm", mm)
    monkeypatch.setitem(adapters, "mm_accumulate_", lambda total, a, b: None)


def stand_in_for_fp8_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each allocates on a GPU, beside what it is given to write to."""

    def scales(count: int, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(count, dtype=torch.float32)

    def cast(x: Any, *_: Any, **__: Any) -> Any:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales(len(x), x)

    def cast_grad(dy: Any, scale: Any, ids: Any, order: Any, *, gather: bool) -> Any:
        assert gather or len(dy) == len(order)
        return dy.new_empty(len(order), dy.shape[1], dtype=torch.float8_e4m3fn), scales(len(order), dy)

    def product(a: Any, scale: Any, b: Any, scale_EO: Any, offsets: Any, *, dtype: torch.dtype) -> Any:
        return a.new_empty(len(a), b.shape[1], dtype=dtype)

    def activation_forward(gu: Any, kind: Any, *, out8: Any = None, **_: Any) -> Any:
        a = gu.new_empty(len(gu), gu.shape[1] // 2)
        return a if out8 is None else (a, out8, scales(len(gu), gu))

    in_16_bits = experts.QuantizedExpertGroup.forward.__globals__
    for name, width in (("grouped_quantized_forward", 1), ("grouped_quantized_backward", 2)):
        monkeypatch.setitem(in_16_bits, name,
                            lambda x, stack, *_, width=width: x.new_empty(len(x), stack.shape[width]))
    own = experts.Fp8ExpertGroup.forward.__globals__  # by the class, as in test_fp8_working.py
    for name, stand_in in {"fp8_cast_rows": cast, "gather_rows": experts.gather_rows, "fp8_grouped_mm": product,
                           "grouped_linear_forward": experts.grouped_linear_forward,
                           "fp8_transposed_stack": lambda q, out: out.unflatten(1, (len(q), -1)).permute(1, 0, 2)}.items():
        monkeypatch.setitem(own, name, stand_in)
    for module, names in {
        experts: {"fp8_cast_rows": cast, "fp8_cast_grad_rows": cast_grad},
        fp8_linears: {"gated_activation_fp8_forward": activation_forward, "gated_activation_forward": activation_forward},
    }.items():
        for name, stand_in in names.items():
            monkeypatch.setattr(module, name, stand_in)


def model_of(family: str, adapters: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """On torch's default device."""
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=dtype)
    store_linears_(model, FORMATS["fp8"])
    for module in stored_experts_(model, FORMATS["fp8"]).values():
        for name in STACKS:
            weight = module._usual(getattr(module.own_module[0], name).detach())
            q_EOD = torch.full(weight.shape, 0x28, dtype=torch.uint8)  # 0.25
            module.set(name, FP8Tensor(q_EOD, torch.full(weight.shape[:2], 1e-2), dtype))
            setattr(module.own_module[0], name, None)  # its 16 bits
    model = add_adapter(model, Lora(r=16, targets=TARGETS[adapters]), seed=0)
    assert not install(model)
    return model


def there_all_the_time(model: Any, layer: Any) -> list[Any]:
    found = [*model.parameters(), layer.qkv.workspace.transposed.take(torch.device("meta"))]
    for group in layer.groups:
        if isinstance(group, Fp8LinearGroup):
            own = group.group
            found += [own.M, own.A_RD, own.sB_OR, own.scale_O, own.factors_2R, own.bounds_2]
    for stack in (layer.mlp.expert_gate_up, layer.mlp.expert_down):
        found += [stack.stored().values, stack.stored().scales, stack.group.A_ERD, stack.group.sB_EOR]
    return found


def held_by_a_layer(family: str, adapters: str, monkeypatch: pytest.MonkeyPatch, *, why_16_bits: str | None = None
                    ) -> dict[tuple[Recompute, bool], tuple[Job, int, int, int]]:
    """At each level, eager and then graphed: (the job, bytes kept, the most in forward, the most in backward), on torch's
    `meta` device, without what layers share."""
    for name, sizes in OTHERS.items():
        monkeypatch.setitem(SIZES, name, sizes)
    without_contents(monkeypatch)
    monkeypatch.setattr(experts, "fp8_grouped_supported", lambda device: why_16_bits)
    with torch.device("meta"):
        model = model_of(family, adapters)
    engine = engine_of(model)
    assert engine is not None
    engine.prepare(torch.bfloat16)
    layer, tokens = engine.layers[0], FEW if family == "few tokens" else TOKENS
    assert layer.fp8
    assert isinstance(layer.mlp.expert_down.group, experts.QuantizedExpertGroup if why_16_bits else experts.Fp8ExpertGroup)
    h = torch.empty(tokens, config_of(family).hidden_size, device="meta", dtype=torch.bfloat16)
    known, found = [h, *there_all_the_time(model, layer)], {}
    for graphed in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if graphed:
                for parameter in model.parameters():
                    parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
                known.append(LoraGradBuffer(engine, torch.bfloat16).buffer)
            for stand_in in (stand_in_for_kernels, stand_in_for_experts, stand_in_for_fp8, stand_in_for_fp8_experts,
                             stand_in_for_thin_products):
                stand_in(patch)
            job = Job(shape_of(config_of(family)), tokens, method="fp8", graphed=graphed, targets=TARGETS[adapters])
            for level in LEVELS:
                found[level, graphed] = job, *_held_at(level, layer, h, documents(engine), known)
    return found


def _held_at(level: Recompute, layer: Any, h: torch.Tensor, shared: Documents, known: list[Any]) -> tuple[int, int, int]:
    with torch.no_grad(), Allocations() as counted:
        counted.know(*known)
        out, kept = layer.forward_at(level, h, shared)
        forward = counted.peak + h.nbytes
        left = leave(kept, 0, None)
        del kept, out
        stays, dh = counted.alive + h.nbytes, torch.empty_like(h)
        counted.peak = counted.alive
        found = layer.restored(left, shared, None)
        del left
        layer.backward(dh, found, shared)
    return stays, forward, counted.peak + h.nbytes


# As in test_moe_working.py, whose levels and both kinds of step are inside each case.
@pytest.mark.parametrize(("family", "adapters"), sorted({
    *covering([*SIZES, *OTHERS], TARGETS), *itertools.product(("gpt_oss", "qwen2_moe, narrow"), TARGETS)}))
def test_a_layer_holds_what_the_formulas_say(family: str, adapters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for (level, graphed), (job, kept, forward, backward) in held_by_a_layer(family, adapters, monkeypatch).items():
        assert kept == kept_bytes(job, level)
        alone = kept - unpacked_bytes(job)
        assert forward == pytest.approx(alone + forward_bytes(job, level), rel=0.01), (level, graphed)
        assert backward == pytest.approx(alone + working_bytes(job, level), rel=0.01), (level, graphed)


@pytest.mark.parametrize(("family", "adapters"), [
    ("gpt_oss", "linears"), ("qwen3_moe", "experts"), ("qwen2_moe", "linears"), ("mixtral", "experts")])
def test_a_chip_that_multiplies_in_16_bits_holds_no_more(family: str, adapters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8, but no grouped products of it (Ada)."""
    found = held_by_a_layer(family, adapters, monkeypatch, why_16_bits="this test's chip has none")
    for (level, graphed), (job, kept, forward, backward) in found.items():
        assert kept == kept_bytes(job, level)
        alone = kept - unpacked_bytes(job)
        for held, planned in ((forward, alone + forward_bytes(job, level)), (backward, alone + working_bytes(job, level))):
            assert 0.7 * planned < held < 1.001 * planned, (level, graphed)


def test_an_evaluation_holds_a_layers_forward_or_the_head() -> None:
    job = Job(shape_of(MODELS["qwen3-30b-a3b-4layers"]), TOKENS, method="fp8")
    half = job.with_capacity(4096)
    assert evaluation_bytes(job, 4096) >= kept_bytes(half, "nothing") + forward_bytes(half, "nothing")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("family", "adapters", "recompute"), gpu_rows(
    itertools.product(["gpt_oss", "qwen3_moe", "qwen2_moe", "mixtral"], ["linears", "experts"], LEVELS)))
def test_the_allocator_of_a_gpu_agrees(family: str, adapters: str, recompute: Recompute) -> None:
    """Layers of real width, their own kernels, 8,192 tokens of short documents."""
    if why := fp8_supported("cuda") or fp8_grouped_supported("cuda"):
        pytest.skip(why)
    with torch.device("cuda"):
        model = model_of(family, adapters)
    engine, sums, shared = ready_on_a_gpu(model)
    layer, job = engine.layers[0], Job(shape_of(config_of(family)), TOKENS, method="fp8", targets=TARGETS[adapters])
    assert layer.fp8
    h, dh = (torch.randn(TOKENS, job.shape.width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found: dict[str, int] = {}
    with torch.no_grad():
        for _ in range(2):  # kernels are compiled, and what layers and libraries share is made, in the first round
            shared.grad_buffer.buffer = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() - h.nbytes
            kept = layer.forward_at(recompute, h, shared)[1]
            found["forward"] = torch.cuda.max_memory_allocated() - before
            left = leave(kept, 0, None)
            del kept
            found["kept"] = torch.cuda.memory_allocated() - before
            torch.cuda.reset_peak_memory_stats()
            again = layer.restored(left, shared, None)
            del left
            layer.backward(dh, again, shared)
            found["backward"] = torch.cuda.max_memory_allocated() - before + dh.nbytes
            del again
    sums.release()
    kept_size = kept_bytes(job, recompute)
    assert found["kept"] == pytest.approx(kept_size, rel=0.01)
    alone = kept_size - unpacked_bytes(job)  # what layers share was there before
    assert found["forward"] == pytest.approx(alone + forward_bytes(job, recompute), rel=0.02)
    assert found["backward"] == pytest.approx(alone + working_bytes(job, recompute), rel=0.03)
