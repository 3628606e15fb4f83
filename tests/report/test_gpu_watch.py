"""What the GPUs do, sampled beside a run. NVML is a stand-in (fake_nvml.py), but for one test on a GPU."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from synthetic_run import synthetic_events

from fake_nvml import UUID, Cuda, FakeNvml
from pronghorn.report import gpu_log, gpu_watch
from pronghorn.report.account import account
from pronghorn.report.gpu_log import GpuLog, append
from pronghorn.report.gpu_watch import Nvml, devices, watching
from pronghorn.report.html import render_page
from pronghorn.report.run_log import RunLog
from pronghorn.report.run_stats import run_stats
from pronghorn.report.runs import compare, comparison_table, list_runs, runs_table
from pronghorn.report.summary import summary


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]


# ---- asking -----------------------------------------------------------------------------------------------------------------


def test_a_sample_is_what_the_library_writes() -> None:
    (found,) = Nvml([UUID], FakeNvml()).sample()
    assert found == {
        "memory": 30_000_000_000, "total": 80_000_000_000, "own": 29_000_000_000, "power": 250.5, "utilisation": 97,
        "energy": 1500.0,
    }  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_says_what_torch_says() -> None:
    block = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    about = torch.cuda.get_device_properties(block.device)
    nvml = Nvml([str(about.uuid)])
    (before,), (after,) = nvml.sample(), nvml.sample()
    assert before["memory"] is not None
    assert before["total"] is not None
    assert block.nbytes <= before["memory"] <= before["total"]
    assert about.total_memory <= before["total"] < 1.1 * about.total_memory
    assert before["power"] is None or 1.0 < before["power"] < 3000.0  # watts
    assert before["utilisation"] is None or 0 <= before["utilisation"] <= 100
    if before["energy"] is not None:
        assert after["energy"] is not None
        assert after["energy"] >= before["energy"] > 0.0


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetMemoryInfo", "memory"),
        ("nvmlDeviceGetPowerUsage", "power"),
        ("nvmlDeviceGetUtilizationRates", "utilisation"),
        ("nvmlDeviceGetTotalEnergyConsumption", "energy"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "own"),
    ],
)
def test_what_a_gpu_does_not_tell_is_null_and_the_rest_is_there(function: str, field: str) -> None:
    (found,) = Nvml([UUID], FakeNvml(without=(function,))).sample()
    assert [name for name, value in found.items() if value is None] == [field] + ["total"] * (field == "memory")


def test_a_part_of_a_gpu_is_found_too() -> None:
    assert Nvml([UUID], FakeNvml(known=(f"MIG-{UUID}",))).sample()[0]["memory"] == 30_000_000_000
    with pytest.raises(OSError, match="knows no GPU"):
        Nvml([UUID], FakeNvml(known=()))


@pytest.mark.parametrize(("ranks", "expected"), [(None, [1]), ("1", [1]), ("2", [0, 1]), ("8", [0, 1])])
def test_the_gpus_are_those_of_the_ranks_here(monkeypatch: pytest.MonkeyPatch, ranks: str | None, expected: list[int]) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert devices(Cuda(current=1)) == expected


# ---- beside a run -----------------------------------------------------------------------------------------------------------


def test_a_run_is_sampled_by_its_own_gpu_until_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GPU that the process sees is the second by UUID, whatever NVML counts."""
    library = FakeNvml(known=tuple(f"GPU-{uuid}" for uuid in Cuda.uuids))
    monkeypatch.setattr(gpu_watch, "CDLL", lambda name: library if name == "libnvidia-ml.so.1" else None)
    monkeypatch.setattr(gpu_watch, "EVERY", 0.01)
    for session in (1, 2):  # a resumed run goes on in the same file
        with RunLog(tmp_path) as log, watching(log, Cuda(current=1)):
            log.write("notice", text="for the session's number")
            before, deadline = library.asked, time.monotonic() + 20
            while library.asked < before + 3 and time.monotonic() < deadline:
                time.sleep(0.005)
        assert samples(tmp_path)[-1]["session"] == session
    count = len(found := samples(tmp_path))
    assert count == library.asked
    assert {one["gpus"][0]["memory"] for one in found} == {40_000_000_000}
    assert "gpu-watch" not in {thread.name for thread in threading.enumerate()}
    seen = GpuLog.of(tmp_path)
    assert len(seen.times) == count
    assert seen.joules == 500 * (count - 2)  # nothing between the sessions


def _missing(_name: str) -> Any:
    raise OSError("libnvidia-ml.so.1: cannot open shared object file: No such file or directory")


class Refuses(FakeNvml):
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return 9  # NVML_ERROR_DRIVER_NOT_LOADED


@pytest.mark.parametrize(
    "load",
    [_missing, lambda _: Refuses(), lambda _: FakeNvml(known=()), lambda _: object()],
    ids=["none", "off", "other", "old"],
)
def test_without_nvml_there_is_no_file_and_no_fuss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], load: Any
) -> None:
    monkeypatch.setattr(gpu_watch, "CDLL", load)
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(str(args)))
    with RunLog(tmp_path) as log, watching(log, Cuda()):
        log.write("notice", text="the run goes on")
    assert [file.name for file in tmp_path.iterdir()] == ["run.jsonl"]
    assert capfd.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_ends_the_sampling_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = FakeNvml()
    monkeypatch.setattr(gpu_watch, "CDLL", lambda _: library)
    (tmp_path / "gpu.jsonl").mkdir()
    with RunLog(tmp_path) as log, watching(log, Cuda()):
        log.write("notice", text="the run goes on")
    assert library.asked == 1
    assert capfd.readouterr() == ("", "")
    assert not GpuLog.of(tmp_path).times


