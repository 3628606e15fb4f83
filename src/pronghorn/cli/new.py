"""`pronghorn new`: the commented example, or a recipe out of another tool's config, with a list of what became of its keys."""

from __future__ import annotations

import argparse
from pathlib import Path

from pronghorn.cli.output import say
from pronghorn.errors import CommandError, EnvironmentFault, PronghornError
from pronghorn.program import command, runnable

FEW = 1_000_000  # tokens
BYTES_PER_TOKEN = 4  # as in memory/forecast.py, which takes seconds to import


def new_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("file", nargs="?", help="file to write, or - for standard output")
    one.add_argument("--model", help="Hub name or local folder, written into the recipe")
    one.add_argument("--data", action="append", default=[], metavar="FILE", help="training data; can be repeated")
    one.add_argument("--method", choices=("lora", "qlora", "fp8", "full"), help="training method (default: lora)")
    one.add_argument("--objective", metavar="NAME", help="supervised (default), dpo, kto, reward, grpo, ...: with its keys")
    one.add_argument("-o", "--output", metavar="FILE", help="same as FILE")
    one.add_argument(
        "--from",
        dest="config",
        metavar="CONFIG",
        help="Axolotl or LLaMA-Factory config to convert; keys without an equivalent are listed",
    )
    one.add_argument("--format", choices=("axolotl", "llamafactory"), help="format of the config (default: detected)")
    one.add_argument(
        "--dataset-info",
        metavar="FILE",
        help="LLaMA-Factory's dataset_info.json (default: searched next to the config and in its dataset_dir)",
    )


def new(arguments: argparse.Namespace) -> None:
    target = _target(arguments)
    if arguments.config is not None:
        _convert(arguments, target or "-")
        return
    if target is None:
        raise CommandError(what="no output file given", fix="name one: pronghorn new my.yaml, or - for standard output")
    from pronghorn.recipe_file import example
    from pronghorn.recipe_keys import value_like
    from pronghorn.recipe_objective import NAMES

    objective, sizes = arguments.objective, _sizes(arguments.data)
    if objective is not None and objective not in NAMES:
        meant = value_like("objective.name", objective, NAMES)
        fix = (f"did you mean `{meant}`? " if meant else "") + f"use one of: {', '.join(NAMES)}"
        raise CommandError(what=f"--objective {objective}: there is no such objective", fix=fix)
    given = {"model": arguments.model, "data": arguments.data, "method": arguments.method, "objective": objective}
    text = example(**given, output=_output_of(target), sizes=sizes)
    if target == "-":
        print(text, end="")
        return
    _write(target, text)
    files = [name for name in arguments.data or () if Path(name).suffix and not Path(name).expanduser().exists()]
    missing = f"{files[0]} does not exist here; " if files else ""
    say(arguments, {"written": target}, f"wrote {target}; {missing}next: {command('check', target)}")


def _output_of(target: str) -> str | None:
    """`my.yaml` trains into runs/my: two recipes would share the default, and each refuse the other's checkpoints."""
    return None if target == "-" else f"runs/{Path(target).stem}"


def _sizes(data: list[str]) -> dict[str, tuple[str, str]]:
    """Values that fit the data, where its files tell how much there is: the beginning of a line -> value and comment."""
    if not data or not all(Path(name).expanduser().exists() for name in data):
        return {}
    from pronghorn.data.read.reading import parts_of, text_bytes
    from pronghorn.recipe_parts import Data

    try:
        amount = text_bytes(parts_of(data, Data(train=tuple(data))))
    except (PronghornError, OSError):
        return {}  # `check` tells what is wrong with it
    if not amount or amount / BYTES_PER_TOKEN >= FEW:
        return {}
    return {"  eval: ": ("0.05", "a file, or the fraction of train to hold out; of little data more than of much")}


def _target(arguments: argparse.Namespace) -> str | None:
    given = [name for name in (arguments.file, arguments.output) if name is not None]
    if len(given) == 2:
        raise CommandError(what="two output files given", why=" and ".join(given), fix="keep one of them")
    strange = [name for name in ("format", "dataset_info") if getattr(arguments, name) is not None]
    if strange and arguments.config is None:
        raise CommandError(what=f"--{strange[0].replace('_', '-')} needs --from", fix="name the config: --from CONFIG")
    filled = [name for name in ("model", "data", "method", "objective") if getattr(arguments, name)]
    if filled and arguments.config is not None:
        raise CommandError(
            what=f"--{filled[0]} cannot be used with --from",
            why="the value comes from the config",
            fix=f"remove --{filled[0]} and edit the recipe afterwards",
        )
    return given[0] if given else None


def _convert(arguments: argparse.Namespace, target: str) -> None:
    from pronghorn.convert.converting import convert_file
    from pronghorn.convert.writing import list_text
    from pronghorn.recipe_file import scalar

    info = Path(arguments.dataset_info) if arguments.dataset_info else None
    found = convert_file(Path(arguments.config), arguments.format, info)
    keys = [{"line": fate.line, "key": fate.key, "fate": fate.kind, "text": fate.text} for fate in found.fates]
    if target == "-":
        if arguments.json:
            say(arguments, {"tool": found.tool, "recipe": found.recipe, "keys": keys}, "")
        else:
            print(found.recipe, end="")
        return
    recipe = found.recipe
    if "\noutput: " not in recipe:  # the config names none
        recipe = recipe.replace("\n\n", f"\noutput: {scalar(_output_of(target) or '')}\n\n", 1)
    _write(target, recipe)
    say(
        arguments,
        {"written": target, "tool": found.tool, "keys": keys},
        f"{runnable(list_text(found.fates))}\nwrote {target} (includes this list); next: {command('check', target)}",
    )


def _write(target: str, text: str) -> None:
    path = Path(target)
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise CommandError(what="file already exists", where=target, fix="choose another name") from error
    except OSError as error:
        raise CommandError(what=f"cannot write: {error.strerror}", where=target, fix="choose another name") from error
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        path.unlink()  # half a recipe would stand in the way of the next try
        raise EnvironmentFault(
            what=f"cannot write: {error.strerror}", where=target, fix="free some disk space, or choose another place"
        ) from error
