"""The trials of a sweep: every combination of the values that keys are given on the command line, each an ordinary recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

from pronghorn.errors import CommandError, RecipeError
from pronghorn.recipe import Recipe

DEFAULT_KEY, FACTORS = "train.lr", (1 / 3, 1, 3, 10)  # what is tried where no key has several values, and this one none
ALLOWED = ("train.", "lora.", "method", "storage", "compute", "precision")
# What would make losses, or rungs, something else from trial to trial.
REFUSED = {
    "train.epochs": "trials are compared after equal tokens of equally long runs",
    "train.steps": "trials are compared after equal tokens of equally long runs",
    "train.graph": "it changes no number",
}


@dataclass(frozen=True)
class Trial:
    number: int  # from 1
    keys: dict[str, str]  # as they were given
    recipe: Recipe

    @property
    def folder(self) -> Path:
        return Path(self.recipe.output)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def told(self) -> str:
        return f"{self.name} ({' '.join(f'{key}={value}' for key, value in self.keys.items())})"


def trials_of(words: Sequence[str], load: Callable[[Sequence[str]], Recipe], folder: Path | None) -> tuple[Path, list[Trial]]:
    """`words`: key=value, some with several values. `load`: the recipe with such words. `folder`: of the sweep; None: beside
    the recipe's output."""
    fixed = [word for word in words if len(values_of(word)[1]) == 1]
    swept = {key: values for key, values in map(values_of, words) if len(values) > 1}
    base = load(fixed) if fixed or not swept else load([f"{key}={values[0]}" for key, values in swept.items()])
    if not swept:  # a rate that is given is the only one
        given = [values for key, values in map(values_of, words) if key == DEFAULT_KEY]
        swept = {DEFAULT_KEY: given[-1] if given else [f"{base.train.lr * factor:.3g}" for factor in FACTORS]}
    for key in swept:
        _require_comparable(key, base)
    _require_judged(base)
    if folder and any(values_of(word)[0] == "output" for word in words):
        raise CommandError(what=f"output= beside -o {folder} has no effect", fix="remove one of the two")
    folder = folder or Path(f"{base.output}-sweep")
    combined, trials = list(product(*swept.values())), []
    for number, values in enumerate(combined, start=1):
        keys = dict(zip(swept, values, strict=True))
        output = folder / f"trial-{number:0{max(2, len(str(len(combined))))}}"
        recipe = load([*fixed, *(f"{key}={value}" for key, value in keys.items())])
        trials.append(Trial(number, keys, recipe.model_copy(update={"output": str(output)})))
    for other, one in combinations(trials, 2):
        if not other.recipe.differences(one.recipe):
            raise CommandError(what=f"two trials are the same: {other.told} and {one.told}", fix="remove one of the two values")
    return folder, trials


def values_of(word: str) -> tuple[str, list[str]]:
    """`train.lr=1e-4,3e-4` -> the key and its values. Commas inside brackets or quotes belong to a value."""
    key, equals, text = word.partition("=")
    values, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            values.append("")
            continue
        values[-1] += letter
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
    if len(values) > 1 and not all(map(str.strip, values)):
        raise CommandError(what=f"`{word}`: a value between commas is missing", fix="write for example train.lr=1e-4,3e-4")
    return (key, [value.strip() for value in values]) if equals else (word, [""])


def _require_comparable(key: str, base: Recipe) -> None:
    why = REFUSED.get(key, "")
    if not key.startswith(ALLOWED):
        why = (
            "trials are compared by their loss on the same rows; only train, lora, method, storage, compute and precision vary"
        )
    elif key == "train.seed" and isinstance(base.data.eval, float):
        why = "with data.eval a fraction, another seed holds out other rows; name a file in data.eval"
    elif key in ("train.batch_tokens", "train.batch_rows") and base.train.steps:
        why = "train.steps is set, so larger steps would be more tokens; set train.epochs instead"
    if why:
        raise CommandError(what=f"{key} cannot be swept", why=why, fix="give it one value, or run `pronghorn train` for each")


def _require_judged(base: Recipe) -> None:
    """Without rows that are held out, or a loss of each of them, there is nothing to decide by."""
    if base.data.eval is None:
        raise RecipeError(
            what="a sweep compares losses on held-out rows, and data.eval is not set", fix="set data.eval: 0.1, or a file"
        )
    if base.objective.kind.reads != "documents":
        raise RecipeError(
            what=f"objective {base.objective} cannot be swept",
            why="trials are compared row by row, and this objective has no loss of each row",
            fix="run `pronghorn train` for each value, and compare them with `pronghorn runs`",
        )
