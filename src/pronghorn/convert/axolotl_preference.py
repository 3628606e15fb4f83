"""Axolotl's `type` of data sets of preference tuning: `STYLE.COLUMNS`, a chat template and the columns it reads; or columns of
the user's own."""

from __future__ import annotations

from typing import Any, Protocol

from pronghorn.convert.data_sets import OWN_TEMPLATE, DataSet
from pronghorn.convert.values import UnfitError, plain, text

STYLES = {"chatml": "chatml", "llama3": "llama-3", "gemma": "gemma", "phi_3": "phi-3", "zephyr": "zephyr"}  # ours
TOKENIZERS = ("chat_template", "bradley_terry", "passthrough", "user_defined")  # styles without a template of their own
# Columns of a pair, where ours have other names. A question as text becomes a user's message, as in Axolotl.
PAIRS: dict[str, dict[str, str]] = {
    "argilla": {},
    "argilla_chat": {},
    "ultra": {},
    "icr": {"instruction": "input"},
    "intel": {"instruction": "question"},
    "prompt_pairs": {"instruction": "prompt"},
}
MARKED: dict[str, dict[str, str]] = {  # of a single answer
    "argilla": {"output": "completion"},
    "intel": {"instruction": "question", "output": "completion"},
    "prompt_pairs": {"instruction": "prompt", "output": "completion"},
    "ultra": {"instruction": "prompt", "output": "completion"},
}
PAIR_KEYS, MARKED_KEYS = ("prompt", "system", "chosen", "rejected"), ("prompt", "system", "completion", "label")


class Item(Protocol):
    """axolotl_data's entry of a list of data sets."""

    one: DataSet

    def get(self, name: str) -> Any: ...
    def say(self, name: str, mapped: str) -> None: ...
    def no(self, name: str, why: str) -> None: ...
    def quiet(self, name: str, why: str) -> None: ...
    def chat(self, *, sharegpt: bool) -> None: ...


def compared(item: Item, objective: str) -> None:
    """What the recipe says of a data set whose answers are compared, or marked."""
    kind, marked = item.get("type"), objective == "kto"
    if isinstance(kind, dict):
        _own_columns(item, kind, MARKED_KEYS if marked else PAIR_KEYS)
        return
    style, _, columns = str(kind or "chat_template.default").partition(".")
    if style == "bradley_terry":  # its own layer of names
        style, columns = (columns or "chat_template").partition(".")[::2]
        columns = columns or "icr"
    if style not in STYLES and style not in TOKENIZERS:
        raise UnfitError(f"an Axolotl-specific format; the columns are detected, and {OWN_TEMPLATE}")
    known = MARKED if marked else PAIRS
    if columns in ("", "default"):
        item.chat(sharegpt=False)
        _named(item, ("label",) if marked else ("chosen", "rejected"))
    elif columns in known:
        item.one.fields = dict(known[columns])
        item.one.format = "alpaca" if marked else "auto"
    else:
        raise UnfitError(f"the columns of `{columns}` are unknown; name them in data.fields")
    item.one.template = STYLES.get(style, "")
    shown = [f"data.template: {item.one.template}"] if item.one.template else []
    shown += [f"data.fields: {{{', '.join(f'{ours}: {theirs}' for ours, theirs in item.one.fields.items())}}}"]
    item.say("type", ", ".join(shown if item.one.fields else [*shown[:-1], "the columns are detected"]))


def _named(item: Item, keys: tuple[str, ...]) -> None:
    for ours in keys:
        name = item.get(f"field_{ours}")
        if name is not None and name != ours:
            item.one.fields[ours] = text(name)
        if name is not None:
            item.say(f"field_{ours}", f"data.fields.{ours}: {name}" if name != ours else f"detected: column {name}")


def _own_columns(item: Item, kind: dict[str, Any], keys: tuple[str, ...]) -> None:
    for name, value in kind.items():
        at, ours = f"type.{name}", name.removeprefix("field_")
        if plain(value) is None:
            item.quiet(at, "the value is empty")
        elif name.startswith("field_") and ours in keys:
            if value != ours:
                item.one.fields[ours] = text(value)
            item.say(at, f"data.fields.{ours}: {value}")
        elif name.endswith("_format") and str(value) == f"{{{name.removesuffix('_format')}}}":
            item.quiet(at, "same as Pronghorn: the column's text is used unchanged")
        elif name.endswith("_format"):
            item.no(at, "text around the columns is not supported; write it into the rows, or use messages and a template")
        else:
            item.no(at, "unknown key")
    item.say("type", "custom column names: see data.fields")
