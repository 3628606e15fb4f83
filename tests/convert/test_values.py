"""Values on one line of YAML read back as themselves."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML

from pronghorn.convert.values import written
from tables import table

NUMBERS = [0, -3, 0.05, 1e-5, 1e9, 2.5e-7, 10**15]
WORDS = ["a", "no", "null", "1e-4", "12", "<|im_end|>", "~/x", "ä水", "train[:1%]", "2020-01-01", "0x10", ".5"]
SIGNS = ["-", "#x", "[x]", "{x}", "'", '"', "*a", "&a", "!a", "%a", "@a", "`a`", "|", ">", "=", "<<"]
TEXTS = ["", "a: b", "a #b", "x, y", "a b", " a", "a ", "? x"]
NESTED: list[Any] = [[], {}, ["a, b", 1], {"role": "from"}, {"a b": [1, {"c": None}]}]


@table("value", [None, True, False, *NUMBERS, *WORDS, *SIGNS, *TEXTS, *NESTED])
def test_a_value_reads_back_as_itself(value: Any) -> None:
    line = written(value)
    assert "\n" not in line
    assert YAML(typ="safe", pure=True).load(f"key: {line}") == {"key": value}
    assert YAML(typ="safe", pure=True).load(f"key: [{line}]") == {"key": [value]}


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert written("a\x1b[31m\n") == '"a\\\\x1b[31m\\n"'
    assert written("\ud800").isascii()
