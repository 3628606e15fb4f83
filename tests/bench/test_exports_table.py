"""The table of docs/export.md: a measured cell, a refused one with its sentence below, one that was not checked."""

from __future__ import annotations

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
