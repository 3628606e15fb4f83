"""What halving costs, and who goes on: ties, budgets and trials without a loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pronghorn.errors import CommandError
from pronghorn.sweep.halving import Judgement, Rungs, allowed, chosen, ends, most_cuts
from pronghorn.sweep.plan import Budget, Work, planned, require_possible, told

COUNTS = np.array([10, 20, 30, 40])
WORK = Work(steps=900, tokens=9e6, warmup=27, look=0.01, seconds=600.0)


def judgement(*per_token: float, why: str = "") -> Judgement:
    facts = {"rung": 0, "step": 10, "tokens": 100, "seconds": 1.0}
    return Judgement(**facts, why=why) if why else Judgement.of(np.array(per_token) * COUNTS, COUNTS, **facts)


def test_nine_trials_take_three_runs_instead_of_nine() -> None:
    plan = Rungs.planned(9, 2, look=0.0)
    assert plan.shares == pytest.approx((1 / 9, 1 / 3, 1.0))
    assert plan.trials == (9, 3, 1)
    assert plan.cost(9) == pytest.approx(1 + 0.1 + 3 * (2 / 9 + 0.1 / 3) + 2 / 3)  # a tenth of each rung decays
    assert plan.cost(5, 1) == pytest.approx(5 * (2 / 9 + 0.1 / 3) + 2 / 3)  # two more, which tied
    assert plan.cost(1, 2) == pytest.approx(2 / 3)
    assert [plan.step(rung, 100) for rung in range(3)] == [12, 34, 100]
    assert [most_cuts(trials, 900, 9) for trials in (9, 10, 2, 1)] == [2, 3, 1, 0]
    assert most_cuts(9, 900, 60) == 1, "a rung of 100 steps, most of them warm-up, compares nothing"


def test_a_budget_is_spent_on_longer_rungs() -> None:
    """All but a part of a run, which is for ties."""
    assert chosen(9, range(3), 0.0, 2.6) == chosen(9, range(3), 0.0, 2.8) == Rungs.planned(9, 2, 0.0)
    longer = chosen(9, range(3), 0.0, 4.0)
    assert longer is not None
    assert longer.cost(9) == pytest.approx(3.7)
    assert longer.shares[0] == pytest.approx(longer.shares[1] / 3) == pytest.approx(1.76 / 9, rel=0.01)
    assert chosen(9, range(3), 0.0, 5.4) == Rungs.planned(9, 1, 0.0)
    assert chosen(9, range(3), 0.0, 9.0) == Rungs.planned(9, 0, 0.0)
    assert chosen(9, range(3), 0.0, 2.0) is None
    assert allowed(9, 2, 0.0) == pytest.approx(3.6), "0.4 of the grid"
    assert allowed(3, 1, 0.0) == pytest.approx(1.1 + 2 / 3 + 0.3)


def test_budgets_in_time_money_and_runs() -> None:
    assert Budget.of("20min", None).seconds == 1200
    assert Budget.of("1.5 h", None).seconds == 5400
    assert Budget.of("3USD", 2.0).seconds == 5400
    assert Budget.of("3 Runs", None).amount == 3
    for wrong in ("3", "20 minutes", "-3runs", "0runs", "EUR3"):
        with pytest.raises(CommandError, match="is no budget"):
            Budget.of(wrong, None)
    with pytest.raises(CommandError, match="no price is known"):
        Budget.of("3USD", None)


def test_a_budget_that_is_too_little_is_refused_with_one_that_is_enough() -> None:
    with pytest.raises(CommandError, match="too little for 9 trials") as refused:
        require_possible(9, Budget.of("2runs", None))
    assert "larger budget" in refused.value.fix  # how large, is known when the run's length is
    require_possible(9, Budget.of(refused.value.why.split()[3], None))
    for text, price in (("10min", None), ("1USD", 3.0)):
        with pytest.raises(CommandError) as refused:
            planned(9, WORK, Budget.of(text, price), spent=30.0)
        assert "100 of 900 steps" in refused.value.why
        enough = Budget.of(refused.value.fix.split()[2], price)
        least = Rungs.planned(9, 2, WORK.look).cost(9) * 600 + 30
        assert 1.5 * least <= enough.seconds <= 1.65 * least
        plan, _ = planned(9, replace(WORK, seconds=800.0), enough, spent=40.0)  # a start that is slower by a third
    assert "2.80 runs, and all to the end would be 9: about 28.0 min, 1.40 USD" in told(9, plan, WORK, enough, 3.0)


def name(number: int) -> str:
    return f"trial-{number}"


def test_the_best_go_on_and_those_that_tie_with_the_last_of_them() -> None:
    judged = {
        1: judgement(2.0, 2.1, 1.9, 2.0),
        2: judgement(1.5, 1.6, 1.4, 1.5),
        3: judgement(2.0, 2.0, 2.0, 2.0),  # worse than trial 1 by 0.01, where rows differ both ways
        4: judgement(2.1, 2.2, 2.0, 2.1),  # worse than trial 1 by 0.1 in every row
        5: judgement(why="diverged at step 7"),
    }
    assert set(ends(judged, COUNTS, 2, name, lambda _: True)) == {4, 5}
    reasons = ends(judged, COUNTS, 2, name, lambda count: count <= 2)
    assert set(reasons) == {3, 4, 5}
    assert "above trial-1, a tie; the budget has no room" in reasons[3]
    assert reasons[4] == "loss 0.1000 ± 0.0000 above trial-1"
    assert reasons[5] == "diverged at step 7"
    assert set(ends(judged, COUNTS, 2, name, lambda count: count <= 1)) == {1, 3, 4, 5}
    last = ends(judged, COUNTS, 1, name)
    assert set(last) == {1, 3, 4, 5}
    assert "budget" not in " ".join(last.values())
    assert ends({1: judgement(why="x"), 2: judgement(why="y")}, COUNTS, 1, name) == {1: "x", 2: "y"}


def test_a_paired_difference_is_known_where_losses_are_not() -> None:
    """All rows differ by 2 nats from each other; one trial is worse by 0.05 in each of them, which is no tie."""
    one, other = judgement(1.0, 3.0, 5.0, 7.0), judgement(1.05, 3.05, 5.05, 7.05)
    assert one.error > 0.5
    assert set(ends({1: one, 2: other}, COUNTS, 1, name, lambda _: True)) == {2}
    assert math.isinf(judgement(why="x").loss)
