"""A config of Axolotl's or LLaMA-Factory's: read, told apart, converted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from pronghorn.convert import axolotl, llamafactory
from pronghorn.convert.draft import Draft, Fate, apply, finish
from pronghorn.convert.writing import recipe_text
from pronghorn.errors import CommandError, PronghornError, RecipeError, raise_all
from pronghorn.recipe_file import parse_recipe
from pronghorn.small_files import read_small_text
from pronghorn.yaml_file import LARGEST, KeyPath, read_yaml

Format = Literal["axolotl", "llamafactory"]
TOOLS = {"axolotl": axolotl, "llamafactory": llamafactory}
START = "pass an Axolotl or LLaMA-Factory training config"


class Conversion(NamedTuple):
    tool: str
    recipe: str  # as YAML
    fates: list[Fate]


def convert_file(path: Path, asked: Format | None = None, dataset_info: Path | None = None) -> Conversion:
    """`asked`: whose config it is, if that cannot be told; `dataset_info`: LLaMA-Factory's list of data sets."""
    try:
        text = read_small_text(path, LARGEST)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(what=f"cannot read the config: {reason}", where=str(path), fix=START) from error
    return convert_text(text, str(path), asked, dataset_info)


def convert_text(text: str, name: str, asked: Format | None = None, dataset_info: Path | None = None) -> Conversion:
    problems: list[PronghornError] = []
    values, places = read_yaml(text, name, problems, kind="config", start=START)
    raise_all(problems)
    lines = {dotted(path): int(place.rsplit(":", 1)[1]) for path, place in places.items()}
    tool = TOOLS[asked or whose(values, name)]
    draft = Draft(values, lines, tool.NAME, Path(name).name)
    if tool is llamafactory:
        llamafactory.convert(draft, Path(name).parent, dataset_info)
    else:
        axolotl.convert(draft)
    apply(draft, tool.ROWS, tool.PREFIXES)
    finish(draft)
    for key in list(draft.unclaimed()):
        draft.not_honoured(key, "Pronghorn does not read this key")
    recipe = recipe_text(draft)
    try:
        parse_recipe(recipe, name="the recipe")
    except RecipeError as error:  # a bug of ours, but better told than written
        raise CommandError(what=f"cannot convert this config: {error.what}", where=name, fix=error.fix) from error
    return Conversion(tool.NAME, recipe, draft.all_fates())


def dotted(path: KeyPath) -> str:
    found = ""
    for part in path:
        found += f"[{part}]" if isinstance(part, int) else f".{part}" if found else part
    return found


def whose(values: dict[str, object], name: str) -> str:
    """By the keys that only one of them has."""
    votes = {tool: sum(key in values for key in module.MARKS) for tool, module in TOOLS.items()}
    best = max(votes, key=lambda tool: votes[tool])
    if votes[best] < 2 or len(set(votes.values())) == 1:
        keys = ", ".join(list(values)[:4])
        raise CommandError(
            what="neither an Axolotl nor a LLaMA-Factory config",
            where=name,
            why="Axolotl configs have base_model and datasets, LLaMA-Factory configs model_name_or_path and "
            f"stage; this one starts with {keys}",
            fix=f"{START}, or name its format: --format axolotl or --format llamafactory",
        )
    return best
