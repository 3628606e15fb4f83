"""How many rows there will be, where that can be known without reading them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pronghorn.data.read import row_counts
from pronghorn.data.read.row_counts import expected_rows
from pronghorn.data.read.sources import resolve


def count(*files: Path, at_most: int | None = None) -> int:
    return expected_rows([source for file in files for source in resolve(str(file))], at_most)


def test_rows_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_counts, "BLOCK", 7)
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
