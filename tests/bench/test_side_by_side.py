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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_rows import measured

from benchmarks.bench.__main__ import main
from benchmarks.bench.meter import machine
from benchmarks.bench.results import NAME, Results
from benchmarks.bench.side_by_side import PICTURE, Plan, environment, last_error, parse_paths, run
from benchmarks.bench.weights import model_folder
from benchmarks.bench.worker import missing
from benchmarks.bench.workloads import SYSTEMS, WORKLOADS, System
from pronghorn.errors import CommandError
from tables import table


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
def test_the_next_system_imports_while_one_measures_and_then_waits(tmp_path: Path) -> None:
    results_with(tmp_path)
    times = tmp_path / "times"
    slow = fake(
        tmp_path / "slow",
        f"import time; open({str(times)!r}, 'a').write(f'{{time.time()}}\\n'); time.sleep(1.5)\n"
        "raise RuntimeError('no such GPU')",
    )
    plan = Plan(
        out=tmp_path,
        workloads=["tiny"],
        systems=["unsloth", "unsloth-ckpt"],
        time_limit=30,
        paths={"unsloth": slow},
        ahead=True,
    )
    assert said(plan)[1].count("no such GPU") == 2
    first, second = map(float, times.read_text().split())
    assert second - first < 1.5

    turn = tmp_path / "turn"
    code = (
        f"import time; from pathlib import Path; from benchmarks.bench.worker import _wait_for\n"
        f"waited = _wait_for(Path({str(turn)!r})); time.sleep(1.0); print(waited)"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    waits = sorted(float(process.communicate(timeout=60)[0]) for process in both)
    assert waits[0] < 0.5 < waits[1]  # the second had to wait until the first was gone


@pytest.mark.usefixtures("no_weights_needed")
def test_a_crash_and_a_time_out_are_told_and_the_same_command_goes_on(tmp_path: Path) -> None:
    results_with(tmp_path, measured("tiny", "pronghorn", 100.0))
    broken = fake(tmp_path / "broken", "raise RuntimeError('no kernels for this card')")
    slow = fake(tmp_path / "slow", "import time; time.sleep(60)")
    wanted = ["pronghorn", "unsloth", "unsloth-ckpt"]
    plan = Plan(out=tmp_path, workloads=["tiny"], systems=wanted, time_limit=3, paths={"unsloth": broken, "unsloth-ckpt": slow})
    began = time.monotonic()
    results, text = said(plan)
    assert time.monotonic() - began < 30
    assert "[3/4] tiny          unsloth       failed: RuntimeError: no kernels for this card" in text
    assert "[4/4] tiny          unsloth-ckpt  timed out: not finished after 3 s" in text
    assert (results.get("tiny", "pronghorn") or {})["tokens_per_second"] == 100.0
    assert "no kernels" in (tmp_path / PICTURE).read_text()
    assert said(plan)[1] == ""  # told once; not tried again unless asked
    other = fake(tmp_path / "other", "raise ValueError('now otherwise')")
    results, _ = said(replace(plan, time_limit=60, again=["unsloth-ckpt"], paths={"unsloth": other}))
    assert (results.get("tiny", "unsloth-ckpt") or {})["why"] == "ValueError: now otherwise"
    assert (results.get("tiny", "unsloth") or {})["why"] == "RuntimeError: no kernels for this card"


@pytest.mark.usefixtures("no_weights_needed")
def test_a_run_that_is_ended_keeps_what_it_has_and_leaves_no_process(tmp_path: Path) -> None:
    mark, out = tmp_path / "pid", tmp_path / "out"
    slow = fake(
        tmp_path / "slow",
        f"import os, pathlib, time; pathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\ntime.sleep(120)",
    )
    words = ["--workloads", "tiny", "--systems", "unsloth", "--path", f"unsloth={slow}", "--out", str(out)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bench", *words], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 40
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
    assert [(row["system"], row["status"]) for row in Results(out / NAME).rows] == [("ceiling", "measured")]


def test_the_error_is_the_line_below_the_last_traceback() -> None:
    first = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "KeyError: 1", "", "During it:"]
    second = ["Traceback (most recent call last):", '  File "b.py", line 2', "    f()", "    ~^^",
              "torch.OutOfMemoryError: CUDA out of memory.", "Tried to allocate 2 GiB", "[W1] destroyed"]  # fmt: skip
    assert last_error(["loading", *first, *second], 1) == "torch.OutOfMemoryError: CUDA out of memory."
    assert last_error(["loading", "Killed"], -9) == "Killed (exit code -9)"
    assert last_error([], -11) == "exit code -11"


def test_a_system_that_is_not_there_is_named() -> None:
    nowhere = System("nowhere", "Nowhere", needs=("no_such_module", "torch"))
    assert missing(nowhere, WORKLOADS["tiny"]) == ["no_such_module"]
    if importlib.util.find_spec("bitsandbytes") is None:
        assert missing(SYSTEMS["packed"], WORKLOADS["qwen3-14b"]) == ["bitsandbytes"]


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is not None, reason="it is installed here")
@pytest.mark.usefixtures("no_weights_needed")
def test_a_system_that_is_not_installed_has_a_row(tmp_path: Path) -> None:
    earlier = results_with(tmp_path / "earlier").path
    results, text = said(Plan(out=tmp_path, workloads=["tiny"], systems=["unsloth"], resume=earlier))
    assert (results.get("tiny", "unsloth") or {})["status"] == "not installed"
    assert "not installed: no module unsloth" in text


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


@table("word", ["unsloth", "unsloth=", "nobody=/tmp", "unsloth=/no/such/folder"])
def test_a_path_that_cannot_be_read_is_refused(word: str) -> None:
    with pytest.raises(CommandError, match="--path"):
        parse_paths([word])


def test_only_peers_get_another_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    plan: Any = Plan(out=tmp_path, workloads=[])
    assert "PYTORCH_CUDA_ALLOC_CONF" in environment(plan, "liger")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(plan, "pronghorn")


@table("words", [
    "--workloads llama-2b", "--systems nobody", "--steps 0", "--resume no.json", "--path unsloth", "--again nobody",
])  # fmt: skip
def test_a_command_that_cannot_be_meant_starts_nothing(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "--workloads", "tiny", *words.split()]) == 2
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().err
