"""Values on one line of YAML read back as themselves."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML

from pronghorn.convert.values import written
from tables import table


@table(
    "value",
    [
        None,
        True,
        False,
        0,
        -3,
        0.05,
        1e-5,
        1e9,
        2.5e-7,
        10**15,
        "",
        "a",
        "no",
        "null",
        "1e-4",
        "12",
        "-",
        "a: b",
        "#x",
        "a #b",
        "[x]",
        "{x}",
        "x, y",
        "<|im_end|>",
        "~/x",
        "a b",
        " a",
        "a ",
        "'",
        '"',
        "ä水",
        "train[:1%]",
        "*a",
        "&a",
        "!a",
        "%a",
        "@a",
        "`a`",
        "|",
        ">",
        "? x",
        "2020-01-01",
        "0x10",
        ".5",
        "=",
        "<<",
        [],
        {},
        ["a, b", 1],
        {"role": "from"},
        {"a b": [1, {"c": None}]},
    ],
)
def test_a_value_reads_back_as_itself(value: Any) -> None:
    line = written(value)
    assert "\n" not in line
    assert YAML(typ="safe", pure=True).load(f"key: {line}") == {"key": value}
    assert YAML(typ="safe", pure=True).load(f"key: [{line}]") == {"key": [value]}


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert written("a\x1b[31m\n") == '"a\\\\x1b[31m\\n"'
    assert written("\ud800").isascii()
