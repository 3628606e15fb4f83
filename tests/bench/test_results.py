"""The results file survives being cut off, and never mixes machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_rows import measured

from benchmarks.bench.results import Results
from pronghorn.errors import CommandError


def test_every_row_is_on_disk_at_once_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "side-by-side.json"
    results = Results(path)
    results.commands.append("pronghorn bench")
    results.add(measured("llama-1b", "pronghorn", 100.0))
    assert json.loads(path.read_text())["results"] == results.rows
    results.add(measured("llama-1b", "unsloth", 70.0))
    again = Results(path)
    assert again.rows == results.rows
    assert again.commands == ["pronghorn bench"]


def test_rows_of_another_file_are_taken_over_where_there_are_none(tmp_path: Path) -> None:
    old = Results(tmp_path / "old.json")
    old.add(measured("llama-1b", "pronghorn", 1.0))
    old.add(measured("llama-1b", "unsloth", 2.0))
    new = Results(tmp_path / "new.json")
    new.add(measured("llama-1b", "pronghorn", 3.0))
    new.take_over(old.path)
    assert {row["system"]: row["tokens_per_second"] for row in new.rows} == {"pronghorn": 3.0, "unsloth": 2.0}
    with pytest.raises(CommandError, match="file not found"):
        new.take_over(tmp_path / "nowhere.json")
