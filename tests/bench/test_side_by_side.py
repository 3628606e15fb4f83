"""The whole way, on a tiny model: processes, failures, a cut-off and what comes after it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pronghorn.bench.results import NAME, Results
from pronghorn.bench.side_by_side import PICTURE, Plan, environment, parse_paths, run
from pronghorn.bench.worker import missing
from pronghorn.bench.workloads import SYSTEMS, WORKLOADS, System
from pronghorn.errors import CommandError

pytestmark = pytest.mark.xdist_group("side_by_side")  # they share a model folder


@pytest.fixture(scope="module", autouse=True)
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Model folders are made below the temporary folder: here, and in the processes."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results, str]:
    """Two systems that run, and one that crashes."""
    out = tmp_path_factory.mktemp("bench")
    broken = fake(tmp_path_factory.mktemp("broken") / "p", "raise RuntimeError('no kernels for this card')")
    plan = Plan(out=out, workloads=["tiny"], systems=["pronghorn", "packed", "unsloth"], warmup=2, steps=3, time_limit=120,
                paths={"unsloth": broken}, command="pronghorn bench")
    return out, *said(plan)


def test_two_systems_train_the_same_model_on_the_same_documents(tiny: tuple[Path, Results, str]) -> None:
    _, results, _ = tiny
    ours, packed = (results.get("tiny", system) or {} for system in ("pronghorn", "packed"))
    assert ours["status"] == packed["status"] == "measured", (ours, packed)
    assert ours["tokens_per_step"] == packed["tokens_per_step"]
    for figure in ("loss_first", "loss_last", "grad_norm"):  # the same packs, adapters and optimizer: the same numbers
        assert ours[figure] == pytest.approx(packed[figure], rel=1e-4)
    for row in (ours, packed):
        assert row["tokens_per_second"] > 0
        assert row["seconds_to_first_step"] == row["marks"]["first_step"] > row["marks"]["imports"] > 0
        assert row["changed_share"] > 0.9


def test_a_crash_is_told_with_its_error(tiny: tuple[Path, Results, str]) -> None:
    _, results, text = tiny
    row = results.get("tiny", "unsloth") or {}
    assert (row["status"], row["why"]) == ("failed", "RuntimeError: no kernels for this card")
    assert "failed: RuntimeError: no kernels for this card" in text


def test_everything_is_written(tiny: tuple[Path, Results, str]) -> None:
    out, results, text = tiny
    content = json.loads((out / NAME).read_text())
    assert content["results"] == results.rows
    assert content["commands"] == ["pronghorn bench"]
    assert [row["system"] for row in results.rows] == ["ceiling", "pronghorn", "packed", "unsloth"]
    assert len(text.splitlines()) == 4
    assert "no kernels" in (out / PICTURE).read_text()
    assert "RESULT" in (out / "logs" / "tiny.pronghorn.log").read_text()


def test_the_same_command_goes_on_with_what_is_missing(tiny: tuple[Path, Results, str], tmp_path: Path) -> None:
    out, before, _ = tiny
    slow = fake(tmp_path / "slow", "import time; time.sleep(60)")
    plan = Plan(out=tmp_path, workloads=["tiny"], systems=["pronghorn", "packed", "unsloth", "unsloth-ckpt"], time_limit=3,
                paths={"unsloth": slow}, resume=out / NAME)
    began = time.monotonic()
    results, text = said(plan)
    assert time.monotonic() - began < 20
    assert text.count("\n") == 1  # only the variant was missing
    assert "[5/5] tiny          unsloth-ckpt  timed out: not done after 3 s" in text
    for system in ("ceiling", "pronghorn", "packed", "unsloth"):
        assert results.get("tiny", system) == before.get("tiny", system)
    again, text = said(Plan(out=tmp_path, workloads=["tiny"], systems=["unsloth", "unsloth-ckpt"], time_limit=60,
                            again=["unsloth-ckpt"], paths={"unsloth": fake(tmp_path / "b", "raise ValueError('now otherwise')")}))
    assert (again.get("tiny", "unsloth-ckpt") or {})["why"] == "ValueError: now otherwise"
    assert (again.get("tiny", "unsloth") or {})["why"] == "RuntimeError: no kernels for this card"


def test_a_run_that_is_ended_keeps_what_it_has_and_leaves_no_process(tiny: tuple[Path, Results, str], tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    slow = fake(tmp_path / "slow", f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
                                   "time.sleep(120)")
    out = tmp_path / "out"
    words = ["bench", "--workloads", "tiny", "--systems", "unsloth", "--path", f"unsloth={slow}", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "pronghorn.cli", *words], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 40
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert [row["system"] for row in Results(out / NAME).rows] == ["ceiling"]


def test_a_system_that_is_not_there_is_named() -> None:
    nowhere = System("nowhere", "Nowhere", needs=("no_such_module", "torch"))
    assert missing(nowhere, WORKLOADS["tiny"]) == ["no_such_module"]
    if importlib.util.find_spec("bitsandbytes") is None:
        assert missing(SYSTEMS["packed"], WORKLOADS["qwen3-14b"]) == ["bitsandbytes"]


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="it is installed here")
def test_a_system_that_is_not_installed_has_a_row(tiny: tuple[Path, Results, str], tmp_path: Path) -> None:
    results, text = said(Plan(out=tmp_path, workloads=["tiny"], systems=["unsloth"], resume=tiny[0] / NAME, again=["unsloth"]))
    assert (results.get("tiny", "unsloth") or {})["status"] == "not installed"
    assert "not installed: no module unsloth" in text


def test_what_we_have_not_built_is_listed_without_its_peers(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path, workloads=["qwen3-14b"])
    assert [(workload.name, system) for workload, system in plan.jobs()] == [("qwen3-14b", "pronghorn")]
    results, _ = said(plan)
    assert (results.get("qwen3-14b", "pronghorn") or {})["why"] == "needs qlora, not built yet"
    assert [system for _, system in Plan(out=tmp_path, workloads=["qwen3-14b"], systems=["unsloth-ckpt"]).jobs()] == [
        "ceiling", "unsloth-ckpt"]  # fmt: skip


def test_paths_are_for_the_systems_they_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    paths = parse_paths([f"unsloth={tmp_path}/a:{tmp_path}/b", f"liger-ckpt={tmp_path}/b"])
    plan = Plan(out=tmp_path, workloads=[], paths=paths)
    monkeypatch.setenv("PYTHONPATH", "inherited")

    def folders(system: str) -> list[str]:
        return environment(plan, system)["PYTHONPATH"].split(":")

    assert folders("unsloth")[:2] == folders("unsloth-ckpt")[:2] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert str(Path("inherited").resolve()) in folders("liger")
    assert folders("liger-ckpt")[0] == str(tmp_path / "b")
    assert all((Path(folders(system)[-1]) / "pronghorn").is_dir() for system in ("unsloth", "liger-ckpt"))


@pytest.mark.parametrize("word", ["unsloth", "unsloth=", "nobody=/tmp", "unsloth=/no/such/folder"])
def test_a_path_that_cannot_be_read_is_refused(word: str) -> None:
    with pytest.raises(CommandError, match="--path"):
        parse_paths([word])


def test_only_peers_get_another_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    plan: Any = Plan(out=tmp_path, workloads=[])
    assert "PYTORCH_CUDA_ALLOC_CONF" in environment(plan, "liger")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(plan, "pronghorn")
