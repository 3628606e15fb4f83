"""Wall-clock accounting: exclusive, complete, and counted from the process's creation."""

import json
import subprocess
import sys
import time

import pytest

from pronghorn.report.stages import STAGES, Stages


class Clock:
    """Time that passes when a test says so: a slow machine is no failure."""

    def __init__(self):
        self.now = 1_000_000_000

    def monotonic_ns(self):
        return self.now

    def pass_by(self, seconds):
        self.now += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("pronghorn.report.stages.time", clock)
    return clock


def test_an_inner_stage_pauses_the_outer_one_and_the_rest_is_other(clock):
    stages = Stages(started=1.0)
    with stages("step"):
        clock.pass_by(5)
        with stages("wait"):
            clock.pass_by(10)
        clock.pass_by(6)
    clock.pass_by(3)
    seconds = stages.seconds
    assert [seconds[name] for name in ("step", "wait", "other", "imports")] == [11, 10, 3, 0]


def test_parts_sum_to_the_total_exactly_and_the_total_is_the_wall_clock():
    began = time.monotonic()
    stages = Stages(started=began)
    for _ in range(1000):
        with stages("step"), stages("optimizer"):
            pass
    event = json.loads(json.dumps(stages.event()))
    assert sum(event["seconds"].values()) == event["total"]
    assert tuple(event["seconds"]) == STAGES
    least = time.monotonic() - began
    assert least - 1e-6 <= stages.total() <= time.monotonic() - began + 1e-6


def test_time_before_the_first_line_of_python_counts_as_imports():
    code = "import time; time.sleep(0.3)\nfrom pronghorn.report.stages import Stages\nprint(Stages().seconds['imports'])"
    began = time.monotonic()
    imports = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.28 <= imports <= time.monotonic() - began + 0.02  # the kernel's clock tick is 0.01 s
