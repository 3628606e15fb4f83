"""The end-of-run table."""

import io

import pytest
from rich.console import Console
from synthetic_run import rewarded_events, synthetic_events

from pronghorn.report.run_stats import run_stats
from pronghorn.report.summary import summary


def shown(events, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(summary(events))
    return console.file.getvalue()


def test_hours_money_and_waste_of_a_run():
    events = synthetic_events(300)
    for event in events:
        if event["event"] == "start":
            event["price"] = {"usd_an_hour": 36.0, "note": "a list price"}
    run = run_stats(events)
    assert run.gpu_hours == pytest.approx(run.seconds / 3600)
    assert run.money == pytest.approx(run.seconds / 100)
    assert run.wasted_share == pytest.approx(1 - run.share("step", "optimizer"))
    assert f"about {run.money:,.2f} USD" in shown(events)
    assert "USD" not in shown(synthetic_events(20))
    on_cpu = run_stats([e | ({"device": "cpu"} if e["event"] == "start" else {}) for e in events])
    assert on_cpu.gpu_hours == run_stats([]).gpu_hours == run_stats([]).wasted_share == 0


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


def test_a_run_that_learns_from_rewards_shows_those():
    lines = {" ".join(line.split()[:1]): " ".join(line.split()) for line in
             shown(rewarded_events([0.25, 0.75, 0.5], held_out=[0.5, 0.375]), width=160).splitlines()}  # fmt: skip
    assert lines.keys().isdisjoint({"loss", "evaluation"})
    assert lines["rollouts"] == "rollouts reward 0.2500 → 0.5000 best 0.7500 at step 2"
    assert "best 0.5 at step 1, below the base model, 4 rows, selects" in lines["reward"]
    assert lines["completions/max_length"] == "completions/max_length 9 (base) → 9 4 rows"
    assert "best" not in lines["reward_error"]
