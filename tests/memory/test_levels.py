"""What given levels take and cost: the order of the layers, and copies that hide. The search over them: test_plan.py."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from real_layers import recomputing
from test_plan import problem_of

from pronghorn.memory.costs import Costs, LayerCosts
from pronghorn.memory.levels import KEEP, Choice, evaluate
from pronghorn.memory.plan import make_plan


def test_layers_with_the_largest_working_set_stand_at_the_bottom_and_offloading_is_spread() -> None:
    problem = problem_of(6)
    levels = [Choice("layer"), Choice("gate_up"), KEEP, KEEP, KEEP, KEEP]
    least = min(evaluate(problem, order).peak for order in itertools.permutations(levels))
    assert evaluate(problem, levels).peak == least < evaluate(problem, levels[::-1]).peak
    plan = make_plan(problem_of(32, 62))
    assert {choice.level for choice in plan.choices} == {"nothing"}
    gaps = [b - a for a, b in itertools.pairwise(plan.offloaded)]
    assert min(gaps) >= 2  # a copy takes longer than one layer's forward: there is a layer between
    assert max(gaps) - min(gaps) <= 1
    assert plan.choices[-1] == KEEP  # what backward needs first does not leave


def test_hidden_copies_cost_nothing_and_slow_ones_the_difference() -> None:
    costs = Costs((LayerCosts(10, 20, recomputing(5, 7, 8)),), 0, 0, 1, 1)
    problem = replace(problem_of(4), costs=costs)
    slot = problem.slot("layer")
    levels = [Choice("layer", offload=True), Choice("layer")] * 2

    def ms(forth: float, home: float) -> float:
        return evaluate(replace(problem, costs=replace(costs, to_host=slot / forth, from_host=slot / home)), levels).ms

    assert ms(20, 56) == pytest.approx(4 * 38)  # two layers' compute for each copy: 20 and 56 ms
    assert ms(23, 56) == pytest.approx(4 * 38 + 6)
    assert ms(20, 60) == pytest.approx(4 * 38 + 8)
