"""The table of docs/export.md: a measured cell, a refused one with its sentence below, one that was not checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exports
from benchmarks.exports import RUNS, table, words
from pronghorn.export.targets import TARGETS


def test_cells_are_figures_or_point_to_a_sentence() -> None:
    figures = {"passed": True, "greedy_agreement": 0.989, "largest_log_prob_difference": 0.36, "perplexity_before": 4.0}
    found = [
        {"run": "A", "target": "merged", **figures, "perplexity_after": 4.1},
        {"run": "A", "target": "vllm", "refused": "no DoRA", "fix": "merge first"},
        {"run": "B", "target": "merged", "passed": None, "sentence": "not checked: no program"},
        {"run": "B", "target": "vllm", "refused": "no DoRA", "fix": "merge first"},
    ]
    assert table(found).splitlines() == [
        "| | `merged` | `vllm` |",
        "|---|---|---|",
        "| A | 98.9%, 0.4, +2.5% | refused [1] |",
        "| B | not checked [2] | refused [1] |",
        "",
        "1. no DoRA; merge first",
        "2. not checked: no program",
    ]


def test_every_target_and_every_kind_of_run_is_asked_for() -> None:
    assert {word.split(":")[0] for word in words()} == TARGETS.keys()
    assert {"llama", "qwen3", "gemma2", "phi3", "qwen3_moe", "gpt_oss"} <= {model for model, _ in RUNS.values()}


def test_rows_are_kept_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is written beside those that stand there, in the table's order; one that is made again is replaced."""
    monkeypatch.setattr(exports, "FILE", tmp_path / "exports.json")
    monkeypatch.setattr(exports, "DOC", tmp_path / "export.md")
    (tmp_path / "export.md").write_text(f"before\n{exports.BEGIN}\nold\n{exports.END}\nafter\n", encoding="utf-8")
    first, second = list(RUNS)[:2]

    def row(run: str, key: str) -> dict[tuple[str, str], dict[str, str]]:
        return {(run, "merged"): {"run": run, "target": "merged", "refused": "no", "fix": key, "made_with": key}}

    for run, key in ((second, "1"), (first, "1"), (second, "2")):
        exports.save(row(run, key))
    assert [(run, one["made_with"]) for (run, _), one in exports.saved().items()] == [(first, "1"), (second, "2")]
    text = (tmp_path / "export.md").read_text(encoding="utf-8")
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "2. no; 2" in text
