"""benchmarks/table.py: what goes between the README's markers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench_rows import measured, several

from pronghorn.bench.results import NAME, Results
from pronghorn.bench.side_by_side import PICTURE

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks import table


def test_the_training_part_has_picture_machine_and_table_without_tiny(tmp_path: Path) -> None:
    results = Results(tmp_path / NAME)
    for row in (*several(), measured("tiny", "pronghorn", 5.0)):
        results.add(row)
    text, every_row = table.training_part(tmp_path)
    assert f"]({tmp_path / PICTURE})" in text
    for part in (text, every_row):
        assert "One Test card, torch 2.11, 2026-11-15. Whole training steps" in part
        assert "tiny" not in part
    assert "| llama-1b | Pronghorn | 120,000 | 1.50 | 80 % |" in every_row
    assert "| llama-1b, LoRA bf16, short documents, 16,384 tokens a step | **120,000** | 80,000 | 1.50 |  | 80 % |" in text
    assert table.EVERY_ROW in text
    assert "tiny" not in (tmp_path / PICTURE).read_text()


def test_without_measurements_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="run `make bench`"):
        table.training_part(tmp_path)


def test_the_newest_kernel_figures_count(tmp_path: Path) -> None:
    op, case = table.KERNELS[0]

    def content(date: str, ms: float) -> str:
        line = {"op": op, "case": case, "impl": "ours", "ms": ms, "share_of_copy": 0.94}
        return json.dumps({"date": date, "lines": [line, line | {"impl": "liger", "ms": None}]})

    (tmp_path / "op-a.json").write_text(content("2026-11-15", 0.5))
    (tmp_path / "ops.json").write_text(content("2026-11-16", 0.25))
    assert f"| {op} {case} | 0.250 ms, 94% of a copy's rate |  |  |" in table.kernel_table(tmp_path)


def test_the_readme_has_both_markers() -> None:
    text = (table.ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(table.BEGIN) == text.count(table.END) == 1
    assert text.index(table.BEGIN) < text.index(table.END)
