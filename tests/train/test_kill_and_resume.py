"""The promise that nothing is lost, at two random instants for each way of loading (the script takes any number)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("objective", ["supervised", "dpo"])
@pytest.mark.usefixtures("imported_python")
def test_kill_9_at_any_instant_changes_nothing(objective: str, one_layer_model: Path, tmp_path: Path) -> None:
    """One process: what it imports and the run that is not killed serve both ways of loading, whose weights are the same."""
    script = Path(__file__).parent / "kill_and_resume.py"
    kills = 3 if objective == "supervised" else 2
    words = [str(one_layer_model), str(tmp_path), "--kills", str(kills), "--workers", "0,2", "--steps", str(3 * kills)]
    words += ["--objective", objective]
    words += ["--stops"] if objective == "supervised" else []
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["kills"] == kills
    assert len(set(result["resumed_from"])) >= 2  # the instants really were spread over the run


@pytest.mark.usefixtures("_no_gpu", "imported_python")
def test_kill_9_of_one_of_two_ranks_changes_nothing(one_layer_model: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "kill_ranks.py"
    words = [str(one_layer_model), str(tmp_path), "--instants", "2", "--steps", "6", "world.shard=base"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert any(rank >= 0 for rank in result["killed"])  # else the machine was so busy that both runs ended before
    assert result["apart"] == [0.0, 0.0]
