"""What the profiler saw of copies beside kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.offload import hidden, merged


def test_copies_under_kernels_are_hidden(tmp_path: Path) -> None:
    def event(kind: str, name: str, start: float, length: float, size: int = 0) -> dict[str, object]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length, "args": {"bytes": size}}

    events = [
        event("kernel", "mm", 0, 100),
        event("kernel", "norm", 50, 100),
        event("kernel", "mm", 300, 100),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 120, 60, 6_000_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 310, 20, 1_000_000),
        {"ph": "M", "name": "process_name"},
    ]
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = hidden(trace)
    assert found["to_host"]["under_kernels"] == 0.5  # 30 of 60 us
    assert found["to_host"]["gb_per_second"] == pytest.approx(100)
    assert found["from_host"] == {"copies": 1, "ms": 0.02, "under_kernels": 1.0, "gb_per_second": 50.0}
    assert merged([(0, 2), (1, 3), (5, 6)]) == [(0, 3), (5, 6)]
