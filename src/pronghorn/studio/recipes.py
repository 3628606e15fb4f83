"""A recipe as text and as a form. The text is the recipe; the form shows what stands in it, and changes single keys of it, so
that comments and order stay. Messages are those of `pronghorn check`."""

from __future__ import annotations

import functools
import hashlib
import io
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import YAMLError

from pronghorn.errors import Problems, PronghornError
from pronghorn.program import runnable
from pronghorn.recipe import Recipe, flat
from pronghorn.recipe_file import EXAMPLE, example, parse_recipe
from pronghorn.recipe_keys import all_keys, section_of
from pronghorn.recipe_objective import NAMES
from pronghorn.report.run_log import plain
from pronghorn.serve.asked import RequestError
from pronghorn.small_files import read_small_text
from pronghorn.studio.places import RECIPES, Places
from pronghorn.yaml_file import LARGEST, read_value, read_yaml

KEY = re.compile(r"[a-z_]+(\.[a-z_]+)*")
# What the form shows first; all other keys follow, section by section.
FIRST = (
    *("model", "method", "data.train", "data.eval", "data.max_length", "objective", "output"),
    *("train.epochs", "train.lr", "train.batch_tokens", "train.capacity", "train.schedule", "lora.r", "lora.alpha"),
    *("memory.budget", "eval.every", "checkpoint.every"),
)
LISTS = ("data.train.", "rewards.", "objective.")  # keys below these are written in the text


@functools.cache
def fields() -> list[dict[str, Any]]:
    """Each key with its choices, its default and what the example says about it."""
    helps = _helps()
    keys = [key for key in all_keys() if not key.startswith(LISTS)]
    found = []
    for key in dict.fromkeys((*FIRST, *keys)):
        choices, default = _about(key)
        if key == "objective":
            choices, default = list(NAMES), "supervised"
        found.append({"key": key, "choices": choices, "default": default, "help": helps.get(key, ""), "first": key in FIRST})
    return found


def _about(key: str) -> tuple[list[str], str]:
    model: Any = Recipe
    *above, last = key.split(".")
    for part in above:
        model = section_of(model.model_fields[part].annotation) if model and part in model.model_fields else None
    field = model.model_fields.get(last) if model else None
    if field is None:
        return [], ""
    options = [str(one) for one in get_args(field.annotation)] if get_origin(field.annotation) is Literal else []
    if field.annotation is bool:
        options = ["true", "false"]
    simple = isinstance(field.default, (bool, int, float, str))
    return options, plain_text(field.default) if simple else ""


def plain_text(value: object) -> str:
    """As a recipe has it, on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(plain_text(one) for one in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {plain_text(one)}" for name, one in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _helps() -> dict[str, str]:
    found, section = {}, ""
    for line in EXAMPLE.splitlines():
        if not (match := re.fullmatch(r"(\s*)(?:# )?([a-z_]+):(.*?)(?:\s#\s?(.*))?", line)):
            continue
        indent, name, value, comment = match.groups()
        if not indent:
            section = "" if value.strip() else f"{name}."
        elif not section:
            continue
        if comment:
            found[(section if indent else "") + name] = comment
    return found


def read(text: str, name: str = "recipe") -> dict[str, Any]:
    """What stands in it, key by key, and what is wrong with it."""
    found: dict[str, Any] = {"values": {}, "problems": [], "run": None}
    try:
        values, _ = read_yaml(text, name, [])
        shown = {key: one for key, one in flat(_without_empty(values)).items() if key != "objective.name"}
        objective = values.get("objective")
        shown |= {"objective": objective["name"]} if isinstance(objective, dict) and "name" in objective else {}
        found["values"] = {key: plain_text(one) for key, one in shown.items()}
        recipe = parse_recipe(text, name=name)
        found["run"] = plain({"output": recipe.output, "model": recipe.model, "objective": recipe.objective.name})
    except PronghornError as error:
        found["problems"] = problems(error)
    return found


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    return {str(key): _without_empty(one) if isinstance(one, dict) else one for key, one in values.items()}


def problems(error: PronghornError) -> list[dict[str, Any]]:
    """As `check` tells them, each with its line."""
    told = []
    for one in error.problems if isinstance(error, Problems) else [error]:
        line = re.search(r":(\d+)$", one.where)
        told.append(
            {
                "what": one.what,
                "where": one.where,
                "why": one.why,
                "fix": runnable(one.fix),
                "line": int(line[1]) if line else 0,
            }
        )
    return told


def edit(text: str, key: str, value: str) -> str:
    """The text with this key set to what was written; an empty value takes the key out, so that its default counts."""
    if not KEY.fullmatch(key) or len(text) > LARGEST or len(value) > LARGEST:
        raise RequestError("that is not a key of a recipe")
    read_yaml(text, "recipe", [])  # within limits, or it says what is wrong
    try:
        return _changed(text, key, value)
    except YAMLError as error:  # a key that is there twice, for example
        raise RequestError(f"{key}: cannot be written: {error}") from None


def _changed(text: str, key: str, value: str) -> str:
    yaml = YAML()
    yaml.preserve_quotes, yaml.width = True, 4096
    tree = yaml.load(text)
    *above, last = key.split(".")
    section = tree
    for part in above:
        below = section.get(part)
        if not isinstance(below, dict):
            if not value:
                return text
            section[part] = CommentedMap()
        section = section[part]
    if not value:
        section.pop(last, None)
    else:
        plain_value = read_value(value, key)
        section[last] = plain_value if isinstance(plain_value, str) else yaml.load(value)  # 1e-3 stays 1e-3
    written = io.StringIO()
    yaml.dump(tree, written)
    return written.getvalue()


def started(model: str, data: list[str], method: str | None, output: str) -> str:
    """What `pronghorn new` writes."""
    return example(model=model or None, data=data, method=method, output=output)


def load(places: Places, name: object) -> dict[str, Any]:
    path = _recipe_file(places, name)
    try:
        text = read_small_text(path, LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise RequestError(f"cannot read {places.name(path)}: {reason}", status=404) from None
    return {"file": places.name(path), "text": text, "version": version(text), **read(text, path.name)}


def save(places: Places, name: object, text: object, known: object) -> dict[str, Any]:
    """`known`: the version that was loaded, or nothing for a new file. A file that somebody else has changed stays as it is."""
    path = _recipe_file(places, name)
    if not isinstance(text, str) or len(text) > LARGEST:
        raise RequestError("that is no recipe")
    try:
        there = version(read_small_text(path, LARGEST)) if path.exists() else ""
        if there and there != known:
            raise RequestError(f"{places.name(path)} exists with another content; choose another name", status=409)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.tmp")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except (OSError, UnicodeError) as error:
        raise RequestError(f"cannot write {places.name(path)}: {error}", status=409) from None
    return {"file": places.name(path), "version": version(text), **read(text, path.name)}


def version(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def _recipe_file(places: Places, name: object) -> Path:
    path = places.inside(name)
    if path.suffix not in RECIPES:
        raise RequestError("a recipe's name ends with .yaml")
    return path
