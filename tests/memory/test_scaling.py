"""Forecasts on several GPUs: the arithmetic by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import CommandError
from pronghorn.memory.dry_run import embedding_bytes, expert_bytes, layers_of, static_parts, trained_parameters
from pronghorn.memory.forecast import job_of, plan_report
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.scaling import Way, foretold_sum, scaling
from pronghorn.recipe import Recipe
from tables import table

LLAMA = MODELS["llama-1b"]  # 16 layers, 8 heads of keys and values, 64 wide


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({"model": "llama-1b", "data": {"train": ["x"]}, "train": {"batch_tokens": 65536}} | changes)


def ways(found: Any) -> dict[str, Way]:
    return {one.way: one for one in found.ways}


def test_one_gpu_is_what_the_plan_of_one_says() -> None:
    one, alone = ways(scaling(recipe(), LLAMA, gpus="1xh100")), plan_report(recipe(), LLAMA, gpu="h100")
    assert one["none"].compute_ms == pytest.approx(alone.step_ms, abs=1e-3)
    assert one["none"].peak_bytes == one["base"].peak_bytes == alone.plan.peak_bytes
    assert one["none"].sent_bytes == one["base"].sent_bytes == 0


def test_bytes_over_links_by_hand() -> None:
    """Two machines of four: 65,536 tokens are four packs, so eight GPUs have one each, and a step is twice as large."""
    found = scaling(recipe(), LLAMA, gpus="4xh100", machines=2, link="nvlink,100gbit")
    none, base = (ways(found)[way] for way in ("none", "base"))
    job = job_of(recipe(), LLAMA, GPUS["h100"])
    assert (found.packs, found.step_tokens) == (1, 131072)
    assert "train.batch_tokens: 131072, a pack per GPU" in found.text()
    uneven = scaling(recipe(), LLAMA, gpus="3xh100")  # one of them has two
    assert (uneven.packs, uneven.step_tokens) == (2, 65536)
    assert "a pack per GPU" not in uneven.text()
    gradients, network = 4 * trained_parameters(job), 4 * 100 / 8 * 1e6  # bytes, and bytes a ms of a machine's cards
    assert none.sent_bytes == pytest.approx(2 * 7 / 8 * gradients, abs=1)
    assert none.link_ms == pytest.approx(2 * 7 / 8 * gradients / network, abs=1e-3)
    alone = plan_report(recipe(train={"batch_tokens": 16384}), LLAMA, gpu="h100")
    assert none.compute_ms == pytest.approx(alone.step_ms, abs=1e-3)
    weights, stored, embeddings = static_parts(job)["weights"], layers_of(job)[0].stored, embedding_bytes(job)
    assert none.peak_bytes - base.peak_bytes == pytest.approx(7 / 8 * weights - 2 * embeddings - stored, rel=1e-6)
    gathered = (2 * 16 - 2) * stored + 2 * embeddings
    assert base.sent_bytes == pytest.approx(none.sent_bytes + 7 / 8 * gathered, rel=1e-6)
    assert foretold_sum(GPUS["h100"], 2, 1, 450_000_000) == pytest.approx(0.001)


def test_full_fine_tuning_is_spread_until_it_fits() -> None:
    small = recipe(method="full", train={"batch_tokens": 2048, "capacity": 2048}, data={"train": ["x"], "max_length": 2048})
    eight = ways(scaling(small, LLAMA, gpus="8xrtx4090"))
    assert "no frozen weights" in eight["base"].why
    assert "does not fit: needs" in eight["none"].why
    job = job_of(small, LLAMA)
    trained, of_layers = trained_parameters(job), sum(layer.trained for layer in layers_of(job))
    assert eight["full"].sent_bytes == pytest.approx(7 / 8 * (2 * of_layers + 2 * trained + 4 * trained), abs=1)
    groups = small.model_copy(update={"world": small.world.model_copy(update={"replicate": 2})})
    four = ways(scaling(groups, LLAMA, gpus="8xrtx4090"))["full"]  # four GPUs share weights, two groups sum gradients
    assert four.peak_bytes > eight["full"].peak_bytes
    between = 2 * 1 / 2 * 4 * trained / 4
    assert four.sent_bytes == pytest.approx(3 / 4 * (2 * of_layers + 6 * trained) + between, abs=1)


def test_gpus_that_share_packs_gather_keys_and_values() -> None:
    shared = recipe(world={"context": 4}, train={"capacity": 65536, "batch_tokens": 131072})
    found = scaling(shared, LLAMA, gpus="8xh100")
    assert (found.packs, found.step_tokens) == (1, 131072)
    whole = recipe(train={"capacity": 65536, "batch_tokens": 8 * 65536})
    none, alone = ways(found)["none"], ways(scaling(whole, LLAMA, gpus="8xh100"))["none"]
    gathered = 16 * 2 * 8 * 64 * 2 * 65536  # layers, keys and values, heads, width, bytes, tokens
    assert none.sent_bytes - alone.sent_bytes == pytest.approx(3 / 4 * 4 * gathered, abs=1)  # gradients in fp32
    with pytest.raises(CommandError, match=r"world\.context: 4 does not divide the 6 ranks"):
        scaling(shared, LLAMA, gpus="6xh100")


def test_experts_are_spread() -> None:
    config = MODELS["qwen3-30b-a3b-4layers"]
    eight, job = ways(scaling(recipe(), config, gpus="8xh100")), job_of(recipe(), config)
    assert eight["none"].peak_bytes - eight["experts"].peak_bytes == pytest.approx(7 / 8 * expert_bytes(job), rel=1e-6)
    rows = 7 / 8 * 4 * 4 * 16384 * 8 * 2048 * 2  # layers, times, tokens, experts of each, width, bytes
    assert eight["experts"].sent_bytes == pytest.approx(eight["none"].sent_bytes + rows, rel=1e-6)
    assert "128 experts" in ways(scaling(recipe(), config, gpus="8xh100", machines=32))["experts"].why


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
        scaling(recipe(), LLAMA, **asked)
    assert said in refused.value.fix
