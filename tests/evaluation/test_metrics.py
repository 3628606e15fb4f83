"""What answers score: by hand."""

from __future__ import annotations

import pytest

from pronghorn.evaluation.metrics import judge_of
from tables import table


@table(
    ("metric", "expected", "answer", "score"),
    [
        ("exact_match", "Yes, sir.", " Yes,\n  sir. ", 1.0),
        ("exact_match", "caf\u00e9", "cafe\u0301", 1.0),
        ("exact_match", "Yes", "yes", 0.0),
        ("exact_match", "Yes", "Yes.", 0.0),
        ("json_valid", "whatever", '{"a": 1}', 1.0),
        ("json_valid", '{"a": 1}', 'Here: {"a": 1}', 0.0),
        ("json_match", '{"a": 1, "b": 2}', '{"b": 2, "a": 1}', 1.0),
        ("json_match", '{"a": 1}', '{"a": 1, "b": 2}', 0.0),
        ("json_match", '{"a": 1}', "{'a': 1}", 0.0),
        ("json_match", '{"a": 1}', '{"a": true}', 0.0),
        ("json_match", "[1, 2]", "[2, 1]", 0.0),
        ("json_match", '{"a": null}', "{}", 0.0),
        ("json_match", "[[]]", "[{}]", 0.0),
        ("json_fields", '{"a": 1, "b": {"c": [1, 2]}}', '{"a": 1, "b": {"c": [1, 3]}}', 2 / 3),
        ("json_fields", '{"a": 1}', '{"a": 1, "b": 2}', 1 / 2),  # invented fields count
        ("json_fields", '{"a": 1, "b": 2}', '{"a": 1}', 1 / 2),
        ("json_fields", '{"a": 1}', '{"a": "1"}', 0.0),
        ("json_fields", '{"a": 1}', "no", 0.0),
        ("rouge_l", "one two three", "one three", 0.8),
        ("exact_match", "42", "<think>is it 41? no</think>\n\n42", 1.0),
        ("exact_match", "<think>a</think>42", "<think>b</think>42", 1.0),
    ],
)
def test_scores(metric: str, expected: str, answer: str, score: float) -> None:
    assert judge_of([metric])("asked", expected, answer) == {metric: pytest.approx(score)}


@table(
    ("pattern", "expected", "answer", "score"),
    [
        (r"#### (-?\d+)", "so\n#### 12", "first #### 3, then #### 12", 1.0),  # the last one counts
        (r"#### (-?\d+)", "so\n#### 12", "#### 12, no: #### 13", 0.0),
        (r"#### (-?\d+)", "so\n#### 12", "12", 0.0),
        (r"A: (\w)|B: (\w)", "A: x", "B: x", 1.0),  # of the group that took part
        (r"(?i)sorry", "anything", "I am Sorry", 1.0),
        (r"^\d+$", "anything", "12 apples", 0.0),
    ],
)
def test_a_pattern_compares_what_its_group_finds_or_asks_to_be_found(
    pattern: str, expected: str, answer: str, score: float
) -> None:
    assert judge_of(["regex"], pattern)("asked", expected, answer) == {"regex": score}


EXPECTED = '{"command":"room_service","room":412,"items":["green tea","apple pie"]}'


@table(
    ("given", "right"),
    [
        (EXPECTED, True),
        (f"  {EXPECTED}\n", True),
        ('{ "room": 412, "command": "room_service", "items": ["green tea", "apple pie"] }', True),
        (f"Sure! {EXPECTED}", False),
        (f"{EXPECTED} Enjoy!", False),
        (f"```json\n{EXPECTED}\n```", False),
        (EXPECTED + EXPECTED, False),
        (EXPECTED.replace("412", '"412"'), False),
        (EXPECTED.replace("412", "412.0"), False),
        (EXPECTED.replace("412", "413"), False),
        (EXPECTED.replace("412", "NaN"), False),
        (EXPECTED.replace('"room":412', '"room":413,"room":412'), False),
        (EXPECTED.replace("green tea", "Green tea"), False),
        (EXPECTED.replace('"green tea",', ""), False),
        (EXPECTED[:-1] + ',"note":"quick"}', False),
        (EXPECTED.replace('"', "'"), False),
        (EXPECTED[:-1], False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_only_the_json_and_nothing_else_counts(given: str, right: bool) -> None:
    assert judge_of(["json_match"])("tea", EXPECTED, given) == {"json_match": float(right)}
