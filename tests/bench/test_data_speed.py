"""The rows that data preparation is measured with, and what is read of a process's memory."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from benchmarks.data_rows import write_conversations
from benchmarks.data_speed import _memory, _peaks, size_of
from samples import chat_rows, write_rows


def test_rows_are_made_of_real_ones_all_different_and_always_the_same(tmp_path: Path) -> None:
    given = chat_rows(5)
    given[1]["messages"].insert(0, {"role": "system", "content": "Be kind. Be short."})
    source = write_rows(tmp_path / "given.jsonl", given)
    assert write_conversations(tmp_path / "a.jsonl", [source], rows=40) == 40
    assert write_conversations(tmp_path / "b.jsonl", [source], rows=40) == 40
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    rows = [json.loads(line)["messages"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [[message["role"] for message in row] for row in rows[:5]] == [
        [message["role"] for message in row["messages"]] for row in given
    ]
    said = {message["content"] for row in given for message in row["messages"]}
    assert {message["content"] for row in rows for message in row if message["role"] == "user"} <= said


def test_a_size_is_reached_without_any_file(tmp_path: Path) -> None:
    count = write_conversations(tmp_path / "a.jsonl", [], size=100_000)
    assert 100_000 <= (tmp_path / "a.jsonl").stat().st_size < 105_000
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines)) == count


def test_sizes_and_memory() -> None:
    assert (size_of("200MB"), size_of("2GB"), size_of("0.5 GB")) == (2 * 10**8, 2 * 10**9, 5 * 10**8)
    with pytest.raises(argparse.ArgumentTypeError):
        size_of("200")
    found = _memory(os.getpid())
    assert found is not None
    assert 0 < found[1] <= found[0]
    assert _memory(2**22 + 1) is None
    peaks = _peaks([(5.0, 1.0), (9.0, 3.0), (7.0, 2.0), (8.0, 4.0)])
    assert peaks == {
        "peak_rss_mb": 9.0,
        "peak_anonymous_mb": 4.0,
        "peak_rss_by_quarter_mb": [5.0, 9.0, 7.0, 8.0],
        "peak_anonymous_by_quarter_mb": [1.0, 3.0, 2.0, 4.0],
    }
    assert _peaks([(5.0, 1.0)])["peak_rss_by_quarter_mb"] == [5.0]
