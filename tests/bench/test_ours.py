"""Our side of a workload, in this process, on the tiny model."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from pronghorn.bench.meter import Meter
from pronghorn.bench.ours import Ours
from pronghorn.bench.weights import make_model_folder
from pronghorn.bench.workloads import WORKLOADS
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.fp8_layer import Fp8DecoderLayer
from pronghorn.model.fp8_linear import Fp8Linear
from pronghorn.model.quantized import NF4Linear


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_the_workload_s_method_is_what_runs(method: Literal["lora", "qlora"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_model_folder("tiny")
    meter = Meter(began=time.time(), warmup=1, steps=2, peak_from_first_step=True)
    ours = Ours(replace(WORKLOADS["tiny"], method=method), meter)
    weight = base_of(ours.step.model).model.layers[0].mlp.up_proj.base_layer.weight
    assert (weight.dtype == torch.uint8) == (method == "qlora")
    figures = ours.run()
    assert figures["changed_share"] > 0.9


@pytest.mark.parametrize(("changes", "stored"), [
    ({"ours": "fp8"}, Fp8Linear), ({"method": "qlora", "compute": "fp8"}, NF4Linear)])
def test_ours_in_fp8(changes: dict[str, Any], stored: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_model_folder("tiny")
    ours = Ours(replace(WORKLOADS["tiny"], **changes), Meter(began=time.time(), warmup=1, steps=2, peak_from_first_step=True))
    assert type(base_of(ours.step.model).model.layers[0].mlp.up_proj.base_layer) is stored
    engine = engine_of(ours.step.model)
    assert engine is not None
    assert all(isinstance(layer, Fp8DecoderLayer) for layer in engine.layers)
    assert ours.run()["changed_share"] > 0.9


def test_no_workload_waits_for_what_is_built() -> None:
    assert {workload.waits_for for workload in WORKLOADS.values()} == {""}
    assert WORKLOADS["qwen3-14b"].method == "qlora"
