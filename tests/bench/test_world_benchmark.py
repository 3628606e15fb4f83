"""benchmarks/world.py: one short run of it on a CPU."""

from __future__ import annotations

import pytest

from benchmarks.world import measure


def test_both_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
    row = measure("tiny", warmup=1, steps=2, blocks=1)
    assert (row["workload"], row["steps"]) == ("tiny", 2)
    assert row["cost_of_the_seam"] == pytest.approx(row["ms_per_step_through_ranks"] / row["ms_per_step"] - 1, abs=1e-3)
    assert [len(found) for found in row["blocks_ms"].values()] == [1, 1]
