"""What the planner knows of optimizers: the bytes of their moments, here and on the host, and how long an update takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.bench.workloads import MODELS
from pronghorn.errors import RecipeError
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.dry_run import host_moments
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.job import Job, Optimizer, moment_bytes, shape_of
from pronghorn.memory.levels import Problem
from pronghorn.memory.plan import make_plan
from pronghorn.train.step.fused_adamw import FusedAdamW

KINDS: list[Optimizer] = ["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]


def job_of(optimizer: Optimizer, **changes: Any) -> Job:
    return replace(Job(shape_of(MODELS["llama-8b"]), 16384, method="full", optimizer=optimizer), **changes)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_take_what_the_formula_says(kind: Optimizer) -> None:
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((96, 96), (256, 1024), (3, 2000))]
    optimizer = FusedAdamW(params, eight_bit=kind.endswith("8bit"), paged=kind.startswith("paged"))
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    sizes = {"step": 0, "moments": 0, "absmax": 0}
    for param in params:
        for key, tensor in optimizer.state[param].items():
            sizes["step" if key == "step" else "absmax" if "absmax" in key else "moments"] += tensor.nbytes
    here, host = moment_bytes(kind, sum(param.numel() for param in params))
    assert host == (sizes["moments"] if kind.startswith("paged") else 0)
    assert here + host == pytest.approx(sizes["moments"] + sizes["absmax"], rel=1e-4)  # the last block of a tensor is partial


def test_host_memory_of_moments_is_not_given_away_twice() -> None:
    """A run that would offload layers does so with what the moments leave."""
    job = job_of("paged_adamw_8bit")
    costs = replace(predicted_costs(job, GPUS["h200"]), to_host=1e9, from_host=1e9)  # so fast that offloading is free
    budget = 110 * 10**9
    moments = host_moments(job)
    some = make_plan(Problem(job, costs, budget, 200 * 10**9))
    assert some.host_bytes > 0
    assert make_plan(Problem(job, costs, budget, moments + some.host_bytes)).host_bytes == some.host_bytes
    assert make_plan(Problem(job, costs, budget, moments + some.host_bytes - 1)).host_bytes < some.host_bytes
    assert make_plan(Problem(job, costs, budget, moments)).host_bytes == 0


def test_too_small_a_budget_names_the_optimizers_that_fit() -> None:
    """And where none does, what fits in their place."""
    job = job_of("adamw")
    for budget, fits in ((130, True), (80, False)):
        with pytest.raises(RecipeError) as refused:
            make_plan(Problem(job, predicted_costs(job, GPUS["h100"]), budget * 10**9, 10**12))
        assert ("train.optimizer: adamw_8bit (" in refused.value.fix) is fits
        assert ("train.optimizer: paged_adamw_8bit (" in refused.value.fix) is fits
        assert "method: qlora (" in refused.value.fix
