from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from pronghorn.memory.measure import LayerWork, copy_rates, measure_costs, milliseconds

CPU = torch.device("cpu")


def sleeping(ms: float) -> Callable[[], None]:
    return lambda: time.sleep(ms / 1000)


def test_times_are_those_of_the_work_and_go_where_they_belong() -> None:
    work = LayerWork(forward=sleeping(4), gate_up_and_backward=sleeping(150), recompute_gate_up=sleeping(2),
                     recompute_around=sleeping(5), recompute_layer=sleeping(3), rest=sleeping(6),
                     pieces=(sleeping(10), sleeping(130), 4))
    costs = measure_costs(work, CPU, repeats=3, copy_bytes=1 << 16)
    assert costs.measured
    for measured, slept in ((costs.forward, 4), (costs.recompute_gate_up, 2), (costs.recompute_around, 5),
                            (costs.recompute_layer, 3), (costs.rest, 6)):
        assert slept <= measured < slept + 25  # a busy machine wakes late
    assert costs.backward == pytest.approx(148, abs=25)  # without what was computed again before it
    assert costs.piece == pytest.approx(40, abs=9)  # each of three further turns
    assert costs.times(2).backward == 2 * costs.backward
    assert costs.times(2).to_host == costs.to_host
    assert costs.optimizer == 0
    assert costs.to_host > 0


def test_the_median_forgives_one_slow_run_and_warm_up_is_not_counted() -> None:
    calls: list[int] = []

    def work() -> None:
        calls.append(1)
        if len(calls) in (1, 4):  # a compilation, and a hiccup
            time.sleep(0.2)

    assert milliseconds(work, CPU, repeats=5, warm_up=1) < 100
    assert len(calls) == 6


def test_known_rates_are_taken_as_they_are() -> None:
    nothing = LayerWork(*[lambda: None] * 5)  # type: ignore[arg-type]
    costs = measure_costs(nothing, CPU, repeats=2, rates=(5.0, 7.0), piece=0.5)
    assert (costs.to_host, costs.from_host, costs.piece) == (5.0, 7.0, 0.5)
    assert costs.forward > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_events_time_the_device() -> None:
    device = torch.device("cuda")
    x = torch.randn(4096, 4096, device=device)
    assert milliseconds(lambda: [x @ x for _ in range(4)], device) > 2 * milliseconds(lambda: x @ x, device)
    to_host, from_host = copy_rates(device, 64 << 20)
    assert min(to_host, from_host) > 1e6  # 1 GB/s
