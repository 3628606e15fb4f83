import copy
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from synthetic_run import HARMS, rewarded_events, synthetic_events, write_run

from pronghorn.errors import CommandError, PronghornError
from pronghorn.report.runs import compare, comparison_table, list_runs, runs_table
from tables import table


def shown(renderable, width=160, *, terminal=True):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    console.print(renderable, crop=terminal)  # as the command line prints
    return console.file.getvalue()


def changed(events, **train):
    events = copy.deepcopy(events)
    for event in events:
        if event["event"] == "start":
            event["recipe"]["train"] |= train
    return events


def test_runs_are_found_newest_first_and_their_inside_is_not_searched(tmp_path):
    old = synthetic_events(20)
    new = [e | {"time": e["time"] + 99_999} for e in synthetic_events(30, end=None)]
    write_run(tmp_path / "old", old)
    write_run(tmp_path / "group" / "new", new)
    write_run(tmp_path / "old" / "checkpoint-10", old)
    write_run(tmp_path / ".hidden", old)
    runs = list_runs(tmp_path)
    assert [Path(run.folder).name for run in runs] == ["new", "old"]
    assert [(run.state, run.step, run.steps) for run in runs] == [("cut off", 30, 30), ("done", 20, 20)]
    assert json.loads(json.dumps(runs[0].as_dict(), allow_nan=False))["model"].endswith("SmolLM2-135M-Instruct")
    text = shown(runs_table(runs))
    assert "30/30" in text
    assert "SmolLM2-135M-Instruct" in text


def test_no_runs_and_no_folder(tmp_path):
    assert list_runs(tmp_path) == []
    assert "no runs" in shown(runs_table([]))
    with pytest.raises(CommandError, match="folder not found") as caught:
        list_runs(tmp_path / "nowhere")
    assert "--root" in caught.value.fix
    with pytest.raises(CommandError, match="at least two") as caught:
        compare([tmp_path])
    assert f"--root {tmp_path}" in caught.value.fix


def test_compare_tells_what_differs_and_the_loss_at_equal_tokens(tmp_path):
    a = write_run(tmp_path / "a", synthetic_events(300))
    b = write_run(tmp_path / "b", changed(synthetic_events(100), lr=1e-4))
    found = compare([a, b])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["differences"] == {"train.lr": [2e-4, 1e-4]}
    marks = found["loss_at_tokens"]
    assert [mark["tokens"] for mark in marks][-1] == 100 * 64_900  # what both have seen
    assert marks[-1]["losses"][0] > marks[-1]["losses"][1]  # the short run is at its end there, the long one at a third
    steps = [e for e in synthetic_events(100) if e["event"] == "step"][-5:]
    assert marks[-1]["losses"][1] == pytest.approx(sum(e["loss"] for e in steps) / 5)
    text = shown(comparison_table(found))
    assert "train.lr" in text
    assert "6.49 M" in text
    assert "best evaluation" in text


def test_runs_that_learn_from_rewards_are_compared_by_those(tmp_path):
    rewards = [{"metric": "exact_match", "function": None, "weight": 1.0}, {"function": "own", "weight": 0.5}]
    a = write_run(tmp_path / "a", rewarded_events([0.25] * 10, [0.5], {"rewards": rewards}))
    b = write_run(tmp_path / "b", rewarded_events([0.5] * 20, [0.75], {"rewards": rewards[:1]}))
    found = compare([a, b])
    assert found["loss_at_tokens"] == []
    assert found["reward_at_steps"][-1] == {"steps": 10, "rewards": [0.25, 0.5]}
    assert found["best_score"][1] == {"reward": 0.75, "rewards/own/mean": 0.5}
    text = shown(comparison_table(found))
    for part in (
        "mean reward of rollouts at equal steps",
        "best reward",
        "{metric: exact_match}, {function: own, weight: 0.5}]",
    ):
        assert part in text
    assert "best evaluation" not in text
    mixed = compare([a, write_run(tmp_path / "c", synthetic_events(20))])
    assert mixed["loss_at_tokens"] == mixed["reward_at_steps"] == []
    one, other = list_runs(tmp_path / "a")[0], list_runs(write_run(tmp_path / "d", rewarded_events([0.25], [])))[0]
    assert (one.last_loss, one.metric, one.score) == (None, "reward", 0.5)
    assert (other.metric, other.score) == ("reward of rollouts", 0.25)


def test_compare_of_equal_recipes_and_of_runs_without_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # short names: how the table breaks long ones is not the matter here
    a, b = write_run(Path("x/run"), synthetic_events(20)), write_run(Path("y/run"), synthetic_events(20)[:1])
    found = compare([a, b])
    assert found["loss_at_tokens"] == []
    assert found["best_eval"][1] is None
    text = shown(comparison_table(found))
    assert "the recipes are the same" in text
    assert "x/run" in text
    assert "y/run" in text


def test_evaluations_on_different_rows_are_not_compared_without_a_word(tmp_path):
    def run(name, **data):
        events = synthetic_events(50)
        for event in events:
            if event["event"] == "start":
                event["recipe"] = event["recipe"] | {"data": event["recipe"]["data"] | data}
        return write_run(tmp_path / name, events)

    one, fraction, rows, file_a, file_b = (
        run("one"),
        run("fraction", eval=0.1),
        run("rows", train=["other.jsonl"]),
        run("a", eval="e.jsonl"),
        run("b", eval="e.jsonl", train=["other.jsonl"]),
    )
    assert compare([one, one])["warnings"] == compare([file_a, file_b])["warnings"] == []
    for other, key in ((fraction, "data.eval"), (rows, "data.train"), (file_a, "data.eval")):
        (warning,) = compare([one, other])["warnings"]
        assert key in warning
        console = Console(file=io.StringIO(), width=200)
        console.print(comparison_table(compare([one, other])))
        assert "not comparable" in console.file.getvalue()


@table("harm", sorted(HARMS))
def test_one_bad_log_does_not_hide_the_other_runs(harm, tmp_path):
    good = write_run(tmp_path / "good", synthetic_events(20))
    (tmp_path / "bad").mkdir()
    HARMS[harm](tmp_path / "bad" / "run.jsonl")
    found = {Path(run.folder).name: run for run in list_runs(tmp_path)}
    assert found["good"].step == 20
    if harm != "a directory":  # then it is no run
        assert found["bad"].state == "unreadable"
        assert "bad/run.jsonl" in found["bad"].problem
    runs_table(list(found.values()))
    with pytest.raises(PronghornError):
        compare([good, tmp_path / "bad"])
