"""The end-of-run table and its advice: each rule speaks when it should and is silent when it should be."""

import dataclasses
import io
import json

import pytest
from rich.console import Console
from synthetic_run import RECIPE, synthetic_events

from pronghorn.report import summary as module
from pronghorn.report.run_stats import run_stats
from pronghorn.report.summary import advise, render, summary
from tables import table


@pytest.fixture(autouse=True)
def _a_machine_with_many_cores(monkeypatch):
    monkeypatch.setattr(module, "_cores", lambda: 64)


def run_with(stages=None, **changes):
    run = run_stats(synthetic_events(20))
    settings = {"step": 800, "stages": stages or {"step": 95.0, "load": 5.0}, "recipe": RECIPE} | changes
    return dataclasses.replace(run, **settings)


def shown(events, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(summary(events)))
    return console.file.getvalue()


@table(
    ("stages", "key", "word"),
    [
        ({"step": 94, "wait": 6}, "data.workers", "data.workers: 4 (now 2)"),
        ({"step": 84, "evaluate": 16}, "eval.every", "eval.every: 200 (now 100)"),
        ({"step": 94, "checkpoint": 6}, "checkpoint.every", "checkpoint.every: 200 (now 100)"),
        ({"step": 78, "optimizer": 22}, "train.batch_tokens", "131072"),
        ({"step": 75, "tokenize": 20, "read": 5}, "", "nothing to change"),
        ({"step": 50, "imports": 20, "load": 30}, "", "nothing to change"),
        ({"step": 85, "other": 15}, "", "what else runs"),
    ],
)
def test_each_stage_that_costs_too_much_gets_its_advice(stages, key, word):
    advice = advise(run_with(stages))
    assert advice.key == key
    assert word in advice.change
    assert advice.why


@table("stages", [{"step": 95, "wait": 5}, {"step": 86, "evaluate": 14}, {"step": 61, "load": 39}])
def test_below_the_threshold_there_is_nothing_to_fix(stages):
    advice = advise(run_with(stages))
    assert advice.change == f"nothing to fix: training took {stages['step']} % of the time"


def test_a_single_evaluation_is_not_to_be_made_rarer():
    assert advise(run_with({"step": 70, "evaluate": 30}, step=58)).key != "eval.every"


@table(
    ("cores", "workers", "change"),
    [
        (3, 2, "set data.workers: 3 (now 2)"),
        (16, 12, "set data.workers: 16 (now 12)"),
        (4, None, "set data.workers: 4 (now None)"),
        (1, 0, "set data.workers: 1 (now 0)"),
        (2, 2, "nothing to change"),
        (2, 8, "nothing to change"),
    ],
)
def test_no_more_workers_are_advised_than_there_are_cores(monkeypatch, cores, workers, change):
    monkeypatch.setattr(module, "_cores", lambda: cores)
    advice = advise(run_with({"step": 50, "wait": 50}, recipe=RECIPE | {"data": {"workers": workers}}))
    assert advice.change == change
    assert "training waited for data 50 % of the time" in advice.why


def test_the_larger_loss_of_time_comes_first():
    assert advise(run_with({"step": 60, "wait": 10, "evaluate": 30})).key == "eval.every"
    assert advise(run_with({"step": 50, "wait": 30, "evaluate": 20})).key == "data.workers"


def test_loose_packs_and_training_past_the_best_are_told():
    assert advise(run_with(efficiency=0.80)).key == "train.capacity"
    assert "80 % full" in advise(run_with(efficiency=0.80)).why
    assert advise(run_with(efficiency=0.96)).key == ""
    late = {"best_eval": 0.5, "best_eval_step": 400, "last_eval": 0.6, "last_eval_step": 800}
    assert advise(run_with(**late)).key == "eval.stop.patience"
    without_stop = dataclasses.replace(run_with(**late), recipe=RECIPE | {"eval": {"every": 100, "stop": None}})
    assert advise(without_stop).key == "eval.stop"
    assert advise(run_with(**late | {"last_eval": 0.505})).key == ""


def test_advice_with_a_recipe_that_says_nothing():
    run = dataclasses.replace(run_with({"step": 50, "wait": 50}), recipe={})
    assert advise(run).key == "data.workers"
    assert "raise eval.every" in advise(dataclasses.replace(run, stages={"evaluate": 1.0})).change


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
    assert "no suggestion yet" in shown([])
    assert "nan" in shown([{"event": "step", "time": 1.0, "session": 1, "step": 1, "loss": "nan", "tokens": 1, "seconds": 1}])


def test_metrics_stand_in_the_table_with_the_base_models():
    base = {"event": "base", "time": 1.0, "session": 1, "metrics": {"exact_match": 0.0}, "samples": 70}
    evaluation = {
        "event": "eval",
        "time": 1.0,
        "session": 1,
        "step": 60,
        "loss": 1.0,
        "metrics": {"exact_match": 0.93},
        "samples": 70,
    }
    text = shown([*synthetic_events(20), base, evaluation])
    assert "exact_match" in text
    assert "0 (base) → 0.93   best 0.93 at step 60, 70 rows" in text
    assert "(base)" not in shown([evaluation])


def test_one_evaluation_is_one_figure():
    events = [e for e in synthetic_events(50) if e["event"] != "eval" or e["step"] == 0]
    line = next(line for line in shown(events).splitlines() if line.startswith("evaluation"))
    assert "→" not in line
    assert line.count(".") <= 2  # loss and perplexity
    assert "at step 0" in line
