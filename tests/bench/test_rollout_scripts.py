"""Scripts in several systems: what a row says of one that fails, and of a peak that is not the planned one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks import rollouts


@pytest.mark.usefixtures("imported_python")
def test_a_system_that_fails_has_a_row_with_the_steps_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rollouts, "SYSTEMS", {"unsloth": rollouts.SYSTEMS["unsloth"]})
    (tmp_path / "unsloth.py").write_text(f"print('{rollouts.STEP}1.5')\nraise RuntimeError('no memory left')\n")
    (row,) = rollouts.scripts([f"unsloth={tmp_path}"], tmp_path, "tiny")
    assert (row["status"], row["why"]) == ("failed", "RuntimeError: no memory left")
    assert row["step_times"] == [1.5]
    assert "no memory left" in rollouts.wrong_in(row)


def test_a_peak_far_from_the_planned_one_is_wrong() -> None:
    row = {"what": "script", "system": "pronghorn", "seconds_per_step": 1.0, "planned_gib": 10.0}
    assert not rollouts.wrong_in(row | {"peak_gib": 9.1})
    assert "planned 10.00" in rollouts.wrong_in(row | {"peak_gib": 11.1})
    assert not rollouts.wrong_in(row | {"planned_gib": None, "peak_gib": 5.0})
