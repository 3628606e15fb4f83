"""What feeds a run may make its rows during it: the loop, checkpoints, health and reports ask the source, not a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from making import PROMPTS, BestAnswers
from watching import RecipeFor, Silent

import pronghorn.train.source as sources
from pronghorn.errors import CheckpointError, HealthStop
from pronghorn.report.html import write_html
from pronghorn.report.run_log import read_log
from pronghorn.train.checkpoint import resume
from pronghorn.train.checkpoint.checkpoint import latest_checkpoint
from pronghorn.train.loop import train
from pronghorn.train.setup.check import check_run
from pronghorn.train.step.step import EagerStep

STEPS = {"steps": 4, "batch_tokens": 512, "capacity": 256}


@pytest.fixture
def makes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sources, resume):
        monkeypatch.setattr(module, "kind_of", lambda recipe: BestAnswers)


@pytest.mark.usefixtures("makes_rows")
def test_a_run_on_rows_that_its_model_makes(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(train=STEPS, data={"eval": 0.2})
    told = check_run(recipe, report=lambda *_: None)
    assert (told.steps, told.documents, told.tokens, told.packs) == (4, 32, None, None)
    assert told.table().row_count > 4
    result = train(recipe, display=Silent())
    log = read_log(result.folder)
    assert [event["epoch"] for event in log if event["event"] == "step"] == pytest.approx(
        [PROMPTS * n / 32 for n in (1, 2, 3, 4)], abs=1e-6
    )
    assert [event["step"] for event in log if event["event"] == "eval"] == [4]
    newest = latest_checkpoint(result.folder)
    assert json.loads((newest / "manifest.json").read_text())["values"]["cursor"] == {"steps": 4}
    write_html(result.folder)


@pytest.mark.usefixtures("makes_rows")
def test_rows_that_were_made_are_named_and_another_sources_state_is_refused(
    recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_for(train=STEPS, data={"eval": 0.2}, checkpoint={"every": 1})
    real = EagerStep.finish
    counted = iter(range(10))

    def broken(step: EagerStep, *words: Any) -> Any:
        result = real(step, *words)
        return type(result)(float("nan"), result.grad_norm) if next(counted) == 2 else result

    with monkeypatch.context() as patched:
        patched.setattr(EagerStep, "finish", broken)
        with pytest.raises(HealthStop, match="step 3") as stopped:
            train(recipe, display=Silent())
    assert "an answer to" in (stopped.value.why or "")
    monkeypatch.undo()  # a table has no such state
    with pytest.raises(CheckpointError, match="does not describe a run"):
        train(recipe, display=Silent())


@pytest.mark.usefixtures("imported_python")
def test_kill_9_changes_nothing_of_rows_that_are_made(one_layer_model: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "kill_and_resume.py"
    words = [str(one_layer_model), str(tmp_path), "--kills", "2", "--steps", "6", "--source", "made"]
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(set(json.loads(done.stdout)["resumed_from"])) == 2
