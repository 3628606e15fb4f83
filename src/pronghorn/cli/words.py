"""What people type instead: verbs and options of other tools, misspellings, and recipe keys written as options."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from pronghorn.errors import CommandError, RecipeError
from pronghorn.program import command

VERBS = {
    "finetune": "train", "fine-tune": "train", "fit": "train", "sft": "train", "resume": "train", "continue": "train",
    "lora": "train", "init": "new", "create": "new", "template": "new", "convert": "new --from CONFIG",
    "import": "new --from CONFIG", "validate": "check",
    "dry-run": "check", "dryrun": "check", "lint": "check", "doctor": "check", "estimate": "plan",
    "forecast": "plan", "memory": "plan", "cost": "plan", "evaluate": "eval", "test": "eval", "score": "eval",
    "generate": "chat", "infer": "chat", "inference": "chat", "predict": "chat", "ask": "chat", "talk": "chat",
    "server": "serve", "api": "serve", "ui": "studio", "gui": "studio", "web": "studio", "dashboard": "studio",
    "merge": "export --to merged", "save": "export", "list": "runs", "ls": "runs", "compare": "runs", "history": "runs",
    "stats": "data stats", "show": "data show", "inspect": "data show", "preview": "data show",
    "dataset": "data", "audit": "data audit", "dedup": "data audit", "decontaminate": "data audit",
    "branch": "fork", "clone": "fork", "enqueue": "queue add", "schedule": "queue add", "jobs": "queue list",
    "tune": "sweep", "search": "sweep", "optimize": "sweep", "hpo": "sweep", "grid": "sweep",
    "submit": "launch", "sbatch": "launch", "slurm": "launch --slurm", "kubernetes": "launch --kubernetes",
    "skypilot": "launch --skypilot",
}  # fmt: skip
# Options of other tools: what to do instead.
OPTIONS = {
    "dry_run": "`pronghorn check RECIPE` validates recipe, model and data without training",
    "resume": "remove it: the same command resumes from the last checkpoint; --fresh starts over",
    "resume_from_checkpoint": "remove it: the same command resumes from the last checkpoint; --fresh starts over",
    "config": "pass the recipe without an option: pronghorn train RECIPE",
    "recipe": "pass the recipe without an option: pronghorn train RECIPE",
    "force": "--fresh starts over and keeps the old folder",
    "overwrite": "--fresh starts over and keeps the old folder",
    "push_to_hub": "training uploads nothing; `pronghorn export RUN --to FORMAT --push-to-hub OWNER/NAME` uploads an export",
    "num_gpus": "`pronghorn train` uses all visible GPUs; --gpus 1 uses one",
    "gpus": "`pronghorn train` uses all visible GPUs; --gpus 1 uses one",
    "device": "the GPU is used if there is one; select it with CUDA_VISIBLE_DEVICES (empty: CPU)",
}


def require_verb(words: Sequence[str], verbs: Collection[str], groups: Mapping[str, Collection[str]]) -> None:
    """The first word, and after the name of a group the second, is a verb; or an error with the one that was meant."""
    named = [word for word in words if not word.startswith("-")]
    if named and named[0] not in verbs:
        raise _unknown(named[0], verbs, "", named[1:])
    if named[1:] and named[1] not in groups.get(named[0], named):
        raise _unknown(named[1], groups[named[0]], f"{named[0]} ", named[2:])


def _unknown(word: str, verbs: Collection[str], group: str, rest: Sequence[str]) -> CommandError:
    if word.endswith((".yaml", ".yml")) and (group or not rest):
        verb = {"data ": "data show", "queue ": "queue add train"}.get(group, "train")
        return CommandError(f"{word} is a file, not a command", fix=f"did you mean `pronghorn {verb} {word}`?")
    meant = "" if group else VERBS.get(word.lower(), "")
    close = difflib.get_close_matches(word.lower(), verbs, n=1, cutoff=0.6)
    if not meant and close:
        meant = group + close[0]
    names = ", ".join(group + verb for verb in verbs)
    fix = f"did you mean `pronghorn {meant}`?" if meant else f"use one of: {names}"
    return CommandError(f"unknown command `{group}{word}`", fix=fix)


def unknown_words(left: Sequence[str], parser: argparse.ArgumentParser, takes_keys: bool) -> CommandError:
    """What became of words that the verb does not take; the first one is explained."""
    verb = parser.prog.removeprefix("pronghorn ")
    option = next((word for word in left if word.startswith("-")), None)
    if option is None:
        return CommandError(f"{verb} does not accept `{' '.join(left)}`", fix=f"see `{parser.prog} --help`")
    name, _, value = option.lstrip("-").partition("=")
    what = f"{verb} has no option {option.partition('=')[0]}"
    plain = name.lower().replace("-", "_")
    known = [text for text in parser._option_string_actions if text.startswith("--")]
    close = difflib.get_close_matches(f"--{name.lower()}", known, n=1, cutoff=0.7)
    if plain in OPTIONS:
        return CommandError(what, fix=OPTIONS[plain])
    if close:
        return CommandError(what, fix=f"did you mean `{close[0]}`?")
    if takes_keys:
        from pronghorn.recipe_keys import key_like

        if key := key_like((plain,)):
            after = left[left.index(option) + 1 :][:1]
            shown = value or (after[0] if after and not after[0].startswith("-") else "VALUE")
            return CommandError(what, fix=f"set recipe keys without dashes: {key}={shown}")
    return CommandError(what, fix=f"see `{parser.prog} --help`")


SUFFIXES = (".yaml", ".yml")
AFTER = {"export": ("--to", "merged"), "fork": ("runs/new", "--checkpoint", "100")}  # what a verb needs besides
MOST_NAMED = 10
READ = 20_000  # characters of a file, to see whether it is a recipe


class Parser(argparse.ArgumentParser):
    """Where the recipe or the run is missing, those that are here are named."""

    def error(self, message: str) -> NoReturn:
        missing, verb = message.partition("arguments are required: ")[2].split(", ")[0], self.prog.split()[1:]
        if missing == "recipe":
            raise _not_given("recipe", _recipes_in(Path()), _recipes_in(Path("recipes")), verb, command("new", "my.yaml"))
        if missing == "run":
            logs = sorted(Path("runs").glob("*/run.jsonl"), key=_age)
            raise _not_given("run", [log.parent for log in logs], [], verb, command("train", "my.yaml"))
        super().error(message)


def _not_given(kind: str, own: list[Path], examples: list[Path], verb: Sequence[str], first: str) -> CommandError:
    """`own`: the newest first, which is probably meant; `first`: what makes one."""
    found = [str(path) for path in (*own, *examples)]
    more = f", and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    here = f"{kind}s here: {', '.join(found[:MOST_NAMED])}{more}" if found else f"there is no {kind} here"
    fix = (
        command(*verb, found[0], *AFTER.get(verb[0], ()))
        if own
        else f"name one: {command(*verb, 'FILE')}"
        if found
        else f"make one: {first}"
    )
    return CommandError(f"no {kind} given", why=here, fix=fix)


def _age(path: Path) -> float:
    return -path.stat().st_mtime if path.exists() else 0.0


def _recipes_in(folder: Path) -> list[Path]:
    """The newest first, those of one age by name."""
    found = [path for path in folder.glob("*") if path.suffix in SUFFIXES and path.is_file() and _is_recipe(path)]
    return sorted(found, key=lambda path: (_age(path), path))


def _is_recipe(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(READ)
    except (OSError, UnicodeDecodeError):
        return False
    return all(re.search(rf"^{key}:", text, re.MULTILINE) for key in ("model", "data"))


def require_recipe(name: str, parser: argparse.ArgumentParser) -> None:
    """Where there is no file of this name, the one that was meant is told: another suffix, a typo, one of recipes/."""
    path = Path(name)
    if path.exists() or path.is_symlink():
        return
    if "=" in name and path.suffix not in SUFFIXES:  # train.lr=1e-4, and no file before it
        parser.error("the following arguments are required: recipe")
    places = dict.fromkeys((path.parent, Path(), Path("recipes")))
    same = [folder / f"{stem}{suffix}" for folder in places for stem in (path.stem, path.name) for suffix in SUFFIXES]
    meant = next((one for one in same if one.is_file()), None)
    if meant is None:
        there = {one.name: one for one in _recipes_in(path.parent)} if path.parent.is_dir() else {}
        close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.7)
        meant = there[close[0]] if close else None
    if meant is not None:
        raise RecipeError(
            what="cannot read the recipe: no such file",
            where=name,
            fix=f"did you mean `{command(*parser.prog.split()[1:], str(meant))}`?",
        )
