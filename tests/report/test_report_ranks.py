"""How long ranks waited, out of a run's log."""

from __future__ import annotations

from typing import Any

from pronghorn.report.html import render_page
from pronghorn.report.ranks import ranks_line
from pronghorn.report.run_log import history
from pronghorn.report.run_stats import run_stats


def start(ranks: int, device: str = "CPU (x, 2 cores)", **more: Any) -> dict[str, Any]:
    several = f"{ranks} x " if ranks > 1 else ""
    return {"event": "start", "time": 1.0, "session": 1, "ranks": ranks, "device": several + device, **more}


def looked(step: int, seconds: float, *waited: float) -> dict[str, Any]:
    return {"event": "ranks", "time": 2.0, "session": 1, "step": step, "seconds": seconds, "waited": list(waited)}


def test_shares_are_of_all_looks_and_the_slowest_waits_least() -> None:
    found = ranks_line([start(2), looked(2, 6.0, 1.0, 0.0), looked(4, 2.0, 1.0, 0.4)])
    assert found == ("2 ranks; 15 % of the time communicating or waiting for other ranks; slowest: rank 1, which waited 5.0 %")


def test_tokens_of_each_rank_and_the_forecast_beside_them() -> None:
    steps = [{"event": "step", "step": n, "tokens": 1000, "seconds": 0.5, "loss": 1.0} for n in (1, 2, 3)]
    found = ranks_line([start(2), *steps[:2], looked(2, 1.0, 0.3, 0.1) | {"foretold": 0.02}, steps[2]])
    assert found.startswith("2 ranks, 1,000 tokens per second each; 20 % of the time communicating")
    assert found.endswith("; predicted all-reduce time: 4.0 % of a step")


def test_one_rank_waits_for_nobody_and_a_resumed_run_counts_its_own() -> None:
    assert ranks_line([start(1)]) == ranks_line([start(2)]) == ""
    before = [start(2), looked(2, 6.0, 1.0, 0.0), looked(6, 6.0, 1.0, 0.0)]
    found = ranks_line(history([*before, start(3, resumed_from=4), looked(5, 4.0, 2.0, 1.0, 3.0)]))
    assert found.startswith("3 ranks; 50 % of the time")
    assert found.endswith("slowest: rank 1, which waited 25 %")


def test_gpus_are_counted_by_ranks() -> None:
    assert run_stats([start(2)]).gpus == 0
    assert run_stats([start(2, "NVIDIA H200")]).gpus == 2
    assert run_stats([start(1, "NVIDIA H200")]).gpus == 1
    stages = {"event": "stages", "time": 3.0, "session": 1, "seconds": {"step": 5.0}, "total": 5.0}
    assert "slowest: rank 1" in render_page([start(2), looked(2, 6.0, 1.0, 0.0), stages])
