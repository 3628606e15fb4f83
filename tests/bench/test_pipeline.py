"""benchmarks/pipeline.py: the arithmetic of its figures, and one run of it."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import pytest

from benchmarks.pipeline import busy, one_run, union
from samples import chat_rows, write_rows


def test_union_counts_overlaps_once() -> None:
    assert union([(0, 10), (5, 12), (6, 7), (20, 21)]) == 13
    assert union([(20, 21), (0, 10)]) == 11
    assert union([]) == 0


def test_busy_is_the_share_between_the_first_and_the_last_kernel(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "ts": 100, "dur": 40}, {"ph": "X", "cat": "kernel", "ts": 120, "dur": 40},
        {"ph": "X", "cat": "gpu_memcpy", "ts": 160, "dur": 20}, {"ph": "X", "cat": "kernel", "ts": 190, "dur": 10},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 500}, {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    figures = busy(trace)
    assert figures["gpu_busy_share"] == pytest.approx(0.7)
    assert figures["gpu_busy_share_with_copies"] == pytest.approx(0.9)
    assert figures["window_seconds"] == pytest.approx(1e-4)


def test_a_run_is_measured_between_two_steps(tiny_model: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "train.jsonl", chat_rows(60))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"model: /nowhere\ndata: {{train: {data}, max_length: 128, eval: 0.1}}\n"
        "train: {capacity: 256, batch_tokens: 256, lr: 0.01}\nlora: {r: 4}\n"
    )
    options = argparse.Namespace(
        recipe=str(recipe), overrides=[f"model={tiny_model}"], only="checkpoints", first=3, last=12, trace=None
    )
    figures = one_run(options)
    assert figures["seconds_to_first_step"] > 0
    assert figures["tokens_per_second"] == pytest.approx(9 * 240 / figures["seconds"], rel=0.15)  # packs of nearly 256 tokens
    assert 0 < figures["main_thread_share"] <= figures["process_share"] * 1.05
    assert figures["loss_last"] < figures["loss_first"]
    assert not (tmp_path / "runs").exists()
