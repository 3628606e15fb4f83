"""Values of another tool's config as a recipe wants them: numbers that YAML 1.1 takes for text, yes and no, lists of names."""

from __future__ import annotations

import json
import math
from typing import Any

from pronghorn.errors import printable
from pronghorn.recipe_file import scalar

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False, "none": None, "null": None, "": None}


class UnfitError(Exception):
    """Why a value cannot be used; becomes a key that is not honoured."""


def plain(value: object) -> Any:
    return WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value


def is_on(value: object) -> bool:
    value = plain(value)
    return bool(value)


def number(value: object) -> float:
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


def decimal(value: object) -> float:
    return float(number(value))


def whole(value: object) -> int:
    found = number(value)
    if found != int(found):
        raise UnfitError(f"{printed(value)} is not a whole number; the recipe's default is used")
    return int(found)


def text(value: object) -> str:
    if isinstance(value, (dict, list)) or value is None:
        raise UnfitError(f"{printed(value)} is not a name")
    return str(value)


def words(value: object) -> list[str]:
    """A list of names; one name, or several with commas between them, are a list as well."""
    items = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(items, list):
        raise UnfitError(f"{printed(value)} is not a list of names")
    return [text(item) for item in items if item not in (None, "")]


def printed(value: object) -> str:
    """For a sentence: short, on one line."""
    found = written(value)
    return found if len(found) <= 60 else f"{found[:57]}..."


def written(value: object) -> str:
    """As YAML on one line, which reads back as itself."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(written(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(str(key))}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and "e" in repr(value):
        return f"{value:.12g}"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    text = printable(str(value).encode("utf-8", "backslashreplace").decode())
    return json.dumps(text, ensure_ascii=False) if text.startswith("@") else scalar(text)


def value_at(values: object, key: str) -> Any:
    found = values
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found.get(part)
        else:
            return None
    return found
