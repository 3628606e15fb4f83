"""Every process must build the same documents, and they must look like what they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.bench.workloads import (
    DEFAULT_WORKLOADS,
    MODELS,
    SYSTEMS,
    WORKLOADS,
    DocumentTable,
    documents,
    instruction_lengths,
    pick,
)
from pronghorn.errors import CommandError
from tables import table


def test_lengths_are_those_of_instruction_data() -> None:
    lengths = instruction_lengths(100_000)
    assert abs(lengths.mean() - 207) < 5
    assert abs(np.median(lengths) - 166) < 3
    assert abs(np.quantile(lengths, 0.95) - 496) < 20


@table("name", ["tiny", "llama-1b", "llama-1b-8k", "llama-8b-32k"])
def test_documents_are_the_same_every_time_and_enough(name: str) -> None:
    workload = WORKLOADS[name]
    one, other = documents(workload, 3), documents(workload, 3)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert sum(len(row) for row in one) >= 5 * workload.tokens
    assert max(len(row) for row in one) <= workload.row
    assert max(int(row.max()) for row in one) < workload.config["vocab_size"]
    if workload.document:
        assert {len(row) for row in one} == {workload.document}


def test_lengths_can_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([40, 50]))
    assert {len(row) for row in documents(WORKLOADS["tiny"], 3, file)} == {40, 50}


def test_the_table_offers_every_token_to_the_loss() -> None:
    table = DocumentTable(documents(WORKLOADS["tiny"], 1))
    assert len(table) == len(table.lengths)
    assert np.array_equal(table.loss_counts, table.lengths - 1)
    assert table.loss(0).all()
    assert len(table.loss(0)) == len(table.ids(0)) == table.lengths[0]


def test_every_workload_names_known_models_and_systems() -> None:
    for workload in WORKLOADS.values():
        assert workload.model in MODELS
        assert set(workload.systems) <= set(SYSTEMS)
        assert workload.tokens % workload.row == 0  # a peer's packed rows make the step's tokens
    of_use = {name for name in MODELS if not name.startswith("tiny")} - {"llama-8b-long", "gemma3-1b"}  # context.py, methods.py
    assert {WORKLOADS[name].model for name in DEFAULT_WORKLOADS} == of_use
    assert {WORKLOADS[name].document for name in DEFAULT_WORKLOADS} == {0, 8192, 32768}


def test_what_is_in_fp8_says_what_the_peers_do() -> None:
    told = {name: workload.describe() for name, workload in WORKLOADS.items() if workload.fp8}
    assert told.keys() == {name for name in WORKLOADS if "-fp8" in name}
    assert told["llama-8b-fp8"].startswith("llama-8b, LoRA FP8 (others: LoRA bf16), short")
    assert told["qwen3-14b-fp8"].startswith("qwen3-14b, LoRA FP8 (others: QLoRA NF4), short")
    assert told["qwen3-14b-qlora-fp8"].startswith("qwen3-14b, QLoRA NF4 with FP8 products (others: QLoRA NF4), short")


def test_unknown_names_are_refused() -> None:
    assert pick("llama-1b, tiny", list(WORKLOADS), "workload") == ["llama-1b", "tiny"]
    with pytest.raises(CommandError, match="unknown workload llama-2b"):
        pick("llama-2b", list(WORKLOADS), "workload")
