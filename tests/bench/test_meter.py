"""The judge: a run that did not train has no speed."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.bench.meter import Meter, RunJudgedWrong
from tables import table


def trained(meter: Meter, *, change: bool = True, pairs: int = 0) -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    meter.ready(parameters)
    for _ in range(meter.total):
        time.sleep(0.005)
        if change:
            for parameter in parameters:
                parameter.data += 0.1
        meter.step_ended(torch.tensor(100), pairs)


def test_tokens_per_second_are_those_after_warm_up() -> None:
    meter = Meter(began=time.time() - 3, warmup=2, steps=4)
    trained(meter)
    figures = meter.result([2.0, 1.9], [0.5, 0.4])
    assert figures["tokens_per_step"] == 100
    assert 5 <= figures["ms_per_step"] < 50
    assert figures["tokens_per_second"] == pytest.approx(100 / figures["ms_per_step"] * 1000, rel=0.01)
    assert 3 <= figures["seconds_to_first_step"] < 4
    assert (figures["loss_first"], figures["loss_last"], figures["grad_norm"]) == (2.0, 1.9, 0.4)


@table(
    ("losses", "norms", "change", "why"),
    [
        ([2.0, 1.9], [0.5, 0.0], True, "gradient norm is 0"),
        ([2.0, 1.9], [], True, "gradient norm"),
        ([2.0, 1.9], [float("nan")], True, "gradient norm"),
        ([2.0, 2.2], [0.5], True, "loss rose"),
        ([2.0, float("nan")], [0.5], True, "loss rose"),
        ([2.0, 1.9], [0.5], False, "only 0% of the trained tensors changed"),
    ],
)
def test_a_run_that_did_not_train_is_refused(losses: list[float], norms: list[float], change: bool, why: str) -> None:
    meter = Meter(began=time.time(), warmup=1, steps=2)
    trained(meter, change=change)
    with pytest.raises(RunJudgedWrong, match=why):
        meter.result(losses, norms)
