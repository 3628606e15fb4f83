"""The peers' side of a benchmark, as far as a machine without a GPU and without peers can run it."""

from __future__ import annotations

import math
import time

import pytest

from benchmarks.bench import ours, peers
from benchmarks.bench.meter import Meter
from benchmarks.bench.pairs import pairs_a_step
from benchmarks.bench.results import rate
from benchmarks.bench.weights import make_model_folder
from benchmarks.bench.workloads import WORKLOADS
from tables import first_of
from trl_on_a_cpu import TorchLogProbs


@pytest.fixture(scope="module", autouse=True)
def _weights() -> None:
    make_model_folder("tiny")


def meter() -> Meter:
    return Meter(began=time.time(), warmup=1, steps=2, peak_from_first_step=False)


@pytest.mark.parametrize("name", ["tiny", "tiny-full"])
def test_both_sides_take_the_same_steps(name: str) -> None:
    """The same packs, weights, adapters and optimizer: the same numbers."""
    workload = WORKLOADS[name]
    one, other = ours.measure(workload, meter(), None), peers.measure("packed", workload, meter(), None)
    assert one["loss_first"] == pytest.approx(other["loss_first"], rel=1e-5)
    assert one["loss_last"] == pytest.approx(other["loss_last"], rel=1e-5)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert one["tokens_per_step"] == other["tokens_per_step"]
    assert min(one["changed_share"], other["changed_share"]) > 0.9


def test_a_model_with_states_is_padded_by_transformers() -> None:
    """So its steps have other documents, but about as many tokens, and the loss of the same random model."""
    make_model_folder("tiny-delta")
    workload = WORKLOADS["tiny-delta"]
    one, other = ours.measure(workload, meter(), None), peers.measure("padded", workload, meter(), None)
    assert one["loss_first"] == pytest.approx(other["loss_first"], rel=1e-2)
    assert one["tokens_per_step"] == pytest.approx(other["tokens_per_step"], rel=0.5)
    assert min(one["changed_share"], other["changed_share"]) > 0.9


@pytest.mark.parametrize("system", first_of(["pronghorn", "dropin", "trl"], 2))
def test_preference_pairs(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every system trains on about as many pairs a step; the adapter begins as zeros, so the first loss is log 2."""
    monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)
    workload = WORKLOADS["tiny-dpo"]
    if system == "pronghorn":
        row = ours.measure(workload, meter(), None)
        assert row["marks"]["reference"] >= row["marks"]["model"]
    else:
        row = peers.measure(system, workload, meter(), None)
    assert row["loss_first"] == pytest.approx(math.log(2), rel=1e-4)
    assert abs(row["pairs_per_step"] - pairs_a_step(workload)) <= 1
    assert rate(row | {"status": "measured"}) == row["pairs_per_second"] > 0
