"""benchmarks/record.py and result_tables.py, on files that are made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench_rows import MACHINE

from benchmarks import record, result_tables

WHERE = "Test card, torch 2.11, 2026-11-15, `python -m x`."


def put(folder: Path, name: str, results: list[Any], **more: Any) -> None:
    record.write(folder / name, record.record("what", "python -m x", results, MACHINE, **more))


def test_a_record_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMIT", "abc1234")
    put(tmp_path, "deep/a.json", [1], more=2)
    assert record.read(tmp_path / "deep" / "a.json") == {
        "what": "what",
        "command": "python -m x",
        "commit": "abc1234",
        "machine": MACHINE,
        "more": 2,
        "results": [1],
    }
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["a.json"]


def test_a_copy_without_history_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.commit() is None


def test_budgets_show_the_plan_beside_what_was_measured(tmp_path: Path) -> None:
    memory = {"planned_peak_bytes": 17_770_000_000, "peak_bytes": 17_760_000_000, "planned_step_seconds": 1.111}
    plan = {"levels": ["all again, offloaded"] * 2 + ["keep"], "pieces": 4, "host_embeddings": True}
    put(tmp_path, "budgets-llama-8b.json", [{"budget_asked": "18GB", "plan": plan, "memory": memory, "ms_per_step": 1133.7,
                                            "tokens_per_second": 14443.2}])  # fmt: skip
    text = result_tables.budgets(tmp_path)
    assert (
        "| 18 GB | 2 recompute all and offload; 1 keep all; MLP in 4 chunks; embeddings on the host | 17.77 GB | 17.76 GB "
        "| 1,111 | 1,134 | 14,443 |"
    ) in text
    assert text.endswith(WHERE)


def test_context_names_the_longest_that_trained_and_the_next_that_did_not(tmp_path: Path) -> None:
    def row(system: str, tokens: int, status: str) -> dict[str, Any]:
        return {
            "budget": "24GB",
            "system": system,
            "tokens": tokens,
            "status": status,
            "peak_bytes": 23e9,
            "seconds": 150.0,
            "machine": MACHINE,
        }

    rows = [
        row("pronghorn", 2000, "trained"),
        row("unsloth-ckpt", 1000, "trained"),
        row("unsloth-ckpt", 3000, "killed"),
        row("unsloth-ckpt", 1500, "out of memory"),
    ]
    record.write(
        tmp_path / "context-llama-8b.json", {"longest": {"24GB": {"pronghorn": 2000, "unsloth-ckpt": 1000}}, "results": rows}
    )
    ours, theirs = result_tables.context(tmp_path).splitlines()[2:4]
    assert ours == "| 24 GB | Pronghorn | 2,000 | 23.0 GB | 150 s | none tried |"
    assert theirs.endswith("| 1,000 | 23.0 GB | 150 s | 1,500: out of memory |")


def test_quality_compares_as_the_verdicts_do(tmp_path: Path) -> None:
    runs = [{"form": form, "held_out": [[0, 1.4], [300, last]]} for form, last in (("fp32", 0.676), ("bf16", 0.6765))]
    verdict = {"form": "bf16", "against": "fp32", "difference": 0.0008, "allowed": 0.002, "holds": True}
    put(tmp_path, "quality-smollm2.json", runs, verdicts=[verdict])
    assert "| bf16 | 1.4000 | 0.6765 | float32 | +0.080 % | 0.2 % |" in result_tables.quality(tmp_path)


def test_methods_say_what_stopped_them(tmp_path: Path) -> None:
    put(tmp_path, "methods.json", [
        {"model": "llama-1b", "method": "full", "verdict": "failed", "said": "not enough disk space for this run"},
        {"model": "llama-1b", "method": "lora", "verdict": "trains"}])  # fmt: skip
    assert "| llama-1b | trains | stopped: disk too small |" in result_tables.methods(tmp_path)


def test_the_compile_matrix_names_kernels_that_spill(tmp_path: Path) -> None:
    chip = {"gpus": "A100", "shared": 163 * 1024, "date": "2026-11-16"}
    cells = {"a": {"sm_80": {"shared": 2048, "spilled": 0}}, "b": {"sm_80": {"shared": 4096, "spilled": 8}}, "c": {}}
    record.write(tmp_path / "compile-matrix.json", {"chips": {"sm_80": chip}, "kernels": cells, "command": "x"})
    assert "| sm_80 | A100 | 2 | 4 KB | 163 KB | `b` | 2026-11-16 |" in result_tables.compile_matrix(tmp_path)
