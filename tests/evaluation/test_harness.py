"""lm-evaluation-harness: said where it is not installed; where it is (a stand-in with its names), given our model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pronghorn.errors import CommandError, EnvironmentFault
from pronghorn.evaluation.harness import require_harness, run_tasks


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As lm-eval 0.4.13: TaskManager.match_tasks, HFLM, simple_evaluate and what it returns."""
    told = SimpleNamespace(included=None, model=None, given=None, fails=None)

    class TaskManager:
        def __init__(self, include_path: str | None = None) -> None:
            told.included = include_path

        def match_tasks(self, tasks: list[str]) -> list[str]:
            return [task for task in tasks if task in ("arc_easy", "sums")]

    class HFLM:
        def __init__(self, **given: Any) -> None:
            told.model = given

    def simple_evaluate(**given: Any) -> dict[str, Any]:
        if told.fails:
            raise told.fails
        told.given = given
        figures = {"alias": "sums", "acc,none": 0.8, "acc_stderr,none": "N/A", "exact,strict": 1, "sample_len": 5}
        return {"results": {"sums": figures}}

    names: dict[str, dict[str, Any]] = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.tasks": {"TaskManager": TaskManager},
        "lm_eval.models": {},
        "lm_eval.models.huggingface": {"HFLM": HFLM},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members, __spec__=importlib.util.spec_from_loader(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    return told


def test_without_it_the_command_to_install_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match="lm-evaluation-harness is not installed") as caught:
        require_harness(["arc_easy"])
    assert caught.value.fix.startswith("pip install")


def test_tasks_are_known_before_a_model_is_loaded(harness: SimpleNamespace, tmp_path: Path) -> None:
    require_harness(["arc_easy", "sums"], tmp_path)
    assert harness.included == str(tmp_path)
    for tasks in (["arc_easy", "ark_easy"], []):
        with pytest.raises(CommandError, match="lm-evaluation-harness has no task"):
            require_harness(tasks)
    with pytest.raises(CommandError, match="folder not found"):
        require_harness(["sums"], tmp_path / "gone")


def test_its_figures_come_back_by_its_own_names(harness: SimpleNamespace) -> None:
    table = require_harness(["sums"])
    found = run_tasks("model", "tokenizer", ["sums"], table, limit=5, chat=True, batch_size=4)
    assert found == {"sums": {"acc": 0.8, "exact,strict": 1.0}}
    assert harness.model == {"pretrained": "model", "tokenizer": "tokenizer", "batch_size": 4}
    assert (harness.given["limit"], harness.given["apply_chat_template"], harness.given["tasks"]) == (5, True, ["sums"])
    assert harness.given["task_manager"] is table


def test_a_hub_that_does_not_answer_is_no_bug(harness: SimpleNamespace) -> None:
    harness.fails = ConnectionError("Couldn't reach the hub\nlong story")
    with pytest.raises(EnvironmentFault, match="cannot read a task's data") as caught:
        run_tasks("model", "tokenizer", ["sums"], None, limit=None, chat=False, batch_size=4)
    assert caught.value.why == "Couldn't reach the hub"
