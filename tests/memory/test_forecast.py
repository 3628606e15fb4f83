"""`pronghorn plan` as data and as text: they say the same, and what they say follows the recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from real_layers import recomputing

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import CommandError, RecipeError
from pronghorn.memory.costs import Costs, LayerCosts
from pronghorn.memory.forecast import HOST_BYTES, comparison, job_of, plan_report
from pronghorn.recipe import Recipe
from tables import table


def recipe(**changes: Any) -> Recipe:
    return Recipe.model_validate({"model": "llama-8b", "data": {"train": ["x"]}} | changes)


def test_the_text_says_what_the_data_says() -> None:
    forecast = plan_report(recipe(memory={"budget": "40GB"}, train={"steps": 100}), MODELS["llama-8b"], gpu="h200")
    told, text = json.loads(json.dumps(forecast.as_dict())), forecast.text(verbose=True)
    assert told["tokens"] == 100 * 65536
    assert told["cost"] == pytest.approx(told["hours"] * 3.59)
    assert told["hours"] == pytest.approx(told["tokens"] / told["tokens_per_second"] / 3600, rel=1e-4)
    assert f"step        {forecast.step_ms / 1000:,.1f} s, " in text
    assert f"{forecast.tokens_per_second:,.0f} tokens/s (predicted)" in text
    assert f"peak {forecast.plan.peak_bytes / 1e9:.1f} GB" in text
    assert "a list price of" in text
    assert "4 micro-batches" in text
    for level, count in forecast.plan.counts().items():
        line = next(line for line in text.splitlines() if line.startswith(f"{level.name}  "))
        assert line.split(level.name)[1].split()[0] == str(count)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("memory", "why", " "))) <= 100
    assert "kept on the GPU" not in forecast.text()
    whole = forecast.plan.device_bytes / 1e9
    assert f"fits: {whole:.1f} of the 150.1 GB (10^9 bytes) of a 141 GB card, with driver and fragmentation" in text
    assert f"the plan assumes that {HOST_BYTES / 1e9:.1f} GB" in text


def test_host_ram_that_is_assumed_is_told_first_with_the_plan_without() -> None:
    """An 8B model on a 24 GB card pinned 47.7 GB of RAM, told in the ninth line."""
    guess = plan_report(recipe(), MODELS["llama-8b"], gpu="rtx4090")
    lines = guess.text().splitlines()
    assert lines[1].startswith("assumes     64 GB of host RAM can be pinned")
    assert not guess.without.offloaded
    rate = guess.step_tokens / guess.without.step_ms(guess.micro_batches) * 1000
    (without,) = [line for line in lines if line.startswith("without it")]
    assert f"{rate:,.0f} tokens/s" in without
    known = plan_report(recipe(), MODELS["llama-8b"], gpu="rtx4090", host=0)
    assert known.plan.choices == guess.without.choices
    assert not any(line.startswith(("assumes", "without it")) for line in known.text().splitlines())
    small = plan_report(recipe(), MODELS["llama-8b"], gpu="l4")
    assert small.without is None
    assert "without it  the run does not fit" in small.text()
    table = comparison([guess, small]).splitlines()
    assert table[0].startswith("Assumes 64 GB of host RAM")
    assert [line.split()[1] for line in table[3:5]] == ["24", "24"]  # GB of memory
    assert table[4].split("offloaded")[1].split()[1:4] == ["does", "not", "fit"]
    assert table[5].startswith("Does not fit, or needs FP8: rtx3060, ")
    assert "answers" not in " ".join(table)
    answers = replace(small, plan=replace(small.plan, problem=replace(small.plan.problem, aside=1)))
    assert "time and USD are without the time in which answers are generated" in comparison([answers])


def test_the_parts_of_the_peak_add_up() -> None:
    for budget in ("24GB", "40GB", "auto"):
        text = plan_report(recipe(memory={"budget": budget}), MODELS["llama-8b"]).text()
        line = next(line for line in text.splitlines() if line.startswith("memory"))
        parts = [float(part.split()[-1]) for part in line[line.index("(") + 1 : line.index(")")].split(",")]
        assert sum(parts) == pytest.approx(float(line.split()[2]), abs=0.1)


def test_a_price_of_ones_own_and_measured_costs() -> None:
    own = plan_report(recipe(), MODELS["llama-8b"], gpu="rtx-pro-6000", price=10.0, tokens=10**9)
    assert own.cost == pytest.approx((own.hours or 0) * 10)
    assert "your price" in own.text()
    assert "not measured on this GPU" in own.text()
    costs = Costs((LayerCosts(10, 12, recomputing(5, 7, 8)),), 40, 0.4, 5e7, 5e7, measured=True)
    measured = plan_report(recipe(), MODELS["llama-8b"], costs=costs)
    assert measured.step_ms == pytest.approx(4 * (32 * 22 + 40) + 0.4)
    assert "from times measured on this GPU" in measured.text()
    assert measured.as_dict()["predicted"] is False
    assert "per billion tokens" in measured.text()


def test_the_recipe_decides() -> None:
    asked = recipe(lora={"r": 8, "targets": ["q_proj"]}, method="qlora", precision="fp32")
    job = job_of(asked, MODELS["llama-8b"], loss_share=0.3)
    assert (job.rank, job.targets, job.method, job.element) == (8, ("q_proj",), "qlora", 4)
    assert job.loss_rows == 5120  # 0.3 of 16,384, to the next sixteenth
    lora, qlora = (plan_report(recipe(method=m), MODELS["llama-8b"], gpu="h200").plan for m in ("lora", "qlora"))
    nvfp4 = plan_report(recipe(method="qlora", storage="nvfp4"), MODELS["llama-8b"], gpu="h200").plan
    assert qlora.peak_bytes < nvfp4.peak_bytes < lora.peak_bytes


@table(
    ("changes", "gpu", "error", "said"),
    [
        ({"memory": {"budget": "6GB"}}, "rtx4090", RecipeError, "the smallest that works"),
        ({"memory": {"budget": "200GB"}}, "h200", RecipeError, "exceeds the GPU's memory"),
        ({"method": "fp8"}, "a100-80", CommandError, "does not support FP8"),
        ({}, "gtx970", CommandError, "unknown GPU"),
    ],
)
def test_what_cannot_be_is_told(changes: dict[str, Any], gpu: str, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        plan_report(recipe(**changes), MODELS["llama-8b"], gpu=gpu)


def test_a_price_that_is_not_known_is_not_made_up() -> None:
    unknown = plan_report(recipe(), MODELS["tiny"], gpu="a10", tokens=10**9)
    assert (unknown.cost, unknown.cost_of_a_billion) == (None, None)
    assert "price       unknown" in unknown.text()
    assert "USD" not in unknown.text()


def test_gpus_that_share_packs_are_planned_by_their_part_and_paid_for_together() -> None:
    """Not captured, so adapters' gradients have no buffer; half of the activations each."""
    recipes = (recipe(world={"context": context}) for context in (1, 2))
    alone, shared = (plan_report(one, MODELS["llama-8b"], gpu="h200") for one in recipes)
    jobs = [one.plan.problem.job for one in (alone, shared)]
    assert (jobs[1].capacity, jobs[1].loss_rows, jobs[1].graphed) == (jobs[0].capacity // 2, jobs[0].loss_rows // 2, False)
    assert shared.step_tokens == alone.step_tokens
    assert shared.plan.device_bytes < alone.plan.device_bytes
    assert shared.cost_of_a_billion == pytest.approx(2e9 / shared.tokens_per_second / 3600 * 3.59)
    assert "2 such GPUs share each pack" in shared.text()
    assert "such GPUs" not in alone.text()
