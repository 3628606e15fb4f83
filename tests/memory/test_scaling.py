"""Forecasts on several GPUs: the arithmetic by hand, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import CommandError
from pronghorn.memory.dry_run import embedding_bytes, kinds_of, static_parts, trained_parameters
from pronghorn.memory.forecast import plan_report
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.scaling import LATENCY, Spread, foretold_sum, scaling
from pronghorn.recipe import Recipe
from tables import table


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({"model": "llama-1b", "data": {"train": ["x"]}, "train": {"batch_tokens": 65536}} | changes)


def ways(found: Any) -> dict[str, Spread]:
    return {one.way: one for one in found.ways}


def test_one_gpu_is_what_the_plan_of_one_says() -> None:
    one, alone = (
        ways(scaling(recipe(), MODELS["llama-1b"], gpus="1xh100")),
        plan_report(recipe(), MODELS["llama-1b"], gpu="h100"),
    )
    assert one["none"].step_ms == pytest.approx(alone.step_ms)
    assert one["none"].peak_bytes == one["base"].peak_bytes == alone.plan.peak_bytes
    assert one["none"].exchange_ms == one["base"].exchange_ms == 0


def test_bytes_over_links_by_hand() -> None:
    """Two machines of four: 65,536 tokens are four packs, so eight GPUs have one each, and a step is twice as large."""
    found = scaling(recipe(), MODELS["llama-1b"], gpus="4xh100", machines=2, link="nvlink,100gbit")
    none, base = (ways(found)[way] for way in ("none", "base"))
    job = none.plan.problem.job
    assert (none.micro_batches, none.step_tokens) == (1, 131072)
    gradients, network = 4 * trained_parameters(job), 4 * 100 / 8 * 0.85 * 1e6  # bytes, and bytes a ms of a machine's cards
    assert none.exchanged_bytes == pytest.approx(2 * 7 / 8 * gradients)
    assert none.exchange_ms == pytest.approx(2 * 7 / 8 * gradients / network + 3 * LATENCY)
    alone = plan_report(recipe(train={"batch_tokens": 16384}), MODELS["llama-1b"], gpu="h100")
    assert none.step_ms == pytest.approx(alone.step_ms + none.exchange_ms)
    assert foretold_sum(GPUS["h100"], 2, 1, 360_000_000) == pytest.approx(0.001 + LATENCY / 1000)
    weights, stored, embeddings = static_parts(job)["weights"], kinds_of(job)[0].stored, embedding_bytes(job)
    assert none.peak_bytes - base.peak_bytes == pytest.approx(7 / 8 * weights - 2 * embeddings - stored, rel=1e-6)
    gathered = (2 * job.shape.layers - 2) * stored + 2 * embeddings
    assert base.exchanged_bytes == pytest.approx(none.exchanged_bytes + 7 / 8 * gathered, rel=1e-6)
    gather = 7 / 8 * stored / network + 3 * LATENCY
    assert gather < none.plan.problem.costs.kinds[0].forward  # hidden, but for the first layer's
    rest = 7 / 8 * embeddings / network + 3 * LATENCY - none.plan.problem.costs.kinds[0].backward
    assert base.exchange_ms == pytest.approx(none.exchange_ms + gather + 2 * max(0.0, rest))


def test_full_fine_tuning_is_spread_until_it_fits() -> None:
    small = recipe(method="full", train={"batch_tokens": 2048, "capacity": 2048}, data={"train": ["x"], "max_length": 2048})
    found = scaling(small, MODELS["llama-1b"], gpus="8xrtx4090")
    eight = ways(found)
    assert "no frozen weights" in eight["base"].why
    assert "does not fit: needs" in eight["none"].why
    assert eight["full"].plan is not None
    job = eight["full"].plan.problem.job
    (parts,), static, trained = kinds_of(job), static_parts(job), trained_parameters(job)
    rest = trained - job.shape.layers * parts.trained
    here = 4 * 4 * trained / 8 + 2 * 2 * rest + 4 * rest  # the rest of the model and its gradients in bf16, which leave in fp32
    elsewhere = static["weights"] + static["gradients and optimizer"] - here
    assert 4 * rest > (4 * 2 + 4) * parts.trained
    assert eight["full"].plan.peak_bytes - eight["full"].peak_bytes == pytest.approx(elsewhere, rel=1e-6)
    gathered = 2 * (2 * job.shape.layers * parts.trained + rest)
    assert eight["full"].exchanged_bytes == pytest.approx(7 / 8 * (gathered + 4 * trained), rel=1e-6)
    memory = [row[2].peak_bytes for row in found.table if row[2].plan]
    assert memory[-1] < memory[0]
    assert [row[0].fleet.size for row in found.table] == [1, 2, 4, 8, 16, 32]  # of desktop cards, four times what was asked


def test_experts_are_spread() -> None:
    found = scaling(recipe(), MODELS["qwen3-30b-a3b-4layers"], gpus="8xh100")
    eight = ways(found)
    assert eight["experts"].peak_bytes < eight["none"].peak_bytes
    assert eight["experts"].exchange_ms > eight["none"].exchange_ms
    assert "128 experts" in found.table[-1][3].why


@table(
    ("asked", "said"),
    [
        ({"gpus": "h100"}, "write it as 8xh100"),
        ({"gpus": "8xgtx970"}, "choose from"),
        ({"gpus": "8xh100", "link": "carrier-pigeon"}, "use nvlink"),
        ({"gpus": "8xrtx4090", "link": "nvlink"}, "use --link pcie"),
        ({"gpus": "8xh100", "machines": 0}, "use --nodes 1"),
    ],
)
def test_what_is_not_known_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError) as refused:
        scaling(recipe(), MODELS["llama-1b"], **asked)
    assert said in refused.value.fix
