"""One pass over the sources: what is refused before anything is tokenized."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from pronghorn.data.read import reading
from pronghorn.data.read.reading import Reading, parts_of
from pronghorn.errors import DataError
from pronghorn.recipe import Data
from samples import write_rows
from tables import table

TURN = {"role": "user", "content": "a" * 10}


def read(path: Path, **spec: Any) -> int:
    data = Data(train=(str(path),), **spec)
    chunks = Reading(parts_of(data.train, data), lambda _: nullcontext()).chunks(100)
    return sum(chunk.read for chunk in chunks)


@table(
    "row", [{"text": "a" * 2000}, {"messages": [TURN] * 100}, {"prompt": "a" * 1500, "completion": "b"}, {"text": [1] * 500}]
)
def test_a_row_without_end_is_refused_unless_the_recipe_says_what_becomes_of_it(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LONGEST_ROW", 1000)
    short = {key: value[:1] for key, value in row.items()}
    path = write_rows(tmp_path / "a.jsonl", [short, row])
    with pytest.raises(DataError, match="million characters") as caught:
        read(path)
    assert caught.value.where == f"{path}:2"
    assert "data.long: drop, truncate or split" in caught.value.fix
    assert read(path, long="drop") == 2
    assert read(write_rows(tmp_path / "b.jsonl", [short] * 200)) == 200  # each is short
