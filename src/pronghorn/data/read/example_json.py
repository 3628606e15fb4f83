"""Examples as JSON: how the token table keeps them."""

from __future__ import annotations

import json

from pronghorn.data.read.formats import Example


def example_to_json(example: Example) -> str:
    fields = {name: getattr(example, name) for name in Example.__slots__ if name != "where"}
    return json.dumps({name: value for name, value in fields.items() if value}, ensure_ascii=False, default=str)


def example_from_json(text: str, where: str) -> Example:
    fields = json.loads(text)
    for name in ("messages", "tools", "choices"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return Example(where=where, **fields)
