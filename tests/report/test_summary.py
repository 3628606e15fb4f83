"""The end-of-run table."""

import io
import json

import pytest
from rich.console import Console
from synthetic_run import synthetic_events

from pronghorn.report.summary import render, summary


def shown(events, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(summary(events)))
    return console.file.getvalue()


def test_the_summary_is_plain_json_and_adds_up():
    facts = summary(synthetic_events(300), price_per_hour=36.0)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["cost_most"] == "step"
    assert sum(facts["shares"].values()) == pytest.approx(1)
    assert facts["cost"]["money"] == pytest.approx(facts["seconds"] / 100)
    assert (
        summary([e | ({"device": "cpu"} if e["event"] == "start" else {}) for e in synthetic_events(20)])["cost"]["gpu_hours"]
        == 0
    )


def test_the_log_s_own_price_is_taken_where_none_is_given():
    events = synthetic_events(300)
    for event in events:
        if event["event"] == "start":
            event["price"] = {"usd_an_hour": 36.0, "note": "a list price"}
    facts = summary(events)
    assert facts["cost"]["money"] == pytest.approx(facts["seconds"] / 100)
    assert "USD" in shown(events)
    assert "USD" not in shown(synthetic_events(20))


def test_the_table_shows_what_matters_and_fits_80_columns():
    text = shown(synthetic_events(300, resume_at=250), width=80)
    for word in ("hotel", "finished: 300 of 300 steps", "best", "perplexity", "per second", "2 sessions",
                 "where the time went", "suggestion: ", "█"):  # fmt: skip
        assert word in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_that_ended_badly_says_why_and_odd_logs_render():
    events = synthetic_events(20, end="health")
    events[-1]["why"] = "loss is nan at [step] 20"
    assert "health stop after 20 of 20 steps: loss is nan at [step] 20" in shown(events)
    assert "suggestion: none yet" in shown([])
    assert "nan" in shown([{"event": "step", "time": 1.0, "session": 1, "step": 1, "loss": "nan", "tokens": 1, "seconds": 1}])
