import pytest

from pronghorn.report.pace import Throughput


def test_the_window_forgets():
    rate = Throughput(window_seconds=10)
    for _ in range(10):
        rate.add(tokens=100, seconds=1)
    for _ in range(10):
        rate.add(tokens=300, seconds=1)
    assert rate.now() == pytest.approx(300)


def test_a_step_longer_than_the_window_still_counts():
    rate = Throughput(window_seconds=10)
    rate.add(100, 1)
    rate.add(5000, 50)
    assert rate.now() == pytest.approx(100)


def test_eta_is_not_misled_by_a_slow_first_step_and_includes_evaluations():
    rate = Throughput()
    rate.add(100, 20)
    for _ in range(4):
        rate.add(100, 2)
    assert rate.eta(10) == pytest.approx(20)
    rate.pause(5)  # one evaluation in five steps: one second a step
    assert rate.eta(10) == pytest.approx(30)
    assert rate.eta(0) == 0
