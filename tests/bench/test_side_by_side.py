"""The whole way, on a tiny model: processes, failures, a cut-off and what comes after it."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_rows import measured

from benchmarks.bench.meter import machine
from benchmarks.bench.results import NAME, Results
from benchmarks.bench.side_by_side import PICTURE, Plan, run
from benchmarks.bench.weights import model_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Model folders are made below the temporary folder: here, and in the processes."""
    folder = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def no_weights_needed(temporary: Path) -> None:
    """For systems that fail before they read any."""
    model_folder("tiny").mkdir(parents=True)


def said(plan: Plan) -> tuple[Results, str]:
    pieces: list[str] = []
    results = run(plan, pieces.append)
    return results, "".join(pieces)


def fake(folder: Path, code: str) -> str:
    """A package `unsloth` (and what it needs) that does this when it is imported."""
    for name, text in (("unsloth", code), ("trl", ""), ("datasets", "")):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text)
    return str(folder)


def results_with(out: Path, *rows: dict[str, Any]) -> Results:
    results = Results(out / NAME)
    for row in (measured("tiny", "ceiling", 1000.0), *rows):
        results.add(row)
    return results


@pytest.mark.usefixtures("imported_python")
def test_a_system_trains_in_its_process_and_is_told_beside_the_others(tmp_path: Path) -> None:
    """The whole way: weights, a system that runs, the file, the picture, the lines. test_peers.py compares systems' numbers."""
    for other in ("ceiling", "packed"):
        Results(tmp_path / NAME).add(measured("tiny", other, 1000.0, machine=machine()))
    plan = Plan(
        out=tmp_path,
        workloads=["tiny"],
        systems=["pronghorn", "packed"],
        warmup=2,
        steps=3,
        time_limit=240,
        command="python -m benchmarks.bench",
    )
    results, text = said(plan)
    assert {(row["system"], row["status"]) for row in results.rows} == {
        (system, "measured") for system in ("ceiling", "pronghorn", "packed")}, results.rows  # fmt: skip
    ours = results.get("tiny", "pronghorn") or {}
    assert ours["tokens_per_second"] > 0
    assert ours["seconds_to_first_step"] == ours["marks"]["first_step"] > ours["marks"]["imports"] > 0
    assert ours["changed_share"] > 0.9
    content = json.loads((tmp_path / NAME).read_text())
    assert (content["results"], content["commands"]) == (results.rows, ["python -m benchmarks.bench"])
    assert len(text.splitlines()) == 1
    assert "Pronghorn" in (tmp_path / PICTURE).read_text()
    assert "RESULT" in (tmp_path / "logs" / "tiny.pronghorn.log").read_text()
    again, text = said(plan)
    assert (again.rows, text) == (results.rows, "")  # nothing is missing


@pytest.mark.usefixtures("no_weights_needed")
def test_a_crash_and_a_time_out_are_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    results_with(tmp_path, measured("tiny", "pronghorn", 100.0))
    broken = fake(tmp_path / "broken", "raise RuntimeError('no kernels for this card')")
    slow = fake(tmp_path / "slow", "import time; time.sleep(60)")
    plan = Plan(out=tmp_path, workloads=["tiny"], systems=["pronghorn", "unsloth"], time_limit=60, paths={"unsloth": broken})
    assert "[3/3] tiny          unsloth       failed: RuntimeError: no kernels for this card" in said(plan)[1]
    wanted = ["pronghorn", "unsloth", "unsloth-ckpt"]
    plan = replace(plan, systems=wanted, time_limit=1, paths={"unsloth": broken, "unsloth-ckpt": slow})
    results, text = said(plan)
    assert "[4/4] tiny          unsloth-ckpt  timed out: not finished after 1 s" in text
    assert (results.get("tiny", "pronghorn") or {})["tokens_per_second"] == 100.0
    assert "no kernels" in (tmp_path / PICTURE).read_text()
    assert said(plan)[1] == ""  # told once; not tried again unless asked
    other = fake(tmp_path / "other", "raise ValueError('now otherwise')")
    results, _ = said(replace(plan, time_limit=60, again=["unsloth-ckpt"], paths={"unsloth": other}))
    assert (results.get("tiny", "unsloth-ckpt") or {})["why"] == "ValueError: now otherwise"
    assert (results.get("tiny", "unsloth") or {})["why"] == "RuntimeError: no kernels for this card"
