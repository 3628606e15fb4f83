"""The account of a run, against figures written by hand: facts from the log, estimates at the run's own speed."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pronghorn.report.account import Account, account
from pronghorn.report.html import render_page
from pronghorn.report.run_stats import run_stats
from pronghorn.report.runs import list_runs, runs_table
from pronghorn.report.summary import summary


def log(**changes: Any) -> list[dict[str, Any]]:
    """100 tokens a step, 0.5 s each but for the first; 40 steps planned, stopped at 8, ended after 10."""
    recipe = {"train": {"epochs": 2, "steps": changes.get("steps")}, "eval": {"best": "loss"}}
    data = {
        "tokens": 2000,
        "left_out": {"copies": [7, 500], "off_task (select.json)": [3, 250]},
        "select": {"file": "select.json", "scored_seconds": 1.5},
    }
    start = {"device": changes.get("device", "NVIDIA H200"), "ranks": 1, "recipe": recipe, "data": data, "planned": 40}
    events: list[dict[str, Any]] = [{"event": "start", "time": 0.0, "steps": 40, **start}]
    for step in range(1, 11):
        seconds = 9.0 if step == 1 else 0.5
        events.append(
            {"event": "step", "step": step, "tokens": 100, "seen_tokens": 100 * step, "seconds": seconds, "loss": 1.0}
        )
        if step == 8:
            paired = {"expected_gain": 0.002, "most_gain": 0.004}
            events.append({"event": "eval", "step": 8, "loss": 0.8, "loss_error": 0.01, "paired": paired})
            events.append({"event": "decay", "step": 8, "steps": 10})
    events.append({"event": "eval", "step": 10, "loss": 0.7, "loss_error": 0.02})
    events.append({"event": "stages", "total": 20.0, "seconds": {"step": 13.5, "evaluate": 2.0, "answers": 0.5, "load": 4.0}})
    events.append({"event": "end", "reason": changes.get("reason", "early stop"), "why": "enough", "step": 10})
    return [{"time": 1.0, "session": 1, **event} for event in events]


def books(**changes: Any) -> Account:
    events = log(**changes)
    found = account(run_stats(events), events)
    assert found is not None
    return found


def test_facts_are_the_logs_and_estimates_are_tokens_at_the_runs_own_speed() -> None:
    found = books()
    assert (found.metric, found.value, found.error, found.step, found.steps) == ("loss", 0.7, 0.02, 10, 40)
    assert (found.seconds, found.training, found.deciding) == (20.0, 13.5, {"evaluation": 2.5, "averaging": 0, "scoring": 1.5})
    assert found.tokens_per_second == 200  # without the first step
    assert [(one.by, one.what, one.count, one.tokens, one.seconds) for one in found.not_spent] == [
        ("rows", "copies", 7, 1000, 5.0),  # two epochs of 500 tokens
        ("rows", "off_task (select.json)", 3, 500, 2.5),
        ("stop", "enough", 30, 3000, 15.0),
    ]
    stop = found.not_spent[-1]
    assert (stop.expected_gain, stop.most_gain) == (pytest.approx(0.0025), pytest.approx(0.005))
    assert found.planned == 42.5


def test_what_was_not_saved_is_not_claimed() -> None:
    assert [one.by for one in books(steps=40).not_spent] == ["stop"]  # as many steps, whatever the rows
    cut = books(reason="signal").not_spent  # after a quarter, and it can still go on
    assert [(one.by, one.tokens) for one in cut] == [("rows", 250), ("rows", 125)]
    assert books(steps=40, reason="signal").planned is None
    assert account(run_stats([]), []) is None
    odd = [{**event, "data": {"left_out": [1], "select": 3}} if event["event"] == "start" else event for event in log()]
    assert [one.by for one in (account(run_stats(odd), odd) or books()).not_spent] == ["stop"]


def test_it_is_told_wherever_the_run_is_shown(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=400)
    console.print(summary(log()))
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    for text in (
        "early stop after 10 of 40 steps: enough",
        "held-out loss 0.7000 ± 0.0200 after 20 GPU seconds, 14 s of them training",
        "estimated at the run's own 200 tokens per second: planned 42 GPU seconds; 5.0 s on 7 rows left out: copies",
        "15 s by stopping 30 steps early (expected further gain 0.25 %, at most 0.50 %)",
        "2.5 s evaluation, 1.5 s scoring",
    ):
        assert text in shown
    page = render_page(log())
    assert "held-out loss 0.7000 ± 0.0200 after 20 GPU seconds" in page
    assert "of 40 planned" in page
    assert "would have" not in shown + page
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(event) + "\n" for event in log()))
    (info,) = list_runs(tmp_path)
    assert info.as_dict()["account"]["estimates"]["planned"] == 42.5
    table = Console(file=io.StringIO(), width=400)
    table.print(runs_table([info]))
    assert "10/40" in table.file.getvalue()  # type: ignore[attr-defined]
    assert "20 s of ~42 s" in table.file.getvalue()  # type: ignore[attr-defined]
    assert books(device="CPU (x86_64)").unit == "seconds"
