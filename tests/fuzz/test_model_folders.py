"""A few of the mutations that `make fuzz` tries, so that the fuzzer itself keeps running."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.model_folders import fuzz
from fuzz.outcomes import BAD


def test_a_few_mutated_model_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRONGHORN_CACHE", str(tmp_path / "cache"))
    outcomes = fuzz(10, seed=3, folder=tmp_path)
    assert sum(outcomes.values()) == 10
    assert not any(outcomes[outcome] for outcome in BAD)
    assert outcomes["refused"]
    assert outcomes["same"]
