"""The search for large models and for layers of several kinds. Whether it finds the best of small ones: test_plan.py, by brute
force."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.bench.workloads import MODELS
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.forecast import problem_of
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.job import Job, shape_of
from pronghorn.memory.levels import Choice, Problem, Tables, evaluate
from pronghorn.memory.plan import make_plan, smallest_budget
from pronghorn.memory.search import CHOSEN, fastest
from tables import first_of, table

GB = 10**9
# Dense layers first, experts after them, with and without a window.
THREE_KINDS: dict[str, Any] = {
    "model_type": "dots1",
    "vocab_size": 152064,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 3,
    "sliding_window": 512,
}


def problem(
    layers: int, budget: float, *, tokens: int = 16384, document: int = 300, host: float = 100.0, model: Any = None
) -> Problem:
    shape = shape_of((model or MODELS["llama-8b"]) | {"num_hidden_layers": layers})
    job = Job(shape, tokens, "qlora", graphed=False, attended=document)
    return problem_of(job, predicted_costs(job, GPUS["h200"]), int(budget * GB), int(host * GB))


def three_kinds(layers: int, budget: float, host: float = 100.0) -> Problem:
    types = ["full_attention" if i < 3 or i % 4 == 3 else "sliding_attention" for i in range(layers)]
    return problem(layers, budget, tokens=8192, host=host, model=THREE_KINDS | {"layer_types": types})


def test_attention_is_not_computed_twice_where_documents_are_long() -> None:
    """131,072 tokens within 24 GB: attention is most of a layer's forward, and its result a tenth of what backward needs."""
    given = problem(32, 24, tokens=131072, document=131072)
    long = make_plan(given)
    assert Choice("around_attention", offload=True) in long.counts()
    kind = given.costs.kinds[0]
    dear = replace(kind, recompute={**kind.recompute, "around_attention": kind.recompute["layer"]})
    assert make_plan(replace(given, costs=replace(given.costs, kinds=(dear,)))).ms > 1.15 * long.ms


@table("host", [0.0, 16.0])
def test_nothing_fits_below_the_smallest(host: float) -> None:
    """Also where the host has room for some of the layers only."""
    given = problem(32, 24, tokens=131072, document=131072, host=host)
    least = smallest_budget(given)
    assert fastest(replace(given, budget=least)) is not None
    assert fastest(replace(given, budget=least - 1)) is None


def test_layers_of_three_kinds_are_planned_in_under_two_seconds() -> None:
    """80 of them have 10^20 splits. Of the processor's own time: others may be at work, too."""
    began = time.process_time()
    given = three_kinds(80, 140)
    assert set(given.job.shape.kinds) == {0, 1, 2}
    plan = make_plan(given)
    assert time.process_time() - began < 2.0
    assert plan.needed_bytes <= given.usable
    assert plan.peak_bytes == evaluate(plan.problem, plan.choices, plan.pieces).peak
    alike = min(
        (outcome.ms for choice in CHOSEN if (outcome := evaluate(given, [choice] * 80)).peak <= given.usable), default=1e9
    )
    assert plan.ms < 0.95 * alike


def test_no_plan_of_three_kinds_is_faster_that_is_found_at_random() -> None:
    given = three_kinds(9, 16, host=3)
    plan, draw = make_plan(given), np.random.default_rng(0)
    assert len(set(plan.choices)) > 1
    kinds = np.array(given.job.shape.kinds)
    for case in given.cases():
        tables = Tables(case, 1)
        weights = draw.dirichlet(np.full(len(CHOSEN), 0.3), size=(4000, 3))
        levels = np.stack([[draw.choice(len(CHOSEN), p=weights[n, kind]) for kind in kinds] for n in range(4000)])
        found = tables.outcomes(levels // 2, levels % 2 == 1)
        fits = (found.peak <= given.usable) & (found.host <= case.host_left)
        assert fits.sum() > 20
        assert plan.ms <= found.ms[fits].min()


@pytest.mark.parametrize(("layers", "budget", "tokens", "document"), first_of([(126, 60, 16384, 300), (80, 30, 65536, 65536)]))
def test_a_large_model_is_planned_at_once(layers: int, budget: float, tokens: int, document: int) -> None:
    given = problem(layers, budget, tokens=tokens, document=document)
    began = time.process_time()
    plan = make_plan(given)
    assert time.process_time() - began < 4.0
    assert len(plan.choices) == layers
    assert plan.needed_bytes <= given.usable
    assert fastest(replace(given, budget=GB)) is None
