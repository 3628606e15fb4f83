"""Row by row comparisons of evaluations, against sums written out, redrawn rows, and losses that fall as the rule expects."""

from __future__ import annotations

import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Stop
from pronghorn.train.run.evaluate import Progress, QuestionScores
from pronghorn.train.run.paired import FEWEST, MOST, Floats, Seen, compared, difference, expected_gain, kept
from pronghorn.train.source.sizes import average_of_the_warm_up, no_constant_phase, too_few_questions, too_few_to_predict
from tables import table

NEEDS = "eval.stop.gain needs 4 evaluations at a constant rate"
ROWS = 200
chance = np.random.default_rng(7)
COUNTS = chance.integers(5, 80, ROWS)
HARD = chance.gamma(4.0, 0.2, ROWS)  # loss per token of each row: what pairing takes out
SLOPES = chance.normal(0.05, 0.1, ROWS)  # by which it falls in log tokens


def losses_at(tokens: int) -> Floats:
    return COUNTS * (HARD + 2.0 - SLOPES * math.log(tokens))


def test_a_difference_has_the_error_of_redrawn_rows_and_less_than_unpaired_ones() -> None:
    now, before = losses_at(2000), losses_at(1000)
    mean, error = difference(now, before, COUNTS)
    assert mean == pytest.approx((now.sum() - before.sum()) / COUNTS.sum())
    draws = [chance.integers(ROWS, size=ROWS) for _ in range(4000)]
    assert error == pytest.approx(np.std([(now - before)[rows].sum() / COUNTS[rows].sum() for rows in draws]), rel=0.1)
    alone = np.std([now[rows].sum() / COUNTS[rows].sum() for rows in draws])
    assert error < 0.5 * alone
    assert difference(now[:1], before[:1], COUNTS[:1])[1] == math.inf


def test_a_trend_in_log_tokens_is_carried_on_and_its_limit_is_that_of_the_rows() -> None:
    seen = [Seen.of(tokens, losses_at(tokens)) for tokens in (1000, 1500, 1800, 2000)]
    assert expected_gain(seen[1:], COUNTS, 8000, 0.9) is None
    gain, most = expected_gain(seen, COUNTS, 8000, 0.9) or (0, 0)
    row_gains = SLOPES * COUNTS * math.log(4)
    truth = row_gains.sum() / COUNTS.sum()
    assert gain == pytest.approx(truth, rel=1e-4)  # losses are kept in float32
    error = math.sqrt(np.square(row_gains - truth * COUNTS).sum()) / COUNTS.sum()
    assert most - gain == pytest.approx(1.2816 * error, rel=0.15)  # the 90 % point of a normal distribution
    assert expected_gain(seen, COUNTS, 8000, 0.9) == (gain, most)  # the same draws
    assert (expected_gain(seen, COUNTS, 2000, 0.9) or (1, 1)) == (0.0, 0.0)  # nothing is left


@table(
    ("before", "now", "left"),
    [
        ([], 10, [10]),
        ([1, 2, 3], 100, [1, 2, 3, 100]),  # old ones, where there are too few
        ([1, 2, 3, 4], 100, [2, 3, 4, 100]),
        ([10, 49, 50, 70, 90], 100, [50, 70, 90, 100]),
        (list(range(84, 99)), 100, [*range(84, 99), 100]),
        (list(range(83, 99)), 100, [83, 85, 87, 89, 91, 93, 95, 97, 100]),
    ],
)
def test_which_evaluations_a_trend_is_fitted_to(before: list[int], now: int, left: list[int]) -> None:
    zeros = np.zeros(2)
    found = kept([Seen.of(tokens, zeros) for tokens in before], Seen.of(now, zeros))
    assert [one.tokens for one in found] == left
    assert min(FEWEST, len(before) + 1) <= len(found) <= MOST


def test_the_run_stops_when_too_little_is_to_be_expected_and_a_checkpoint_changes_nothing() -> None:
    progress = Progress()
    for tokens in (1000, 1500, 1800, 2000):
        progress = Progress.of(json.loads(json.dumps(progress.as_dict(), allow_nan=False)))
        progress, said = progress.compared(losses_at(tokens), COUNTS, tokens, 3000, Stop(gain=0.05))
    gain, most = said["expected_gain"], said["most_gain"]
    assert 0 < gain < most
    assert not progress.verdict(Stop(gain=most))
    assert f"with a probability of 0.9 by less than {most:.4f}" in progress.verdict(Stop(gain=most * 1.001))
    assert not Progress(without_gain=99).verdict(Stop(gain=1.0))  # patience is another rule
    assert "3 evaluations" in Progress(without_gain=3).verdict(Stop(gain=1.0, patience=3))  # unless it is asked for, too
    assert not Progress(without_gain=2).verdict(Stop(gain=1.0, patience=3))


