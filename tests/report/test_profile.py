"""A profile's times: what belongs to which kernel, what is idle, what it advises; and the groups of kernels."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
from synthetic_run import RECIPE, synthetic_events

import pronghorn.kernels
from benchmarks.profiled import overlapping
from pronghorn.kernels.runtime.compile_ahead import Kernel
from pronghorn.report import advice as rules
from pronghorn.report.kernel_groups import OTHER, group_of
from pronghorn.report.profile import Measured, advice, figures, side_by_side
from pronghorn.report.run_stats import run_stats
from tables import table

NORM = "pronghorn__norm__rms_norm__forward_kernel"


def event(name: str, start: float, end: float, cat: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 0, "tid": 7}


def profile_of(*events: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Of two steps that took 100 µs together."""
    measured = Measured(2, 100e-6, 49e-6, 1e6, 4e-6, 1e-6, {"GEMM": 0.010})
    return figures({"traceEvents": list(events)}, replace(measured, **changes))


def times(facts: dict[str, Any]) -> dict[str, tuple[float, float]]:
    return {one["group"]: (round(1000 * one["ms"], 6), one["launches"]) for one in facts["groups"]}


def test_every_instant_belongs_to_one_kernel_or_is_idle() -> None:
    facts = profile_of(
        event("nvjet_hsh", 0, 40),
        event(NORM, 30, 50),  # on another stream, or begun before the GEMM has ended: the last one has the instant
        event("Memcpy HtoD (Pinned -> Device)", 20, 60, "gpu_memcpy"),  # hidden until 50
        event("nvjet_hsh", 70, 90),
        event("cudaEventSynchronize", 0, 80, "cuda_runtime"),
        event("cudaGraphLaunch", 80, 99, "cuda_runtime"),
    )
    assert times(facts) == {"GEMM": (25, 1), "norm": (10, 0.5), "copies": (5, 0.5)}
    assert facts["step_ms"] == pytest.approx(0.05)
    assert facts["idle_ms"] == pytest.approx(0.010)
    assert sum(one["ms"] for one in facts["groups"]) + facts["idle_ms"] == pytest.approx(facts["step_ms"])
    assert facts["overlapped_ms"] == pytest.approx(0.020)  # 10 + 30 µs in two steps
    assert facts["groups"][0]["ceiling_share"] == pytest.approx(0.4)
    assert facts["host"] == pytest.approx(
        {"computes_ms": 0.001, "waits_for_gpu_ms": 0.040, "waits_for_gpu": 0.5, "waits_for_data_ms": 0.002}
    )


def test_kernels_that_overlap_on_a_stream_have_tracks_of_their_own() -> None:
    trace = {"traceEvents": [event("c", 20, 40), event("a", 0, 10), event("b", 5, 25), event("d", 24, 30)]}
    assert overlapping(trace["traceEvents"])
    side_by_side(trace)
    assert overlapping(trace["traceEvents"]) == []
    assert {one["name"]: one["tid"] for one in trace["traceEvents"]} == {"a": 7, "b": 1007, "c": 7, "d": 2007}


def test_an_operator_has_what_those_that_it_calls_leave() -> None:
    facts = profile_of(
        event("_LayerBackward", 0, 90, "cpu_op"),
        event("aten::linear", 10, 60, "cpu_op"),
        event("aten::mm", 10, 50, "cpu_op"),
        event("aten::mul", 60, 70, "cpu_op"),
    )
    assert times(facts) == {"GEMM": (25, 1), "Python and autograd": (15, 0.5), "elementwise": (5, 0.5)}


def test_every_kernel_of_ours_has_a_group() -> None:
    modules = [
        importlib.import_module(one.name) for one in pkgutil.walk_packages(pronghorn.kernels.__path__, "pronghorn.kernels.")
    ]
    kernels = {value.repr(None) for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    kernels = {name for name in kernels if name.endswith("_kernel")}
    assert NORM in kernels
    assert {name for name in kernels if group_of(name) == OTHER} == {"pronghorn__runtime__host_memory__address_kernel"}


@table(("name", "group"), [
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTN", "GEMM"),
    ("hopper_gemm", "GEMM"),
    ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<", "GEMM"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float", "GEMM"),
    ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__", "attention"),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<", "attention"),
    ("pronghorn__attention__attention_short__dq_kernel", "attention"),
    ("pronghorn__attention__rope__backward_kernel", "RoPE"),
    ("pronghorn__lora__gated_lora__backward_kernel", "MLP activation"),
    ("pronghorn__lora__lora_grad_gemm__sums_kernel", "LoRA"),
    ("pronghorn__moe__grouped_gemm__product_kernel", "GEMM"),
    ("pronghorn__moe__grouped_fp8__cast_grad_kernel", "quantization"),
    ("pronghorn__quant__fp8_cast__cast_kernel", "quantization"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array", "copies"),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array", "elementwise"),
    ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor", "optimizer"),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
    ("some_kernel", OTHER),
])  # fmt: skip
def test_a_librarys_kernel_is_known_by_words_in_its_name(name: str, group: str) -> None:
    assert group_of(name) == group


IDLE = (event("nvjet_hsh", 0, 40),)
BUSY = (event("nvjet_hsh", 0, 100),)
POSSIBLE = {"gpu": True, "recomputed_ms": 0.0, "fp8_saves_ms": 0.0}


@table(("events", "waited", "recipe", "possible", "said"), [
    (IDLE, 60e-6, {}, {}, "set data.workers: 4"),
    (IDLE, 0.0, {"train": {"graph": "off", "capacity": 4096, "batch_tokens": 4096}}, {}, "set train.graph: \"auto\""),
    (IDLE, 0.0, {"train": {"capacity": 4096, "batch_tokens": 8192}}, {}, "set train.capacity: 8192 (now 4096)"),
    (BUSY, 0.0, {"memory": {"budget": "8GB"}}, {"recomputed_ms": 0.01}, "set memory.budget: \"auto\" (now \"8GB\")"),
    (BUSY, 0.0, {}, {"fp8_saves_ms": 0.02, "recomputed_ms": 0.01}, "set method: \"fp8\" (now \"lora\"): saves about 0.0 ms"),
    (BUSY, 0.0, {}, {}, "none: the GPU computed 100 % of the step, 100 % of it GEMM, at 20 % of its ceiling"),
])  # fmt: skip
def test_one_line_of_advice(
    events: Any, waited: float, recipe: dict[str, Any], possible: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "_cores", lambda: 64)
    run = replace(run_stats(synthetic_events(40)), recipe={**RECIPE, **recipe})
    facts = profile_of(*events, waited=waited) | POSSIBLE | possible
    assert advice(run, facts)["text"].startswith(said)
