"""ROUGE-L: values of the package rouge-score (0.1.2, without stemmer), and the subsequence against the plain table."""

from __future__ import annotations

import random

import pytest

from pronghorn.evaluation.rouge import common, rouge_l, words
from tables import table


@table(
    ("expected", "answer", "value"),
    [  # of rouge_scorer.RougeScorer(["rougeL"]).score(expected, answer)
        ("The quick brown fox jumps over the lazy dog", "The quick brown dog jumps on the log.", 0.5882352941176471),
        ("testing one two", "testing", 0.5),
        ("a_b c-d, e's", "A b c d e s", 1.0),
        ("", "x", 0.0),
        ("the cat", "", 0.0),
        ("one two", "two one", 0.5),
    ],
)
def test_values_of_rouge_score(expected: str, answer: str, value: float) -> None:
    assert rouge_l(expected, answer) == pytest.approx(value, abs=1e-12)


def table(one: list[str], other: list[str]) -> int:
    row = [0] * (len(one) + 1)
    for word in other:
        before = row
        row = [0]
        for i, mine in enumerate(one):
            row.append(before[i] + 1 if mine == word else max(before[i + 1], row[i]))
    return row[-1]


def test_the_subsequence_is_that_of_the_table() -> None:
    chance = random.Random(0)
    for _ in range(300):
        one, other = (chance.choices("abcde", k=chance.randint(0, 90)) for _ in range(2))  # beyond 64: more than a machine word
        assert common(one, other) == table(one, other)


def test_words_of_other_scripts_count() -> None:
    assert words("Größe, ÜBER_alles 2") == ["größe", "über", "alles", "2"]
    assert words("我爱北京 ok") == ["我", "爱", "北", "京", "ok"]
    assert rouge_l("我爱北京", "我爱上海") == 0.5
