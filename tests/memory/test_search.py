"""The search looks at few splits, as its bounds hold and are near. Whether it finds the best: test_plan.py, by brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from test_plan import each_size_once

from benchmarks.bench.workloads import MODELS
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.forecast import problem_of
from pronghorn.memory.gpus import GPUS
from pronghorn.memory.job import RECOMPUTES, Job, shape_of
from pronghorn.memory.levels import Level, Problem, evaluate
from pronghorn.memory.plan import make_plan, smallest_budget
from pronghorn.memory.search import KINDS, _Grid, fastest, smallest, splits_of, worth_its_memory
from tables import table

GB = 10**9


def problem(layers: int, budget: float, *, tokens: int = 16384, document: int = 300, host: float = 100.0) -> Problem:
    shape = replace(shape_of(MODELS["llama-8b"]), layers=layers)
    job = Job(shape, tokens, "qlora", graphed=False, attended=document)
    return problem_of(job, predicted_costs(job, GPUS["h200"]), int(budget * GB), int(host * GB))


def test_splits_are_all_there_is() -> None:
    splits = splits_of(5)
    assert len({tuple(split) for split in splits}) == len(splits)
    assert (splits >= 0).all()
    assert (splits.sum(axis=1) == 5).all()
    assert len(splits) == np.prod([(5 + i) / i for i in range(1, KINDS)]).round()


@pytest.mark.parametrize(("budget", "host", "document"), [(17, 100, 300), (24, 100, 300), (24, 20, 16384), (40, 5, 16384)])
def test_no_levels_that_fit_are_below_their_bound(budget: float, host: float, document: int) -> None:
    """Any levels of each kind, offloaded or not: those that fit take no less time than the bound of their split says."""
    given, draw, met = problem(12, budget, host=host, document=document), random.Random(0), 0
    case, pieces = given.cases()[-1], given.pieces[-1]
    grid, limit = _Grid(case, pieces), given.usable - given.aside + 1
    with each_size_once():
        for _ in range(600):
            wanted = draw.choices(RECOMPUTES, weights=[draw.random() ** 3 for _ in RECOMPUTES], k=12)
            share = draw.choice([0, 0.5, 0.9, 1])
            levels = [Level(kind, draw.random() < share) for kind in sorted(wanted, key=RECOMPUTES.index)]
            outcome = evaluate(case, levels, pieces)
            if outcome.peak >= limit or outcome.host > case.host_left:
                continue
            split = np.array([[wanted.count(kind) for kind in RECOMPUTES]])
            assert grid.bounds(split, limit)[0] <= outcome.ms
            met += 1
    assert met > 20


def test_attention_is_not_computed_twice_where_documents_are_long() -> None:
    """131,072 tokens within 24 GB: attention is most of a layer's forward, and its result a tenth of what backward needs."""
    given = problem(32, 24, tokens=131072, document=131072)
    long = make_plan(given)
    assert Level("around_attention", offload=True) in long.counts()
    never = replace(given.costs, recompute={**given.costs.recompute, "around_attention": given.costs.recompute["layer"]})
    assert make_plan(replace(given, costs=never)).ms > 1.15 * long.ms
    short = problem(32, 24)
    assert worth_its_memory(given)
    assert not worth_its_memory(short)
    assert "around_attention" not in {level.recompute for level in make_plan(short).levels}


@table("host", [0.0, 5.0, 16.0, 50.0])
def test_nothing_fits_below_the_smallest(host: float) -> None:
    """Also where the host has room for some of the layers only: the search for the fastest, which tries everything, agrees."""
    given = problem(32, 24, tokens=131072, document=131072, host=host)
    least = smallest_budget(given)
    assert fastest(replace(given, budget=least)) is not None
    assert fastest(replace(given, budget=least - 1)) is None


@pytest.mark.parametrize(
    ("layers", "budget", "tokens", "document"), [(80, 30, 16384, 300), (126, 60, 16384, 300), (80, 30, 65536, 65536)]
)
def test_a_large_model_is_planned_at_once(
    layers: int, budget: float, tokens: int, document: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 126-layer model took 65 to 211 s when every split with less compute than the best was looked at."""
    given, looked_at, table = problem(layers, budget, tokens=tokens, document=document), [], _Grid.table

    def noted(grid: _Grid, splits: np.ndarray, limit: float) -> object:
        looked_at.extend(splits)
        return table(grid, splits, limit)

    monkeypatch.setattr(_Grid, "table", noted)
    found = fastest(given)
    assert found is not None
    assert sum(found.staying) + sum(found.leaving) == layers
    assert len(looked_at) < 0.05 * len(given.pieces) * len(given.cases()) * len(splits_of(layers))
    assert fastest(replace(given, budget=GB)) is None
    assert sum(smallest(given).staying) + sum(smallest(given).leaving) == layers
