"""Our side of a workload, in this process, on the tiny model."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from pronghorn.bench.meter import Meter
from pronghorn.bench.ours import Ours
from pronghorn.bench.weights import make_model_folder
from pronghorn.bench.workloads import WORKLOADS
from pronghorn.model.causal_lm import base_of


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


def test_no_workload_waits_for_what_is_built() -> None:
    assert {workload.waits_for for workload in WORKLOADS.values()} == {""}
    assert WORKLOADS["qwen3-14b"].method == "qlora"
