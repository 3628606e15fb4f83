"""benchmarks/table.py: what goes between the markers of README.md and docs/results.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_rows import measured, several

from benchmarks import table
from benchmarks.bench.results import NAME, Results
from benchmarks.bench.side_by_side import PICTURE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results = Results(tmp_path / NAME)
    for row in (*several(), measured("tiny", "pronghorn", 5.0)):
        results.add(row)
    return tmp_path


def test_the_side_by_side_has_machine_and_tables_without_tiny(folder: Path) -> None:
    text, short, every_row = table.side_by_side(folder), table.readme(folder), table.every_row(folder)
    assert "One Test card, torch 2.11, 2026-11-15. Whole training steps" in text
    assert "One Test card, torch 2.11, 2026-11-15." in short
    assert "| llama-1b | Pronghorn | 120,000 | 1.50 | 80 % |" in every_row
    assert "| llama-1b, LoRA bf16, short documents, 16,384 tokens per step | **120,000** | 80,000 | 1.50 |  | 80 % |" in text
    assert "| **120,000** | 80,000 | 1.50 | 16.3 GiB (16.3 GiB) |" in short
    assert not any("tiny" in part for part in (text, short, every_row, (folder / PICTURE).read_text()))


def test_how_much_faster_is_the_least_and_the_most(folder: Path) -> None:
    Results(folder / NAME).add(measured("llama-8b", "pronghorn", 20.0))
    Results(folder / NAME).add(measured("llama-8b", "unsloth", 10.0))
    assert "dense models of 0.6B to 8B parameters: **1.50 to 2.00 times**" in table.faster(folder)
    assert "LoRA and QLoRA): **not measured**" in table.faster(folder)


@pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
def test_the_pages_have_every_marker_once(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for name in table.PAGES[page]:
        assert text.count(table.begin(name)) == text.count(table.end(name)) == 1
        assert text.index(table.begin(name)) < text.index(table.end(name))
