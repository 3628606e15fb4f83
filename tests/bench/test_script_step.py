"""Where a script's step goes, as far as a machine without a GPU can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks import script_step
from benchmarks.bench.weights import make_model_folder
from benchmarks.script_step import PROFILED, summary, told


def event(name: str, begin: float, end: float, device: str = "CUDA") -> Any:
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        time_range=SimpleNamespace(start=begin, end=end, elapsed_us=lambda: end - begin),
    )


def test_kernels_side_by_side_count_once_as_busy_time() -> None:
    events = [event("a", 0, 3000), event("b", 2000, 6000), event("a", 9000, 12000), event("host", 0, 9e6, "CPU")]
    found = summary(events, cuda=True)
    assert found["busy_ms_per_step"] == round(9 / PROFILED, 2)
    assert found["kernels_per_step"] == 1
    assert [(one["kernel"], one["ms"]) for one in found["most"]] == [("a", 2.0), ("b", round(4 / PROFILED, 3))]


def test_a_script_of_a_tiny_model() -> None:
    make_model_folder("tiny")
    row = script_step.measure("dropin", "tiny-trl", warmup=1, steps=2)
    assert row["ms_per_step"] > 0
    assert row["grad_norm"] > 0
    assert row["busy_ms_per_step"] > 0
    assert row["most"]
    assert f"{row['ms_per_step']} ms a step" in told(row)
