"""The order of tests in several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def long_first(items: list[T], is_long: Callable[[T], bool], parts: int) -> list[T]:
    """In an order of which each part (as pytest-xdist cuts it for its processes) begins with its share of the long ones."""
    long, rest, ordered = [item for item in items if is_long(item)], [item for item in items if not is_long(item)], list[T]()
    for part in range(parts):
        mine = long[part::parts]
        size = (len(items) - len(ordered)) // (parts - part)
        others = max(0, size - len(mine))
        ordered += mine + rest[:others]
        rest = rest[others:]
    return ordered + rest
