"""Recipes with one thing wrong in bytes, structure or override: refused with a sentence, or taken, and nothing ignored. Also
deep and long ones, and files that are none; none may take long."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from fuzz.outcomes import Tally, mutated_bytes, mutated_value
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import EXAMPLE, load_recipe

WORDS = (
    "train.lr=1e-4", "train.lr=", "=", "train=3", "train.lr.x=1", "data.train=[a, b]", "data.train=[", "output=\x1b[31m",
    "model=!!python/name:os.system", "train.seed=0x10", "eval.stop={patience: 2}", "data.eval=0.5", "train.betas=[1, 2, 3]",
    "precision=&a [*a]", "lora.targets=all-linear", "train.lr=1e999", "x" * 5000 + "=1", "train.steps=9" + "9" * 5000,
    "a.b=1",
)  # fmt: skip
# In the place of a value: deeper, longer or more than any recipe.
HEAVY = (
    b"[" * 5000,
    b"{a: " * 5000,
    b"\n" + b"- " * 5000,
    b"\n" + b"".join(b" " * n + b"a:\n" for n in range(1, 400)),
    b"[" + b"1," * 100_000 + b"]",
    b"x" * 5_000_000,
    b"x " * 2_000_000,
    b'"' + b"\\n" * 2_000_000 + b'"',
    b"|\n" + b"  x\n" * 500_000,
    b"1\n" + b"#\n" * 1_000_000,
)
SECONDS = 15.0  # half of one on an idle core


def fuzz(count: int, seed: int, folder: Path) -> Counter[str]:
    tally = Tally("recipe_files", count, seed)
    yaml = YAML(typ="safe", pure=True)
    plain = yaml.load(EXAMPLE)
    file = folder / "recipe.yaml"
    for number in range(count):
        chance = tally.random(number)
        words = tuple(chance.choice(WORDS) for _ in range(chance.choice((0, 0, 0, 1, 2))))
        odd = chance.choice(("/dev/zero", "/dev/urandom", "pipe")) if chance.random() < 0.02 else ""
        if chance.random() < 0.1:
            content, heavy = EXAMPLE.encode(), chance.choice(HEAVY)
            at = chance.choice([at for at in range(len(content)) if content[at : at + 2] == b": "]) + 2
            content, what = content[:at] + heavy + b"\n" + content[at:], f"{heavy[:20]!r}... inserted at {at}"
        elif chance.random() < 0.5:
            content, what = EXAMPLE.encode(), ""
            for _ in range(chance.choice((1, 1, 2, 4))):
                content, one = mutated_bytes(content, chance)
                what += one + "; "
        else:
            changed, what = mutated_value(plain, chance)
            text = io.StringIO()
            yaml.dump(changed, text)
            content = text.getvalue().encode("utf-8", "surrogatepass")

        def work(content: bytes = content, words: tuple[str, ...] = words, odd: str = odd) -> str:
            file.unlink(missing_ok=True)
            if odd:
                os.mkfifo(file) if odd == "pipe" else file.symlink_to(odd)
            else:
                file.write_bytes(content)
            recipe = load_recipe(file, words)
            wrong = _ignored(recipe, content) if not words else ""
            again = Recipe.model_validate(recipe.model_dump())
            if again != recipe:
                wrong = "it is another one when written and read again"
            return f"silent\n{wrong}" if wrong else "same"

        tally.add(number, f"{words}: {odd or what}", work, SECONDS)
    return tally.outcomes


def _ignored(recipe: Recipe, content: bytes) -> str:
    """The first thing the file says and the recipe does not."""
    return _missing(YAML(typ="safe", pure=True).load(content.decode()), recipe.model_dump(), "")


def _missing(said: Any, taken: Any, path: str) -> str:
    if isinstance(said, dict):
        if not isinstance(taken, dict):
            return f"{path} is a section in the file only"
        inside = (_missing(value, taken.get(str(key), "(gone)"), f"{path}.{key}") for key, value in said.items())
        return next((wrong for wrong in inside if wrong), "")
    if isinstance(taken, float) and not math.isfinite(taken):
        return f"{path} is {taken}"
    if said is None or (isinstance(taken, dict) and not said) or taken in (said, [said]):
        return ""
    if isinstance(taken, tuple):
        return "" if list(taken) == (said if isinstance(said, list) else [said]) else f"{path}: {said!r} became {taken!r}"
    return "" if str(said) == str(taken) or _same_number(said, taken) else f"{path}: {said!r} became {taken!r}"


def _same_number(said: Any, taken: Any) -> bool:
    try:
        return float(said) == float(taken)  # a number in quotes is one, too
    except (TypeError, ValueError, OverflowError):
        return False
