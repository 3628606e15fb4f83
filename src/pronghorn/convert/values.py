"""Values of another tool's config as a recipe wants them: numbers that YAML 1.1 takes for text, yes and no, lists of names."""

from __future__ import annotations

import math
from typing import Any

from pronghorn.convert.one_line import one_line

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None, "": None}


class UnfitError(Exception):
    """Why a value cannot be used; becomes a key that is not honoured."""


def plain(value: Any) -> Any:
    return WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def is_on(value: Any) -> bool:
    value = plain(value)
    return bool(value)


def number(value: Any) -> float:
    """A number, also where YAML 1.1 takes it for a text (1e-4)."""
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        found = float(value)
    except (ValueError, OverflowError):
        raise UnfitError(f"{printed(value)} is not a number; the recipe's default is used") from None
    if not math.isfinite(found):
        raise UnfitError(f"{printed(value)} is not a finite number; the recipe's default is used")
    return int(found) if found == int(found) and abs(found) < 2**53 else found


def decimal(value: Any) -> float:
    return float(number(value))


def whole(value: Any) -> int:
    found = number(value)
    if found != int(found):
        raise UnfitError(f"{printed(value)} is not a whole number; the recipe's default is used")
    return int(found)


def text(value: Any) -> str:
    if isinstance(value, (dict, list)) or value is None:
        raise UnfitError(f"{printed(value)} is not a name")
    return str(value)


def words(value: Any) -> list[str]:
    """A list of names; one name, or several with commas between them, are a list as well."""
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise UnfitError(f"{printed(value)} is not a list of names")
    return [text(item) for item in items if item not in (None, "")]


def printed(value: Any) -> str:
    """For a sentence: short, on one line."""
    found = written(value)
    return found if len(found) <= 60 else f"{found[:57]}..."


def written(value: Any) -> str:
    """As one line of YAML."""
    return one_line(value)


def value_at(values: Any, key: str) -> Any:
    found = values
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found.get(part)
        else:
            return None
    return found
