"""What people type instead: verbs and options of other tools, misspellings, and recipe keys written as options."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Sequence

from pronghorn.errors import CommandError

VERBS = {
    "finetune": "train", "fine-tune": "train", "fit": "train", "sft": "train", "resume": "train", "continue": "train",
    "lora": "train", "init": "new", "create": "new", "template": "new", "convert": "new --from CONFIG",
    "import": "new --from CONFIG", "validate": "check",
    "dry-run": "check", "dryrun": "check", "lint": "check", "doctor": "check", "estimate": "plan",
    "forecast": "plan", "memory": "plan", "cost": "plan", "evaluate": "eval", "test": "eval", "score": "eval",
    "generate": "chat", "infer": "chat", "inference": "chat", "predict": "chat", "ask": "chat", "talk": "chat",
    "server": "serve", "api": "serve", "merge":
    "export --to merged", "save": "export", "list": "runs", "ls": "runs", "compare": "runs", "history": "runs",
    "benchmark": "bench", "stats": "data stats", "show": "data show", "inspect": "data show", "preview": "data show",
    "dataset": "data",
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
}  # fmt: skip


def require_verb(words: Sequence[str], verbs: Collection[str], data_verbs: Collection[str]) -> None:
    """The first word, and after `data` the second, is a verb; or an error with the one that was meant."""
    named = [word for word in words if not word.startswith("-")]
    if named and named[0] not in verbs:
        raise _unknown(named[0], verbs, "", named[1:])
    if named[:1] == ["data"] and named[1:] and named[1] not in data_verbs:
        raise _unknown(named[1], data_verbs, "data ", named[2:])


def _unknown(word: str, verbs: Collection[str], group: str, rest: Sequence[str]) -> CommandError:
    if word.endswith((".yaml", ".yml")) and (group or not rest):
        verb = "data show" if group else "train"
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

        if key := key_like([plain]):
            after = left[left.index(option) + 1 :][:1]
            shown = value or (after[0] if after and not after[0].startswith("-") else "VALUE")
            return CommandError(what, fix=f"set recipe keys without dashes: {key}={shown}")
    return CommandError(what, fix=f"see `{parser.prog} --help`")
