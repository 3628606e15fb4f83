"""Every process must build the same documents, and they must look like what they stand for."""

from __future__ import annotations

import numpy as np

from benchmarks.bench.workloads import WORKLOADS, documents, instruction_lengths
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
