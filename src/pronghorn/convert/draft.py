"""A recipe in the making out of another tool's config, and what became of every key of that config.

A key is mapped (with the value it became), without effect here (and why), or not honoured (why, and the nearest thing).
The tools are tables of rows (axolotl_keys.py, llamafactory.py, both_tools.py): a row is a function of the draft and the key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from pronghorn.convert.values import UnfitError, is_on, plain, printed, value_at, written
from pronghorn.errors import CommandError
from pronghorn.recipe import Recipe

Kind = Literal["mapped", "no effect", "not honoured"]
Row = Callable[["Draft", str], None]
Value = TypeVar("Value")
NO_MODEL, NO_DATA = "NAME-OF-THE-MODEL", "NAME-OF-YOUR-DATA.jsonl"  # where the config names none that can be used
EMPTY = "the value is empty"


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one key."""

    line: int
    key: str
    value: Any
    kind: Kind
    text: str


@dataclass
class Draft:
    """`values` and `lines` are the config's; a key is written as `datasets[0].path`."""

    values: dict[str, Any]
    lines: dict[str, int]
    tool: str
    name: str
    targets: dict[str, Any] = field(default_factory=dict)  # keys of the recipe, as `train.lr`
    origins: dict[str, list[str]] = field(default_factory=dict)  # which keys each of them came from
    fates: dict[str, tuple[Kind, str]] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)  # keys of the recipe that come from the tool's own defaults

    def get(self, key: str, default: object = None) -> Any:
        """The value of a key, with the words of YAML 1.1 for yes, no and nothing; `default` where it has none."""
        value = plain(self.values[key] if key in self.values else value_at(self.values, key))
        return default if value is None else value

    def read(self, key: str, reader: Callable[[Any], Value]) -> Value | None:
        """None: the key has no value, or one that cannot be read, and is not honoured."""
        found = None
        if self.get(key) is not None:
            with self.reading(key):
                found = reader(self.get(key))
        return found

    @contextmanager
    def reading(self, key: str) -> Iterator[None]:
        """A key with a value that cannot be read is not honoured."""
        try:
            yield
        except UnfitError as error:
            self.not_honoured(key, str(error))

    def unsaid(self, keys: Iterable[str]) -> Iterator[str]:
        """Those that have a value and no fate yet."""
        return (key for key in keys if self.get(key) is not None and key not in self.fates)

    def set(self, target: str, value: object, *keys: str, note: str = "") -> None:
        """These keys became this; of two that set the same, the later counts."""
        self.targets[target] = value
        self.origins[target] = [*self.origins.get(target, []), *(key for key in keys if key in self.lines)]
        for key in keys:
            self._say("mapped", key, f"{target}: {written(value)}" + (f"; {note}" if note else ""))

    def nearest(self, target: str, value: object, key: str, why: str) -> None:
        """Not honoured as it stands; the recipe has the nearest thing."""
        self.targets[target] = value
        self.origins.setdefault(target, []).append(key)
        self._say("not honoured", key, f"{why}; the recipe uses the nearest equivalent, {target}: {written(value)}")

    def no_effect(self, key: str, why: str) -> None:
        self._say("no effect", key, why)

    def not_honoured(self, key: str, why: str) -> None:
        self._say("not honoured", key, why)

    def _say(self, kind: Kind, key: str, text: str) -> None:
        if key in self.lines:
            self.fates[key] = (kind, text)

    def refuse(self, key: str, why: str, fix: str) -> None:
        """The whole config: what it trains is not what can be trained here."""
        raise CommandError(
            what=f"{key}: {printed(self.values.get(key))} cannot be converted",
            why=why,
            fix=fix,
            where=f"{self.name}:{self.lines.get(key, 1)}",
        )

    def default(self, target: str, value: object, note: str = "") -> None:
        """What the tool does where its config says nothing, if that is not what a recipe says by itself."""
        if target not in self.targets:
            self.targets[target], self.defaults[target] = value, f"{self.tool}'s default" + (f"; {note}" if note else "")

    def all_fates(self) -> list[Fate]:
        """The fate of every key, by line. A key without one stands inside a key that has one."""
        found = []
        for key, line in self.lines.items():
            if key in self.fates:
                found.append(Fate(line, key, value_at(self.values, key), *self.fates[key]))
        return sorted(found, key=lambda fate: fate.line)

    def unclaimed(self) -> Iterator[str]:
        """Keys of which nothing was said, nor of what they stand in."""
        for key in self.lines:
            if not any(key == known or key.startswith((f"{known}.", f"{known}[")) for known in self.fates):
                yield key


