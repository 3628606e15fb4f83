"""The table on disk: what was written comes back, or its damage is noticed before anything trusts it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from token_rows import mask_of, some_rows, write_table

from pronghorn import digests
from pronghorn.data.encode import token_cache
from pronghorn.data.encode.token_cache import DamagedError, open_table
from pronghorn.data.encode.tokens import TokenTable, record_batch
from pronghorn.errors import EnvironmentFault


def test_a_table_on_disk_is_its_rows(tmp_path: Path) -> None:
    rows = some_rows(50)
    assert any(row.runs and row.runs[0][0] == 0 for row in rows)  # a loss token at position 0, which has no label
    seal = write_table(tmp_path / "t.arrow", (record_batch(rows[at : at + 7]) for at in range(0, 50, 7)))
    table = open_table(tmp_path / "t.arrow", seal)
    assert len(table) == 50
    assert table.lengths.dtype == table.loss_counts.dtype == np.int32
    for i, row in enumerate(rows):
        assert table.ids(i).tolist() == row.ids.tolist()
        assert table.loss(i).tolist() == mask_of(row)
        assert table.loss_counts[i] == sum(mask_of(row)[1:])
        assert (table.lengths[i], table.where(i), table.example_json(i)) == (len(row.ids), row.where, row.example)
    assert [path.name for path in tmp_path.iterdir()] == ["t.arrow"]
    assert table.content == TokenTable.of(rows).content  # however the rows are cut into batches


def test_damage_is_noticed_before_arrow_reads_a_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.arrow"
    monkeypatch.setattr(digests, "BLOCK", 1024)  # several blocks, in threads
    seal = write_table(path, [record_batch(some_rows(50))])
    assert len(seal.blocks) > 3
    content = path.read_bytes()
    monkeypatch.setattr(token_cache, "_mapped", lambda *_: pytest.fail("parsed"))
    for at in (0, 9, 700, len(content) // 2, len(content) - 12, len(content) - 1):  # magic, metadata, tokens, footer
        flipped = bytearray(content)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match=f"block {at // 1024 + 1} of"):
            open_table(path, seal)
    for other in (content[:-1], content + b"x", b""):
        path.write_bytes(other)
        with pytest.raises(DamagedError, match="bytes, expected"):
            open_table(path, seal)
    path.unlink()
    with pytest.raises(DamagedError, match="No such file"):
        open_table(path, seal)


@pytest.mark.parametrize("change", ["cut", "written to"])
def test_a_file_that_changes_while_it_is_mapped_is_a_sentence(tmp_path: Path, change: str) -> None:
    """A process that reads a mapped page beyond the end of its file is ended by the kernel (SIGBUS)."""
    path = tmp_path / "t.arrow"
    table = open_table(path, write_table(path, [record_batch(some_rows(50))]))
    assert len(table.ids(3))
    if change == "cut":
        os.truncate(path, 100)
    else:
        content = path.read_bytes()
        path.write_bytes(content)
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns + 10_000_000))  # a clock that did not tick in between
    for read in (table.ids, table.loss, table.where, table.example_json):
        with pytest.raises(EnvironmentFault, match="changed while they were in use"):
            read(3)


def test_a_file_that_is_replaced_or_removed_stays_what_it_was(tmp_path: Path) -> None:
    """As our own writing does it, in another process."""
    path = tmp_path / "t.arrow"
    table = open_table(path, write_table(path, [record_batch(some_rows(50))]))
    before = table.ids(3).tolist()
    write_table(path, [record_batch(some_rows(2))])
    path.unlink()
    assert table.ids(3).tolist() == before
