"""A run's figures, after resumes, in every state, and from logs that say little."""

import pytest
from synthetic_run import START, rewarded_events, synthetic_events

from pronghorn.report.run_stats import SILENT_AFTER, run_stats
from tables import table


def test_a_whole_run():
    run = run_stats(synthetic_events(300))
    assert (run.name, run.method, run.device, run.state) == ("hotel", "lora", "NVIDIA H200", "done")
    assert (run.step, run.steps, run.tokens) == (300, 300, 300 * 64_900)
    assert run.loss.first > 2.5
    assert 1 > run.loss.last >= run.loss.best
    assert run.evaluation.best <= run.evaluation.last < run.evaluation.first
    assert run.perplexity == pytest.approx(2.718281828**run.evaluation.best, rel=1e-6)
    assert 100_000 < run.tokens_per_second < 170_000
    assert run.seconds == pytest.approx(sum(run.stages.values()))
    assert run.share("step", "optimizer") + run.share(*(set(run.stages) - {"step", "optimizer"})) == pytest.approx(1)


def test_time_of_void_steps_counts_but_their_losses_do_not():
    events = synthetic_events(300, resume_at=250)
    for event in events:
        if event["event"] == "step" and event["session"] == 1 and event["step"] > 200:
            event["loss"] = 0.001
    run = run_stats(events)
    assert run.loss.best > 0.1
    assert [s.number for s in run.sessions] == [1, 2]
    assert [s.steps for s in run.sessions] == [250, 100]
    assert [s.resumed_from for s in run.sessions] == [None, 200]
    last = {e["session"]: e for e in events if e["event"] == "stages"}
    assert sum(run.stages.values()) == pytest.approx(last[1]["total"] + last[2]["total"])
    assert run.seconds > sum(run.stages.values())  # killed 50 steps after the last account
    assert run.seconds < 1000  # the 5,000 s between the sessions are not the run's


@table(
    ("reason", "state"), [("done", "done"), ("early stop", "early stop"), ("signal", "interrupted"), ("health", "health stop")]
)
def test_states_of_ended_runs(reason, state):
    assert run_stats(synthetic_events(20, end=reason)).state == state


def test_a_run_without_an_end_is_running_until_its_log_is_silent():
    events = synthetic_events(20, end=None)
    last = events[-1]["time"]
    assert run_stats(events, now=last + 1).state == "running"
    assert run_stats(events, now=last + SILENT_AFTER + 1).state == "cut off"
    resumed = [*synthetic_events(20), {"event": "start", "time": last, "session": 2, "resumed_from": 20, **START}]
    assert run_stats(resumed, now=last).state == "running"  # the end of an earlier session is not the run's


def measured(step, value, **more):
    metrics = {"match": value}
    return {"event": "eval", "time": 5.0, "session": 1, "step": step, "loss": 1.0, "metrics": metrics, "samples": 9, **more}


def test_metrics_of_answers_go_from_the_base_model_to_the_last_with_the_best_between():
    base = {"event": "base", "time": 4.0, "session": 1, "metrics": {"match": 0.1}, "samples": 9}
    run = run_stats([base, measured(1, 0.5), measured(2, 0.9), measured(3, "nan")], now=5.0)
    match = run.metrics["match"]
    assert (match.base, match.first, match.best, match.best_step, match.samples) == (0.1, 0.5, 0.9, 2, 9)
    assert match.last != match.last  # as it was measured
    assert (run.decides, run.best_step) == ("loss", 1)
    start = {"event": "start", "time": 1.0, "session": 1, "recipe": {"eval": {"best": "match"}}}
    assert run_stats([start, measured(1, 0.5), measured(2, 0.9), measured(3, 0.8)], now=5.0).best_step == 2
    of_rewards = {**base, "metrics": {"reward": 0.5}, "samples": 4}  # a run with eval.metrics has both
    assert run_stats([of_rewards, base, measured(1, 0.05)], now=5.0).metrics["match"].below_base
    both = {**measured(1, 0.5), "metrics": {"match": 0.5, "reward": 0.25}}
    assert {name: one.base for name, one in run_stats([of_rewards, base, both], now=5.0).metrics.items()} == {
        "match": 0.1,
        "reward": 0.5,
    }
    assert run_stats([measured(1, "nan")], now=5.0).metrics["match"].best is None
    assert run_stats(synthetic_events(20)).metrics == {}


def test_a_run_that_learns_from_rewards_has_no_loss_to_show():
    run = run_stats(rewarded_events([0.25, 0.75, 0.5], held_out=[0.5, 0.375]), now=9.0)
    assert (run.loss.first, run.evaluation.first, run.evaluation.best) == (None, None, None)
    assert (run.reward.first, run.reward.best, run.reward.last) == (0.25, 0.75, 0.5)
    best = {name: curve.best for name, curve in run.metrics.items()}
    assert best == {"reward": 0.5, "rewards/own/mean": 0.5, "reward_error": None, "completions/max_length": None}
    assert (run.metrics["reward"].below_base, run.metrics["rewards/own/mean"].below_base) == (True, False)
    nothing = [{key: value for key, value in e.items() if key != "reward"} for e in rewarded_events([0.0], held_out=[])]
    assert run_stats(nothing, now=9.0).loss.first is None
