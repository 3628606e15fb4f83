"""Rows of a results file, made up."""

from __future__ import annotations

from typing import Any

MACHINE = {"hardware": "Test card", "cuda": None, "versions": {"torch": "2.11"}, "date": "2026-11-15T03:00:00+00:00"}


def measured(workload: str, system: str, speed: float, **changes: Any) -> dict[str, Any]:
    return {
        "workload": workload,
        "system": system,
        "status": "measured",
        "why": "",
        "tokens_per_second": speed,
        "warmup": 10,
        "steps": 20,
        "peak_gib": 16.29,
        "seconds_to_first_step": 14.1,
        "loss_first": 12.2,
        "loss_last": 12.17,
        "grad_norm": 0.15,
        "tflops": 600.0,
        "machine": MACHINE,
        **changes,
    }


def several() -> list[dict[str, Any]]:
    return [
        measured("llama-1b", "ceiling", 150_000.0),
        measured("llama-1b", "unsloth-ckpt", 58_000.0),
        measured("llama-1b", "unsloth", 80_000.0),
        measured("llama-1b", "pronghorn", 120_000.0),
        {"workload": "llama-1b", "system": "liger", "status": "failed", "why": "OutOfMemoryError: <CUDA> | out of memory"},
        {"workload": "qwen3-14b", "system": "pronghorn", "status": "not installed", "why": "no module peft"},
    ]
