"""Rows whose columns, message keys or roles have other names than ours, brought to ours before anything looks at them.

`data.fields` names columns, `data.message_fields` keys inside a message, `data.roles` who speaks. A row that has the wanted
column already keeps it under the name it has: only what the recipe names is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pronghorn.data.read.json_rows import STRICT
from pronghorn.data.read.source_files import RawRow
from pronghorn.errors import DataError
from pronghorn.recipe_parts import Fields

CHAT_COLUMN = "messages"


class Renaming:
    """What a recipe says about names, for all sources or for one."""

    def __init__(self, columns: Fields, keys: Mapping[str, str], roles: Mapping[str, Sequence[str]]) -> None:
        self._columns = {ours: theirs for ours, theirs in columns.model_dump().items() if theirs is not None}
        self._keys = dict(keys)
        self._roles = {theirs: ours for ours, names in roles.items() for theirs in names}

    @property
    def nothing(self) -> bool:
        return not (self._columns or self._keys or self._roles)

    def key(self) -> list[Any]:
        """For the cache: what decides the rows."""
        return [] if self.nothing else [self._columns, self._keys, self._roles]

    def require_columns(self, head: Sequence[RawRow], where: str) -> None:
        """Asked of the first rows as they were read: a name that is misspelt is one error, not one for every row."""
        found = list(dict.fromkeys(column for row in head for column in row.fields))
        for ours, theirs in self._columns.items():
            if theirs not in found and head:
                raise DataError(
                    f"data.fields.{ours}: no column `{theirs}`", where=where,
                    why="found " + ", ".join(f"`{column}`" for column in found), fix=f"fix data.fields.{ours}",
                )  # fmt: skip

    def __call__(self, row: RawRow) -> RawRow:
        fields = dict(row.fields)
        taken = {ours: fields.pop(theirs) for ours, theirs in self._columns.items() if theirs in fields}
        fields |= taken
        if self._keys or self._roles:
            for column in (CHAT_COLUMN, "conversations", "conversation", "prompt", "completion", "chosen", "rejected"):
                if column in fields:
                    fields[column] = self._messages(fields[column])
        return RawRow(fields, row.where)

    def _messages(self, value: object) -> Any:
        """Renames the keys in a list of messages, which CSV holds as JSON text. Other values are judged later."""
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = STRICT.decode(value)
            except (ValueError, RecursionError):
                return value
        if not isinstance(value, list):
            return value
        return [self._message(item) if isinstance(item, dict) else item for item in value]

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        renamed = dict(message)
        taken = {ours: renamed.pop(theirs) for ours, theirs in self._keys.items() if theirs in renamed}
        renamed |= taken
        for key in ("role", "from"):
            if isinstance(renamed.get(key), str):
                renamed[key] = self._roles.get(renamed[key], renamed[key])
        return renamed
