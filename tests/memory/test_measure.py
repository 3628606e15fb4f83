from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pronghorn.memory import measure
from pronghorn.memory.measure import LayerWork, copy_rates, measure_costs, milliseconds

CPU = torch.device("cpu")


class Clock:
    """Time that passes when work says so, and a microsecond at each look: a slow machine is no failure."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def work(self, ms: float) -> Callable[[], None]:
        def passes() -> None:
            self.now += ms / 1000

        return passes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure, "time", clock)
    return clock


def test_times_are_those_of_the_work_and_go_where_they_belong(clock: Clock) -> None:
    work = LayerWork(
        forward=clock.work(4),
        gate_up_and_backward=clock.work(150),
        recompute={"gate_up": clock.work(2), "layer": clock.work(3)},
        pieces=(clock.work(10), clock.work(130), 4),
    )
    costs = measure_costs([work], CPU, rest=clock.work(6), repeats=3, copy_bytes=1 << 16)
    layer = costs.kinds[0]
    assert costs.measured
    for measured, took in (
        (layer.forward, 4),
        (layer.recompute["gate_up"], 2),
        (layer.recompute["layer"], 3),
        (layer.recompute["nothing"], 0),
        (costs.rest, 6),
    ):
        assert measured == pytest.approx(took, abs=0.01)
    assert layer.backward == pytest.approx(148, abs=0.01)  # without what was computed again before it
    assert layer.piece == pytest.approx(40, abs=0.01)  # each of three further turns
    assert costs.times(2).kinds[0].backward == 2 * layer.backward
    assert costs.times(2).to_host == costs.to_host
    assert costs.optimizer == 0
    assert costs.to_host > 0


def test_the_median_forgives_one_slow_run_and_warm_up_is_not_counted(clock: Clock) -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        clock.work(200 if len(calls) in (1, 4) else 3)()  # a compilation, and a hiccup

    assert milliseconds(work, CPU, repeats=5, warm_up=1) == pytest.approx(3, abs=0.01)
    assert len(calls) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_events_time_the_device() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    assert milliseconds(lambda: [x @ x for _ in range(4)], device) > 2 * milliseconds(lambda: x @ x, device)
    to_host, from_host = copy_rates(device, 64 << 20)
    assert min(to_host, from_host) > 1e6  # 1 GB/s
