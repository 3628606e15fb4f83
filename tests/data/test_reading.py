"""One pass over the sources: what is refused before anything is tokenized."""

from __future__ import annotations

import gzip
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pronghorn.data.read import reading
from pronghorn.data.read.reading import expected_rows, parts_of, read_chunks
from pronghorn.errors import DataError
from pronghorn.recipe_parts import Data
from samples import write_rows
from tables import table

TURN = {"role": "user", "content": "a" * 10}


def read(path: Path, **spec: Any) -> int:
    data = Data(train=(str(path),), **spec)
    chunks = read_chunks(parts_of(data.train, data), 100, lambda _: nullcontext())
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


def count(*files: Path, at_most: int | None = None) -> int:
    data = Data(train=tuple(map(str, files)), max_rows=at_most)
    return expected_rows(parts_of(data.train, data))


def test_rows_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BLOCK", 7)
    lines, table, packed, listed = (tmp_path / name for name in ("a.jsonl", "b.csv", "c.jsonl.gz", "d.json"))
    lines.write_text('{"text": "x"}\n' * 5)
    table.write_text("text\nx\ny")
    packed.write_bytes(gzip.compress(b'{"text": "x"}\n'))
    listed.write_text('[{"text": "x"}]')
    parquet, damaged = tmp_path / "e.parquet", tmp_path / "f.parquet"
    pq.write_table(pa.table({"text": ["x"] * 11}), parquet)
    damaged.write_bytes(b"PAR1, and no more")
    assert [count(lines), count(table), count(parquet)] == [5, 2, 11]
    assert count(lines, table, parquet) == 18
    assert count(lines, table, at_most=3) == 5
    assert [count(file) for file in (packed, listed, damaged)] == [0, 0, 0]
    assert count(lines, packed) == 0  # not all of it is known
    lines.write_text('{"text": "x"}\n{"text": "y"}')
    assert count(lines) == 2
