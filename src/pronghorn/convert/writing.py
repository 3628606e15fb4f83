"""The recipe as text, with where each key came from, and the list of what became of the config's keys."""

from __future__ import annotations

from collections.abc import Sequence

from pronghorn.convert.draft import Draft, Fate, Kind, nested
from pronghorn.convert.values import printed, written
from pronghorn.errors import counted, printable
from pronghorn.recipe import Recipe

TITLES: dict[Kind, str] = {"mapped": "mapped", "no effect": "no effect in Pronghorn", "not honoured": "NOT SUPPORTED"}
COMMENTS_FROM = 48  # the column


def recipe_text(draft: Draft) -> str:
    """In the order of the recipe's own keys."""
    name = one_comment(draft.name)
    lines = [f"# Converted from {name} ({draft.tool}). The end of this file lists what each key became."]
    values = nested(draft.targets)
    for key in Recipe.model_fields:
        if key not in values:
            continue
        if not isinstance(values[key], dict):
            lines.append(_line(draft, key, key, values[key]))
            continue
        lines.append(f"{key}:")
        order = list(type(getattr(Recipe.model_validate(values), key)).model_fields)
        for inner in sorted(values[key], key=order.index):
            lines.append(_line(draft, f"  {inner}", f"{key}.{inner}", values[key][inner]))
    lines.append("")
    for kind in ("not honoured", "no effect", "mapped"):
        fates = [fate for fate in draft.all_fates() if fate.kind == kind]
        if fates:
            lines.append(f"# {TITLES[fates[0].kind]} (line in {name}, key, result):")
            lines += [f"#   {told(fate)}" for fate in fates]
    return "\n".join(lines) + "\n"


def _line(draft: Draft, shown: str, target: str, value: object) -> str:
    line = f"{shown}: {written(value)}"
    below = [name for name in (*draft.origins, *draft.defaults) if name == target or name.startswith(f"{target}.")]
    keys = dict.fromkeys(key for name in below for key in draft.origins.get(name, []))
    told_of = ", ".join(f"{key} (line {draft.lines[key]})" for key in keys)
    told_of = told_of or next((draft.defaults[name] for name in below if name in draft.defaults), "")
    return f"{line:<{COMMENTS_FROM}} # {one_comment(told_of)}" if told_of else line


def one_comment(text: str) -> str:
    return printable(text).replace("\n", " ")


def told(fate: Fate) -> str:
    return one_comment(
        f"{fate.line:>4}  {fate.key}: {printed(fate.value)} -> {fate.text}"
        if fate.kind == "mapped"
        else f"{fate.line:>4}  {fate.key}: {printed(fate.value)} -- {fate.text}"
    )


def list_text(fates: Sequence[Fate]) -> str:
    """For a terminal; what needs the reader's eye stands last."""
    parts = []
    for kind in ("mapped", "no effect", "not honoured"):
        some = [fate for fate in fates if fate.kind == kind]
        if some:
            parts.append(f"{TITLES[some[0].kind]}: {counted(len(some), 'key')}")
            parts += [f"  {told(fate)}" for fate in some]
    return "\n".join(parts)