def test_without_a_gpu_nothing_is_started(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log, watching(log, SimpleNamespace(is_available=lambda: False)):
        assert "gpu-watch" not in {thread.name for thread in threading.enumerate()}


# ---- the file ---------------------------------------------------------------------------------------------------------------


def one(**changes: float | None) -> dict[str, float | None]:
    return {"memory": 2e9, "total": 8e9, "own": None, "power": 100.0, "utilisation": 50, "energy": None} | changes


def test_energy_is_the_counters_else_the_powers(tmp_path: Path) -> None:
    append(tmp_path, 1, 0.0, [one(energy=1000.0)])
    append(tmp_path, 1, 10.0, [one(energy=4000.0)])
    append(tmp_path, 2, 100.0, [one(power=100.0)])
    append(tmp_path, 2, 110.0, [one(power=300.0)])
    assert GpuLog.of(tmp_path).joules == 3000 + 10 * 200
    append(tmp_path, 2, 120.0, [one(power=None)])
    append(tmp_path, 2, 130.0, [one(power=300.0)])
    assert GpuLog.of(tmp_path).joules == 5000


def test_of_several_gpus_power_is_added_up_and_the_fullest_is_told(tmp_path: Path) -> None:
    append(tmp_path, 1, 0.0, [one(energy=0.0), one(memory=6e9, power=50.0, utilisation=100, energy=0.0)])
    append(tmp_path, 1, 5.0, [one(energy=7.0), one(energy=8.0)])
    found = GpuLog.of(tmp_path)
    assert {name: column[0] for name, column in found.columns.items()} == {"memory": 6.0, "power": 150.0, "utilisation": 75.0}
    assert (found.gpus, found.joules) == (2, 15.0)


def test_a_torn_line_and_what_is_no_sample_are_left_out(tmp_path: Path) -> None:
    append(tmp_path, 1, 0.0, [one()])
    file = tmp_path / "gpu.jsonl"
    with file.open("ab") as log:
        log.write(b'{"time":5.0,"session":1,"gp')
    reader = GpuLog.of(tmp_path)
    assert list(reader.times) == [0.0]
    append(tmp_path, 2, 10.0, [one()])  # of a resumed run
    for line in (b"7", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"time":"x","gpus":[{}]}', b'{"time":1,"gpus":[]}'):
        with file.open("ab") as log:
            log.write(line + b"\n")
    huge = {"time": 15.0, "session": 2, "gpus": [one(power=int("9" * 400))]}
    with file.open("ab") as log:
        log.write(json.dumps(huge).encode() + b"\n")
    append(tmp_path, 2, 20.0, [one()])
    assert reader.refresh()
    assert list(reader.times) == list(GpuLog.of(tmp_path).times) == [0.0, 10.0, 15.0, 20.0]
    assert math.isnan(reader.columns["power"][2])  # as if the GPU did not tell
    assert not reader.refresh()


def test_another_file_in_its_place_is_read_from_the_beginning(tmp_path: Path) -> None:
    for at in range(5):
        append(tmp_path, 1, float(at), [one()])
    reader = GpuLog.of(tmp_path)
    (tmp_path / "gpu.jsonl").unlink()
    assert not reader.refresh()
    assert not reader.times
    append(tmp_path, 1, 7.0, [one()])
    assert reader.refresh()
    assert list(reader.times) == [7.0]


def test_a_step_has_the_samples_that_were_taken_in_it(tmp_path: Path) -> None:
    for at, power in ((1.0, 100.0), (6.0, 300.0), (11.0, 500.0), (60.0, 700.0)):
        append(tmp_path, 1, at, [one(power=power, memory=power * 1e9)])
    found = GpuLog.of(tmp_path)
    ends, seconds = [0.5, 12.0, 12.5, 40.0], [0.5, 11.5, 0.5, 1.0]
    power, memory = (found.by_step(name, ends, seconds) for name in ("power", "memory"))
    # before the first sample; a long step; a short one takes the last sample; none was near the last step
    assert power[1:3] == [300.0, 400.0]
    assert memory[1:3] == [500.0, 500.0]
    assert [math.isnan(value) for value in power] == [True, False, False, True]


# ---- what is shown ----------------------------------------------------------------------------------------------------------


def printed(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(shown)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_shows_what_was_sampled_and_nothing_where_nothing_was(tmp_path: Path) -> None:
    events = synthetic_events(60)
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    at = events[0]["time"]
    for sample in range(12):
        append(tmp_path / "with", 1, at + 5 * sample, [one(energy=60_000.0 * sample)])
    gpu, titles = GpuLog.of(tmp_path / "with"), [title for title, _, _ in gpu_log.FIGURES.values()]
    page, plain = (render_page(events, gpu=found) for found in (gpu, None))
    assert all(f"<h3>{title}</h3>" in page for title in titles)
    assert not any(title in plain for title in titles)
    assert "0.183 kWh of 1 GPU, after loading" in page
    assert "energy 0.183 kWh of 1 GPU" in " ".join(printed(summary(events, gpu)).split())
    assert "kWh" not in plain + printed(summary(events))
    books = account(run_stats(events), events, gpu)
    assert books
    assert (books.as_dict()["energy"], books.as_dict()["energy_gpus"]) == (660_000 / 3.6e6, 1)
    assert "0.183 kWh" in printed(runs_table(list_runs(tmp_path)))
    assert "energy" not in printed(runs_table(list_runs(tmp_path / "without")))
    found = compare([tmp_path / "with", tmp_path / "without"])
    assert found["energy"] == [660_000 / 3.6e6, None]
    assert "energy" in printed(comparison_table(found))
