"""Limits of YAML, found before or while it is read: within a second, whatever the text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pronghorn.convert.converting import convert_file
from pronghorn.errors import CommandError, RecipeError
from pronghorn.recipe_file import EXAMPLE, load_recipe, parse_recipe
from pronghorn.yaml_file import DEEPEST, LARGEST, MOST_VALUES, read_value, read_yaml
from tables import table

DEEP, MANY, LONG = "nested too deeply", f"over {MOST_VALUES:,} values", "letters"
SECONDS = 10.0  # half a second on an idle core; without limits each takes longer than this, or has no end


@table(("text", "word"), [
    ("a: " + "[" * 5000, DEEP), ("a: " + "[" * 5000 + "]" * 5000, DEEP), ("a: " + "{a: " * 5000, DEEP),
    ("a: " + "[{a: " * 2000, DEEP), ("a: " + "[\n" * 5000, DEEP), ("- " * 5000 + "a", DEEP), ("? " * 5000 + "a", DEEP),
    ("".join(" " * n + "a:\n" for n in range(200)), DEEP), ("a: &a " + "[" * (DEEPEST + 1), DEEP),
    ("a: " + "x" * 5_000_000, LONG), ("# " + "x" * 5_000_000, LONG), ("\n" * 5_000_000 + "a: 1", LONG),
    ("a: [" + "1," * 40_000 + "]", MANY), ("".join(f"a{n}: 1\n" for n in range(8000)), MANY), ("-\n" * 40_000, MANY),
    ("a: &a [" + "1," * 99 + "1]\nb: [" + "*a," * 99 + "*a]\n", MANY),
])  # fmt: skip
def test_too_much_is_refused_at_once(text: str, word: str) -> None:
    began = time.process_time()
    with pytest.raises(RecipeError, match=word) as error:
        read_yaml(text, "r.yaml", [])
    assert error.value.fix
    with pytest.raises(RecipeError, match=word):
        read_value(text, "command line")
    assert time.process_time() - began < SECONDS


def test_what_recipes_have_is_far_below_the_limits() -> None:
    assert len(EXAMPLE) < LARGEST / 10
    values, places = read_yaml(EXAMPLE, "r.yaml", [])
    assert len(places) < MOST_VALUES / 10
    assert values["train"]["lr"] == 2e-4
    deep = "".join("  " * n + f"a{n}:\n" for n in range(DEEPEST - 2)) + "  " * DEEPEST + "b: 1\n"
    assert read_yaml(deep, "r.yaml", [])[0]["a0"]
    text = "[" * 300  # in quotes, they are letters
    assert read_yaml(f'a: "{text}"', "r.yaml", [])[0] == {"a": text}
    assert [read_value(text, "") for text in ("1e-4", "[1, x]", "[", "2030-02-30", "a: b: c")] == [
        1e-4, [1, "x"], "[", "2030-02-30", "a: b: c"]  # fmt: skip


def test_an_override_that_is_too_deep_is_told_with_its_key() -> None:
    with pytest.raises(RecipeError, match=r"data.train: the value is nested too deeply"):
        parse_recipe("model: m\ndata: {train: a.jsonl}\n", ["data.train=" + "[" * 5000])


@table("kind", ["zero", "pipe", "large"])
def test_files_that_are_no_recipe(tmp_path: Path, kind: str) -> None:
    import os

    file = tmp_path / "my.yaml"
    if kind == "zero":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    with pytest.raises(RecipeError, match="limit is" if kind == "large" else "not a regular file") as error:
        load_recipe(file)
    assert ("shorten" in error.value.fix) == (kind == "large")
    with pytest.raises(CommandError, match="cannot read the config"):
        convert_file(file)
