import pytest

from pronghorn.report.run_stats import cost

SECONDS = {"load": 600.0, "step": 2400.0, "optimizer": 300.0, "evaluate": 300.0}


def test_hours_money_and_waste():
    spent = cost(SECONDS, gpus=2, price_per_hour=3.0)
    assert spent.gpu_hours == pytest.approx(2.0)
    assert spent.money == pytest.approx(6.0)
    assert spent.wasted_share == pytest.approx(0.25)
    assert spent.wasted_gpu_hours == pytest.approx(0.5)


def test_no_price_no_gpu_no_time():
    assert cost(SECONDS).money is None
    assert cost(SECONDS, gpus=0).gpu_hours == 0.0
    assert cost({}).wasted_share == 0.0
