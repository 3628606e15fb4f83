from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from benchmarks.bench.power import PowerWatch, Sample, sample_of, summary


def test_a_line_of_nvidia_smi() -> None:
    assert sample_of("694.31, 1500, 0x0000000000000004\n", 2.0) == Sample(2.0, 694.31, 1500, True)
    assert sample_of("80.5, 1980, 0x0000000000000001", 0.0) == Sample(0.0, 80.5, 1980, False)
    assert sample_of("Field is not a valid field to query.", 0.0) is None
    assert sample_of("[N/A], 1980, 0x0", 0.0) is None


def test_only_the_timed_part_counts() -> None:
    samples = [Sample(float(i), 100.0 * i, 2000.0 - i, i >= 3) for i in range(6)]
    assert summary(samples, 0.5, 4.5) == {"watts": 300, "sm_mhz": 1997, "power_limited": 0.67}  # 2, 3 and 4
    assert summary(samples, 4.5, 5.5) == {}


def test_it_is_read_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho \"$@\" > $0.asked\nwhile true; do echo '500.0, 1600, 0x4'; sleep 0.05; done\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    watch, begin = PowerWatch("GPU-1"), time.perf_counter()
    while len(watch.samples) < 3 and time.perf_counter() < begin + 20:
        time.sleep(0.02)
    watch.stop()
    assert summary(watch.samples, 0.0, time.perf_counter()) == {"watts": 500, "sm_mhz": 1600, "power_limited": 1.0}
    assert "--id=GPU-1" in Path(f"{program}.asked").read_text()


def test_no_gpu_no_program() -> None:
    watch = PowerWatch(None)
    watch.stop()
    assert watch.samples == []
