"""A value as one line of YAML 1.2."""

from __future__ import annotations

import io
import json
import re
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pronghorn.errors import printable

PLAIN = re.compile(r"[A-Za-z0-9_./~<][A-Za-z0-9_./~<>|@+-]*( [A-Za-z0-9_./~<>|@+-]+)*")


def one_line(value: Any) -> str:
    """A value as YAML on one line, which reads back as itself."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(one_line(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{one_line(str(key))}: {one_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) else f"{value:.12g}"
    if isinstance(value, int):
        return str(value)
    return _text(str(value))


def _text(text: str) -> str:
    quoted = json.dumps(printable(text.encode("utf-8", "backslashreplace").decode()), ensure_ascii=False)
    if not PLAIN.fullmatch(text) or text.endswith(" "):
        return quoted
    try:
        same = YAML(typ="safe", pure=True).load(io.StringIO(f"[{text}]")) == [text]
    except (YAMLError, ValueError):
        return quoted
    return text if same else quoted
