"""Our side of a workload, in this process, on the tiny model."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench.meter import Meter
from benchmarks.bench.ours import Ours
from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import WORKLOADS
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.formats.linear import StoredLinear


@pytest.mark.parametrize("changes", [{"ours": "fp8"}, {"method": "qlora", "compute": "fp8"}])
def test_ours_in_fp8(changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_model_folder("tiny")
    ours = Ours(replace(WORKLOADS["tiny"], **changes), Meter(began=time.time(), warmup=1, steps=2, peak_from_first_step=True))
    assert type(base_of(ours.step.model).model.layers[0].mlp.up_proj.base_layer) is StoredLinear
    engine = engine_of(ours.step.model)
    assert engine is not None
    assert all(layer.fp8 for layer in engine.layers)
    assert ours.run()["changed_share"] > 0.9
