"""JSON as a judge reads it."""

from __future__ import annotations

from pronghorn.evaluation.strict_json import fields, is_json, parse, same
from tables import table


@table("text", ['{"a": 1}', " [1, 2]\n", "null", '"x"', "0"])
def test_json_is_json(text: str) -> None:
    assert is_json(text)


@table(
    "text",
    [
        "",
        "{'a': 1}",
        '{"a": 1}.',
        'Sure: {"a": 1}',
        '```json\n{"a": 1}\n```',
        '{"a": 1, "a": 1}',
        "NaN",
        "[Infinity]",
        "[" * 100_000,
    ],
)
def test_what_is_not_quite_json_is_none(text: str) -> None:
    assert not is_json(text)


@table(
    ("one", "other", "equal"),
    [
        ('{"a": 1, "b": [2]}', '{"b": [2], "a": 1}', True),
        ('{"a": 1}', '{"a": true}', False),
        ('{"a": 412}', '{"a": 412.0}', False),
        ('{"a": 412}', '{"a": "412"}', False),
        ("[1, 2]", "[2, 1]", False),
        ("[1]", "[1, 1]", False),
        ('{"a": null}', "{}", False),
        ("[[]]", "[{}]", False),
    ],
)
def test_equal_is_equal_in_value_and_type(one: str, other: str, equal: bool) -> None:
    assert same(parse(one), parse(other)) is equal


def test_fields_are_the_values_that_hold_no_other() -> None:
    assert fields(parse('{"a": [1, {"b": 2}], "c": {}, "d": null}')) == {
        ("a", 0): 1,
        ("a", 1, "b"): 2,
        ("c",): {},
        ("d",): None,
    }
    assert fields(3) == {(): 3}
