"""JSON as a judge reads it: all of the text or nothing, and equal only in value and in type."""

from __future__ import annotations

import json
from typing import Any


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


def parse(text: str) -> Any:
    """The value of a text that is JSON and nothing else, white space around it apart. ValueError for anything more, less or
    ambiguous, and for what is nested too deep."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_json(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


def same(one: object, other: object) -> bool:
    """Equal in value and in type: Python's own `==` would take 1 for true and 412.0 for 412. The order of keys is free."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def fields(value: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    """Every value that holds no other, by its path: {"a": [1, {"b": 2}]} has ("a", 0) and ("a", 1, "b"). An empty object or
    list counts as a value."""
    inside: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list):
        inside = list(enumerate(value))
    if not inside:
        return {path: value}
    return {place: leaf for key, item in inside for place, leaf in fields(item, (*path, key)).items()}
