"""Data sets of a config into the recipe's `data`: their names, formats, columns and roles, and templates by name.

Where sources have formats, names or numbers of rows of their own, each is an entry of `data.train` that says so. A recipe has
one template and one way with long rows for all of its sources: those that need others are not honoured, with a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from pronghorn.convert.draft import Draft
from pronghorn.convert.values import UnfitError
from pronghorn.data.read.formats import CHAT_COLUMNS
from pronghorn.data.read.source_files import BadRow
from pronghorn.data.read.sources import read, resolve
from pronghorn.data.template.named_templates import named
from pronghorn.errors import DataError

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz", ".arrow", ".txt")
SLICE = re.compile(r"(?P<split>[^\[\]]+)\[:(?P<rows>\d+)(?P<percent>%?)\]")
LATER = "a recipe has one template and one data.long setting for all sources; write one recipe per template"
KEYS = {  # keys of Axolotl's data sets, by what they say
    "format": ("type",),
    "long": ("type",),
    "template": ("type", "chat_template"),
    "roles": ("roles",),
    "max_rows": ("split",),
    "fields": ("field", "text_column", "field_messages", "field_chosen", "field_rejected", "field_tools", "type"),
    "message_fields": (
        "message_property_mappings",
        "message_field_role",
        "message_field_content",
        "message_field_training",
        "field_thinking",
        "template_thinking_key",
    ),
}
WHOLE_FILE = "the whole file is read; data.max_rows: N uses its first N rows"
OWN_TEMPLATE = "the tokenizer's own template is used; instruct models have one"


@dataclass
class DataSet:
    """One source, as a recipe would say it."""

    key: str  # of the config
    name: str
    format: str = "auto"
    fields: dict[str, str] = field(default_factory=dict)
    message_fields: dict[str, str] = field(default_factory=dict)
    roles: dict[str, list[str]] = field(default_factory=dict)
    max_rows: int | None = None
    template: str = ""  # by name; "": the tokenizer's own
    long: str = ""

    @property
    def for_all(self) -> tuple[object, ...]:
        """What a recipe can only say once, for all of its sources."""
        return self.template, self.long

    @property
    def own(self) -> dict[str, object]:
        """What it can say of one source, by the keys of an entry of `data.train`."""
        said = {"columns": self.fields, "message_fields": self.message_fields, "roles": self.roles, "max_rows": self.max_rows}
        return {key: value for key, value in said.items() if value}

    @property
    def entry(self) -> str | dict[str, object]:
        own = ({"format": self.format} if self.format != "auto" else {}) | self.own
        return {"path": self.name, **own} if own else self.name


def is_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.lower().endswith(SUFFIXES)


def source_name(path: str, config: str, split: str) -> str:
    """As `data.train` has it: a file or folder, or a hub data set `name[:config][:split]`."""
    if "://" in path:
        raise UnfitError("only local files, folders and Hub datasets are supported; download it first and name the file")
    if is_local(path):
        return path
    split = split or "train"
    if config:
        return f"{path}:{config}:{split}"
    return path if split == "train" else f"{path}:{split}"


def first_rows(split: str, path: str) -> tuple[str, int | None]:
    """`train[:500]` or `train[:20%]` of a file: its first rows; a percentage is counted now. Of a hub data set the hub's own
    library reads the slice."""
    found = SLICE.fullmatch(split)
    if not found:
        return split, None
    rows = int(found["rows"])
    if found["percent"]:
        if not Path(path).expanduser().exists():
            return split, None
        try:
            bad: list[BadRow] = []
            total = sum(1 for source in resolve(path) for _ in read(source, bad.append)) + len(bad)
        except DataError:
            return split, None
        rows = round(total * rows / 100)
    return found["split"], rows or None


def chat_fields(column: str, role: str, content: str) -> tuple[dict[str, str], dict[str, str]]:
    """Names of the column and of the keys in a message, where they are not found out by themselves."""
    fields = {} if column in CHAT_COLUMNS else {"messages": column}
    found_out = (role, content) in (("role", "content"), ("from", "value"))
    return fields, {} if found_out else {"role": role, "content": content}


def set_sources(draft: Draft, sets: list[DataSet]) -> None:
    """data.train, and what all of them need."""
    if not sets:
        return
    first = sets[0]
    together = [one for one in sets if one.for_all == first.for_all]
    alike = all(one.own == first.own for one in together)
    formats = {one.format for one in together} if alike else set()
    draft.set("data.train", [one.name if alike else one.entry for one in together], *dict.fromkeys(one.key for one in together))
    for one in sets:
        if one.for_all != first.for_all:
            before = draft.fates[one.key][1] + "; " if one.key in draft.fates else ""  # one key may name several
            draft.not_honoured(one.key, f"{before}{one.name} is not in the recipe: {LATER}")
    if len(formats) == 1 and first.format != "auto":
        draft.targets["data.format"] = first.format
        draft.origins["data.format"] = _keys_of(draft, together, "format")
    for target, value in (
        ("fields", first.fields),
        ("message_fields", first.message_fields),
        ("roles", first.roles),
        ("max_rows", first.max_rows),
        ("template", first.template),
        ("long", first.long),
    ):
        if value and (alike or target in ("template", "long")):
            draft.targets[f"data.{target}"] = value
            draft.origins[f"data.{target}"] = _keys_of(draft, together, target)


def _keys_of(draft: Draft, sets: list[DataSet], target: str) -> list[str]:
    """The keys beside a data set's name that say this of it; its name, where none does."""
    found = []
    for one in sets:
        beside = one.key.rpartition(".")[0]
        found += [key for name in KEYS[target] if (key := f"{beside}.{name}") in draft.lines] or [one.key]
    return list(dict.fromkeys(found))


def set_template(draft: Draft, key: str, name: str, ours: str, *, for_all: bool = True) -> str:
    """`ours`: the same template's name here, or none. Returns the name that counts; `for_all`: it is the recipe's."""
    if not ours or named(ours) is None:
        draft.not_honoured(key, f"unknown template `{name}`; {OWN_TEMPLATE}")
        return ""
    if for_all:
        draft.set("data.template", ours, key)
    else:
        draft.fates[key] = ("mapped", f"data.template: {ours}")
    return ours
