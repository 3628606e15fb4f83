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
from pronghorn.memory.plan import smallest_budget
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


def test_a_budget_is_planned_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make_model_folder("tiny")

    def run(budget: str) -> tuple[Ours, dict[str, Any]]:
        ours = Ours(replace(WORKLOADS["tiny"], budget=budget), Meter(began=time.time(), warmup=1, steps=2))
        return ours, ours.run()

    roomy, figures = run("2GB")
    assert roomy.memory is not None
    assert figures["budget"] == 2 * 10**9
    assert set(figures["plan"]["levels"]) == {"keep"}
    least = smallest_budget(roomy.memory.plan.problem)
    tight, tight_figures = run(f"{least / 1e6 + 0.1:.3f}MB")
    assert tight.memory is not None
    assert set(tight_figures["plan"]["levels"]) != {"keep"}
    assert tight_figures["plan"]["peak_bytes"] < figures["plan"]["peak_bytes"]
    assert tight_figures["memory"]["planned_peak_bytes"] == tight_figures["plan"]["peak_bytes"]
    assert tight_figures["loss_last"] == pytest.approx(figures["loss_last"], rel=1e-5)
    assert "memory measured" in capsys.readouterr().out