def test_the_chance_of_better_answers_is_that_of_a_fair_coin() -> None:
    before, now = np.zeros(12), np.array([1.0] * 7 + [-1.0] * 2 + [0.0, math.nan, 0.0])
    fair = [sum(throws) for throws in itertools.product((0, 1), repeat=9)]
    assert compared(now, before) == (7, 2, sum(heads >= 7 for heads in fair) / len(fair))
    assert compared(before, before) == (0, 0, 1.0)
    assert compared(np.ones(3000), np.zeros(3000)).chance == 0.0 == 2.0**-3000
    half = compared(np.repeat([1.0, -1.0], 5000), np.zeros(10000)).chance
    assert half == pytest.approx(0.5 + 0.5 * math.sqrt(2 / math.pi / 10000), rel=1e-4)


def scores(right: range, of: int = 200, key: str = "q") -> QuestionScores:
    return QuestionScores(key, np.array([0.1 + (i in right) for i in range(of)]))


def measured(*evaluations: QuestionScores) -> Progress:
    progress = Progress("exact_match")
    for step, one in enumerate(evaluations, start=1):
        progress = Progress.of(json.loads(json.dumps(progress.as_dict(), allow_nan=False)))
        progress = progress.after(float(one.scores_Q.mean()), step, Stop(patience=2), one)
    return progress


def test_answers_gain_where_the_paired_test_shows_it() -> None:
    first = scores(range(100))
    by_chance, shown = scores(range(103)), scores(range(104))  # one time in 8, and in 16
    assert measured(first, by_chance).without_gain == 1
    assert measured(first, by_chance).best_step == 2  # the best is the best all the same
    assert measured(first, by_chance, shown).without_gain == 0  # beside the first, not beside the second
    shifted = scores(range(50, 154))  # as many more, of which half others: one time in 3
    assert measured(first, shifted).without_gain == 1
    assert measured(first, first).without_gain == 1  # equal in float32, in which they are kept
    assert measured(first, scores(range(10), key="other")).without_gain == 0  # other questions cannot be compared
    verdict = measured(first, by_chance, by_chance).verdict(Stop(patience=2))
    assert "(or by chance, in a paired test of 200 questions at a confidence of 0.9) in 2 evaluations in a row" in verdict
    few = [scores(range(100), of=199)] * 3
    assert not measured(*few).verdict(Stop(patience=2))  # too few questions to stop a run


@table(
    ("best", "samples", "told"),
    [("exact_match", 150, "set eval.samples: 200"), ("exact_match", 200, ""), ("loss", 150, ""), ("exact_match", 999, "")],
)
def test_too_few_questions_to_stop_a_run_are_told(best: str, samples: int, told: str) -> None:
    evaluated = {"best": best, "samples": samples, "metrics": ["exact_match"], "stop": {}}
    recipe = Recipe.model_validate({"model": "m", "data": {"train": "a.jsonl", "eval": 0.1}, "eval": evaluated})
    for rows, fix in ((300, told), (100, "hold out more rows" if best != "loss" else "")):
        source: Any = SimpleNamespace(total=20, held_out=SimpleNamespace(starts=range(rows + 1)), evaluates=False)
        found = too_few_questions(recipe, source)
        assert (fix in found[0]) if fix else not found


@table(("every", "times"), [(0.05, None), (4, 3), (1, None), (9, 1)])
def test_a_rule_without_a_trend_is_told(every: float, times: int | None) -> None:
    """Of 20 steps the first warms up, and the last four decay: those from 1 to 15 count."""
    recipe = Recipe.model_validate(
        {
            "model": "m",
            "data": {"train": "a.jsonl", "eval": 0.1},
            "train": {"schedule": "wsd"},
            "eval": {"every": every, "stop": {"gain": 0.01}},
        }
    )
    source: Any = SimpleNamespace(total=20, held_out=[1])
    told = too_few_to_predict(recipe, source)
    assert told == ([] if times is None else [f"{NEEDS}, and the run has {times}; set eval.every: 0.05"])


@table(("share", "told"), [(0.2, ""), (18, ""), (19, "step 2 of 20"), (500, "step 1 of 20")])
def test_a_mean_that_begins_in_the_warm_up_is_told(share: float, told: str) -> None:
    train = {"schedule": "constant", "warmup": 2, "average": share}
    recipe = Recipe.model_validate({"model": "m", "data": {"train": "a.jsonl", "eval": 0.1}, "train": train})
    found = average_of_the_warm_up(recipe, SimpleNamespace(total=20))  # type: ignore[arg-type]
    assert (told in found[0]) if told else not found


@table(("decay", "told"), [(0.2, ""), (18, ""), (19, "1 are warm-up and 19 decay"), (100_000, "1 are warm-up and 19 decay")])
def test_a_schedule_without_a_constant_phase_is_told(decay: float, told: str) -> None:
    data = {"train": "a.jsonl"}
    recipe = Recipe.model_validate({"model": "m", "data": data, "train": {"schedule": "wsd", "decay": decay}})
    source: Any = SimpleNamespace(total=20, held_out=None)
    found = no_constant_phase(recipe, source)
    assert (told in found[0]) if told else not found