def apply(draft: Draft, rows: Mapping[str, Row], prefixes: Mapping[str, Row], within: str = "", unknown: str = "") -> None:
    """Each key at the top, or of the section `within`, by its row; by that of its prefix; else it is not known."""
    unknown = unknown or f"unknown {draft.tool} key; check its spelling and whether the run needs it"
    for name, value in (draft.get(within) if within else draft.values).items():
        key = f"{within}.{name}" if within else name
        if key in draft.fates:
            continue
        if plain(value) is None:
            draft.no_effect(key, EMPTY)
            continue
        row = rows.get(name) or next((row for prefix, row in prefixes.items() if name.startswith(prefix)), None)
        with draft.reading(key):
            (row or not_known(unknown))(draft, key)


# Rows -------------------------------------------------------------------------------------------------------------------


def rows(keys: str, row: Row) -> dict[str, Row]:
    """Several keys, or prefixes of keys, that become the same."""
    return dict.fromkeys(keys.split(), row)


def to(target: str, read: Callable[[Any], Any], note: str = "") -> Row:
    """The value, as it is read, under another name."""
    return lambda draft, key: draft.set(target, read(draft.get(key)), key, note=note)


def choice(target: str, same: Mapping[str, str], near: Mapping[str, tuple[str, str]], otherwise: tuple[str, str]) -> Row:
    """One of several words. `near`: word -> (ours, why it is not the same); `otherwise`: of every other word."""

    def row(draft: Draft, key: str) -> None:
        word = str(draft.get(key)).strip().lower()
        if word in same:
            draft.set(target, same[word], key)
        else:
            ours, why = near.get(word, otherwise)
            draft.nearest(target, ours, key, why)

    return row


def nothing(why: str) -> Row:
    """Without effect, whatever it says."""
    return lambda draft, key: draft.no_effect(key, why)


def not_here(why: str, off: str = "off, and Pronghorn has no equivalent") -> Row:
    """Not honoured where it asks for something; a 0, a false and an empty list ask for nothing."""

    def row(draft: Draft, key: str) -> None:
        if is_on(draft.get(key)):
            draft.not_honoured(key, why)
        else:
            draft.no_effect(key, off)

    return row


def not_known(why: str) -> Row:
    """Not honoured, whatever it says."""
    return lambda draft, key: draft.not_honoured(key, why)


def only(values: Collection[Any], same: str, otherwise: str) -> Row:
    """Without effect with one of these values, and not honoured with any other."""

    def row(draft: Draft, key: str) -> None:
        if draft.get(key) in values:
            draft.no_effect(key, same)
        else:
            draft.not_honoured(key, otherwise)

    return row


def only_if_one(why: str) -> Row:
    """How many GPUs share something: with one it has no effect."""
    return only((0, 1, "1", False), "it asks for one GPU, which needs no setting", why)


def refused(why: str, fix: str) -> Row:
    def row(draft: Draft, key: str) -> None:
        if is_on(draft.get(key)):
            draft.refuse(key, why, fix)
        draft.no_effect(key, "off, and Pronghorn has no equivalent")

    return row


# The recipe -------------------------------------------------------------------------------------------------------------


def nested(targets: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for target, value in targets.items():
        *above, last = target.split(".")
        section = found
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    return found


def finish(draft: Draft) -> None:
    """A recipe that is valid: a value that it does not take is taken out again, and its keys are not honoured."""
    while True:
        for target, placeholder in (("model", NO_MODEL), ("data.train", [NO_DATA])):
            if not draft.targets.get(target):
                draft.targets[target], draft.defaults[target] = placeholder, "fill this in"
        try:
            Recipe.model_validate(nested(draft.targets))
            return
        except ValidationError as error:
            spoilt = [(_target_of(draft, detail), _why(detail)) for detail in error.errors()]
        taken = {target: why for target, why in spoilt if target}
        if not taken:
            raise CommandError(
                what=f"cannot convert this config: {spoilt[0][1]}",
                where=draft.name,
                fix="fix the config, or write the recipe yourself: pronghorn new FILE",
            )
        for target, why in taken.items():
            value = draft.targets.pop(target)
            for key in draft.origins.pop(target, []):
                draft.not_honoured(key, f"{target} does not accept {printed(value)}: {why}; the recipe's default is used")


def _target_of(draft: Draft, detail: Any) -> str:
    """The key of the draft that this is about: where it lies, or the first that the sentence of the whole recipe names."""
    path = [str(part) for part in detail["loc"]]
    found = [".".join(path[:n]) for n in range(len(path), 0, -1)]
    if not path:
        found = re.findall(r"[a-z_]+(?:\.[a-z_0-9]+)*", str(detail["ctx"]["error"]))
    return next((target for target in found if target in draft.targets), "")


def _why(detail: Any) -> str:
    message = str(detail["ctx"]["error"]).split("\n")[0] if detail["type"] == "value_error" else str(detail["msg"])
    return message[:1].lower() + message[1:]
