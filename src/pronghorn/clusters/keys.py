"""What people ask of a cluster, as key=value words, and the training command that goes there. All is checked before a file is
written: names against a pattern, everything else is quoted where it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pronghorn.errors import CommandError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AMOUNT = re.compile(r"(?:\d{1,6}[smhd])+")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):(\d\d):(\d\d)")  # as Slurm writes it


@dataclass(frozen=True)
class Key:
    """`read` returns the value, or raises ValueError with what is expected."""

    read: Callable[[str], Any]
    text: str
    default: Any = None


@dataclass(frozen=True)
class Training:
    """What is to run. `words`: the command, unquoted; `paths`: the files and folders in it; `folder`: where it is typed;
    `source`: the command that asked for this."""

    words: tuple[str, ...]
    paths: tuple[str, ...]
    folder: str
    output: str
    source: str

    @property
    def name(self) -> str:
        """The run's name, in letters that every cluster takes: of the output folder."""
        letters = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(self.output).name.lower()).strip("-")
        return f"run-{letters}"[:40].rstrip("-") if not letters[:1].isalpha() else letters[:40].rstrip("-")


def count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", text):
        raise ValueError("a whole number from 1")
    return int(text)


def count_or_none(text: str) -> int:
    return 0 if text == "0" else count(text)


def seconds(text: str) -> int:
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        found = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif _AMOUNT.fullmatch(text):
        found = sum(int(amount[:-1]) * _UNITS[amount[-1]] for amount in re.findall(r"\d+[smhd]", text))
    else:
        found = 0
    if not found:
        raise ValueError("a time: 4h, 30m, 1d12h or 1-12:00:00")
    return found


def matching(pattern: str, example: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"something like {example}")
        return text

    return read


def asked(kind: str, words: Sequence[str], keys: Mapping[str, Key]) -> dict[str, Any]:
    """Every key's value or default."""
    allowed = "; ".join(f"{name}: {key.text}" for name, key in keys.items())
    found = {name: key.default for name, key in keys.items()}
    seen = set[str]()
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in keys:
            known = "recipe keys go before it" if "." in name and equals else f"use key=value words; {allowed}"
            raise CommandError(what=f"--{kind} has no key `{name}`", fix=known)
        if name in seen:
            raise CommandError(what=f"--{kind}: `{name}` is given twice", fix="keep one of them")
        seen.add(name)
        try:
            found[name] = keys[name].read(value)
        except ValueError as error:
            raise CommandError(what=f"--{kind}: {name}={value} is not {error}", fix=f"{name}: {keys[name].text}") from None
    return found


def require(kind: str, found: Mapping[str, Any], *names: str, why: str) -> None:
    for name in names:
        if not found[name]:
            raise CommandError(what=f"--{kind} needs {name}=", why=why, fix=f"add {name}=VALUE")


def require_below(kind: str, *paths: str) -> None:
    """On a machine that has its own folders, only paths within the working folder mean the same as here."""
    for path in paths:
        if path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts:
            raise CommandError(
                what=f"--{kind}: {path} is outside the working folder",
                why="only the working folder's content is at the same place there",
                fix="use a relative path without `..`",
            )
