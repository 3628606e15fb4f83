"""Whole sweeps of a tiny model: killed and resumed, with a rate that diverges, and with one that is better than it looks."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pronghorn.cli import main
from pronghorn.errors import CommandError, Interrupted, PronghornError
from pronghorn.model.lora import restore_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_file import parse_recipe
from pronghorn.report.run_log import history, read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.report.stages import Stages
from pronghorn.sweep import halving, judging
from pronghorn.sweep.grid import trials_of
from pronghorn.sweep.judging import far_off
from pronghorn.sweep.plan import Budget
from pronghorn.sweep.run import STATE, Sweep
from pronghorn.train.dist.world import World
from pronghorn.train.loop import ready, train
from pronghorn.train.run.answers import measure
from pronghorn.train.run.run_folder import RunFolder
from samples import chat_rows, make_lively_model, make_tokenizer, write_rows

RATES = "train.lr=3e-3,3e-2,1e-2"


class Shown:
    """A display that remembers progress, and does something at events."""

    def __init__(self, at: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.handle, self.amounts = at, list[tuple[int, int]]()

    def progress(self, label: str, done: int, total: int) -> None:
        if label == "sweep":
            self.amounts.append((done, total))


@pytest.fixture(autouse=True)
def _short_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of seconds: a first rung of 4 steps."""
    monkeypatch.setattr(halving, "FEWEST_STEPS", 4)


@pytest.fixture(scope="session")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lively")
    make_lively_model(num_hidden_layers=1).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def recipe_text(model: Path, folder: Path, steps: int = 12, every: int = 30, **train: Any) -> str:
    """JSON, which is YAML."""
    rows = write_rows(folder / "train.jsonl", chat_rows(400))
    held_out = write_rows(folder / "eval.jsonl", chat_rows(60, seed=1))
    values = {
        "model": str(model), "precision": "fp32", "lora": {"r": 4},
        "data": {"train": str(rows), "eval": str(held_out), "max_length": 128, "workers": 0},
        "train": {"steps": steps, "batch_tokens": 128, "capacity": 128, "lr": 1e-2, **train},
        "eval": {"every": steps, "generations": 0}, "checkpoint": {"every": every, "keep": 2}, "output": str(folder / "run"),
    }  # fmt: skip
    return json.dumps(values)


def sweep_of(text: str, *words: str, budget: str = "", display: Any = None) -> Sweep:
    folder, trials = trials_of(words, lambda given: parse_recipe(text, given), None)
    limit = Budget.of(budget, None) if budget else None
    return Sweep(folder, trials, display=display or Shown(), budget=limit)


def without_seconds(value: Any) -> Any:
    """What must be the same however often a sweep was killed."""
    if isinstance(value, dict):
        return {key: without_seconds(one) for key, one in value.items() if key not in ("seconds", "told")}
    return [without_seconds(one) for one in value] if isinstance(value, list) else value


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in history(read_log(run)) if event["event"] == "step"]


def test_the_winner_is_the_run_that_its_rate_has_alone(lively: Path, tmp_path: Path) -> None:
    """All trials run in one session; the one that is left is finished, with the recipe's own evaluation."""
    text, shown, began = recipe_text(lively, tmp_path), Shown(), time.perf_counter()
    table = sweep_of(text, RATES, display=shown).run()
    accounts = [run_stats(read_log(Path(row["folder"]))).seconds for row in table["trials"]]
    assert 0 < sum(accounts) < time.perf_counter() - began, "a trial's account has the time of its own steps alone"
    won = next(row for row in table["trials"] if row["trial"] == table["winner"])
    assert won["ended"] == "the winner; finished: 12 of 12 steps"
    assert [one["step"] for one in won["rungs"]] == [4, 12]
    others = [row for row in table["trials"] if row is not won]
    assert all(row["step"] == 4 and "rung 1: loss" in row["ended"] for row in others)
    assert won["tokens"] > 2 * others[0]["tokens"] == 2 * others[1]["tokens"] > 0
    alone = parse_recipe(text, [f"train.lr={won['keys']['train.lr']}", f"output={tmp_path / 'alone'}"])
    train(alone, display=Shown())
    assert losses(tmp_path / "alone") == losses(Path(won["folder"]))
    ends = [event for event in read_log(Path(won["folder"])) if event["event"] in ("end", "eval")]
    assert [event.get("reason") for event in ends] == ["paused", None, "done"]
    assert ends[1]["loss"] == pytest.approx(won["loss"], abs=1e-6)
    assert all(done < total for done, total in shown.amounts)
    assert len({total for _, total in shown.amounts}) == 1, "no trial ties, so the plan stays"
    assert (tmp_path / "run-sweep" / "sweep.html").read_text().count("trial-0") > 6


@pytest.mark.parametrize(("every", "stopped"), [(3, 6), (1, 2)], ids=["after its first rung", "before it"])
def test_a_rule_that_stops_runs_stops_the_winner_where_it_would_alone(
    lively: Path, tmp_path: Path, every: int, stopped: int
) -> None:
    """And a trial has the recipe of that run, whether it went on or not."""
    text, rule = recipe_text(lively, tmp_path), [f"eval.every={every}", "eval.stop={patience: 1, min_delta: 9}"]
    table = sweep_of(text, RATES, *rule).run()
    won = next(row for row in table["trials"] if row["trial"] == table["winner"])
    assert f"early stop after {stopped} of 12 steps: held-out loss improved by less than 9" in won["ended"]
    alone = parse_recipe(text, [f"train.lr={won['keys']['train.lr']}", f"output={tmp_path / 'alone'}", *rule])
    train(alone, display=Shown())
    one, other = (
        [(event["event"], event["step"], event["loss"]) for event in read_log(folder) if event["event"] in ("step", "eval")]
        for folder in (Path(won["folder"]), tmp_path / "alone")
    )
    assert one == other
    for row in table["trials"]:
        recipe = Recipe(**read_log(Path(row["folder"]))[0]["recipe"])
        assert set(alone.differences(recipe)) <= {"train.lr"}
        assert recipe.eval == alone.eval


def test_a_rate_that_only_looks_worse_before_its_decay_wins(lively: Path, tmp_path: Path) -> None:
    """At step 30 of 90, 3e-2 has the higher loss; after a decay, and in the end, the lower one."""
    text = recipe_text(lively, tmp_path, 90)
    sweep = sweep_of(text, "train.lr=1e-2,3e-2")
    table = sweep.run()
    assert table["winner"] == "trial-02"
    assert [row["rungs"][0]["step"] for row in table["trials"]] == [30, 30]
    session, undecayed = ready(sweep.trials[0].recipe, tmp_path / "none", Shown(), Stages(), (), World(), {}), []
    for row in table["trials"]:
        restore_adapter(session.model, Path(row["folder"]) / "checkpoint-30")
        undecayed.append(measure(session, Shown().progress).loss)
    assert undecayed[0] < undecayed[1]


def test_a_trial_that_diverges_ends_at_once(lively: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e30 breaks the numbers; the last trial is told to have diverged after its step 8."""
    eighth = list[float]()

    def last_at_step_8(losses: list[float]) -> str:
        eighth.extend(losses[7:8] if len(losses) == 8 else [])
        return "diverged at step 8: the loss rose to 9" if len(losses) == 8 and len(eighth) == 2 else ""

    monkeypatch.setattr(judging, "far_off", last_at_step_8)
    text = recipe_text(lively, tmp_path, 36, schedule="constant")
    table = sweep_of(text, "train.lr=1e30,3e-2,1e-1").run()
    broken, _, far = table["trials"]
    assert table["winner"] == "trial-02"
    assert broken["ended"].startswith("rung 1: diverged: step")
    assert "the loss rose to" in far["ended"]
    assert far["step"] == 8
    end = read_log(Path(far["folder"]))[-1]
    assert (end["reason"], end["step"]) == ("paused", 8)
    assert end["why"] in far["ended"]
    assert (broken["loss"], far["loss"]) == (None, None)
    assert json.loads(json.dumps(table, allow_nan=False)) == table


def test_losses_far_above_the_first_ones_have_diverged() -> None:
    assert not far_off([2.0, 1.9, 1.8, 1.7, 9.0, 1.6, 1.5, 1.4])  # a spike
    assert not far_off([0.2, 0.2, 0.2, 0.2, 0.5, 0.6, 0.5, 0.6])  # small losses of hard batches
    assert "step 8: the loss rose to 5, from 2" in far_off([2.0, 2.0, 2.0, 2.0, 5.0, 5.0, 5.0, 5.0])
    assert not far_off([9.0] * 3)


# What a sweep of three trials does one after the other, and how often it has done it since it began when it is killed.
INSTANTS = [
    ("setup", 1), ("step", 3), ("checkpoint", 1), ("decay", 1), ("before rung-1.json", 1), ("after rung-1.json", 1),
    ("before sweep.json", 1), ("after sweep.json", 2), ("step", 5), ("end", 1),
]  # fmt: skip


@pytest.mark.usefixtures("imported_python")
def test_kill_9_at_ten_instants_gives_the_same_table(lively: Path, tmp_path: Path) -> None:
    """One sweep, killed ten times in a row, and one that is left alone."""
    killed, alone = tmp_path / "killed", tmp_path / "alone"
    for folder in (killed, alone):
        folder.mkdir()
    text = recipe_text(lively, tmp_path, every=1)
    script = Path(__file__).parent / "killed_sweep.py"
    for what, count in [*INSTANTS, ("", 0)]:
        words = [str(script), str(killed / "run"), RATES, what, str(count)]
        done = subprocess.run([sys.executable, *words], input=text, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == (-signal.SIGKILL if what else 0), f"{what} {count}: {done.stderr[-2000:]}"
    table = json.loads((killed / "run-sweep" / STATE).read_text())
    whole = json.loads(json.dumps(sweep_of(text.replace("/run", "/alone/run"), RATES).run()))
    same = json.dumps(without_seconds(whole)).replace("/alone/", "/killed/")
    assert json.loads(same) == without_seconds(table)
    assert math.isfinite(table["trials"][0]["loss"])


def test_ctrl_c_saves_and_the_same_command_goes_on(lively: Path, tmp_path: Path) -> None:
    text, events = recipe_text(lively, tmp_path), list[dict[str, Any]]()

    class Stopped(Shown):
        def progress(self, label: str, done: int, total: int) -> None:
            super().progress(label, done, total)
            if len(self.amounts) == 6 and not events:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="trial-02"):
        sweep_of(text, RATES, display=Stopped(events.append)).run()
    assert [event["event"] for event in events] == ["stopping"]
    table = sweep_of(text, RATES).run()
    assert table["winner"]
    with pytest.raises(CommandError, match="another sweep: keys and recipe changed"):
        sweep_of(text, "train.lr=3e-3,3e-2").run()
    with RunFolder(tmp_path / "run-sweep"), pytest.raises(CommandError, match="another run uses") as refused:
        sweep_of(text, RATES).run()
    assert "another folder: -o FOLDER" in refused.value.fix
    with pytest.raises(CommandError, match="another sweep: budget changed"):
        sweep_of(text, RATES, budget="9runs").run()


def test_json_prints_one_object_that_another_optimizer_can_read(
    lively: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text(recipe_text(lively, tmp_path, 4))
    words = ["sweep", str(recipe), "train.lr=1e-3,1e-2", "--json", "-o", str(tmp_path / "s")]
    assert main([*words, "--budget", "1runs"]) == 2
    refused = json.loads(capsys.readouterr().out)
    assert refused["error"] == "CommandError"
    assert not (tmp_path / "s").exists()
    assert main([*words, "--budget", "9min"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    table = json.loads(line)
    assert table["rungs"]["shares"] == [1.0], "the time is enough for the whole grid"
    assert table["tokens"] == sum(row["tokens"] for row in table["trials"]) > 0
    assert {"trial", "keys", "tokens", "loss", "error", "seconds", "ended"} <= table["trials"][0].keys()
    assert main([word for word in words if word != "--json"] + ["--budget", "9min"]) == 0
    printed = capsys.readouterr().out
    assert "why it ended" in printed
    assert "the winner" in printed


def test_where_every_trial_diverged_there_is_a_table_too(
    lively: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text(recipe_text(lively, tmp_path, 4))
    words = ["sweep", str(recipe), "train.lr=1e30,1e31", "-o", str(tmp_path / "s")]
    assert main([*words, "--json"]) == 4
    printed = capsys.readouterr()
    (line,) = printed.out.splitlines()
    table = json.loads(line)
    assert ([row["loss"] for row in table["trials"]], table["winner"]) == ([None, None], None)
    assert "every trial diverged" in printed.err
    assert "every trial diverged" in (tmp_path / "s" / "sweep.html").read_text()
    assert main(words) == 4
    printed = capsys.readouterr()
    assert "rung 1: diverged" in " ".join(printed.out.split())
    assert "every trial diverged" in printed.err


def test_the_same_tokens_and_rows_for_trials_of_other_shapes(lively: Path, tmp_path: Path) -> None:
    """Two ranks of an adapter do not share a session; every rung begins where the one before ended."""
    table = sweep_of(recipe_text(lively, tmp_path), "lora.r=2,4", "train.lr=3e-3,1e-2").run()
    assert {row["rungs"][0]["tokens"] for row in table["trials"]} == {table["trials"][0]["rungs"][0]["tokens"]}
    assert table["rungs"]["trials"] == [4, 2]


def test_a_trial_that_cannot_run_is_refused_before_others_do(lively: Path, tmp_path: Path) -> None:
    text = recipe_text(lively, tmp_path)
    with pytest.raises(PronghornError, match="lm_head"):
        sweep_of(text, "lora.targets=all-linear,[q_proj,lm_head]").run()
    assert not (tmp_path / "run-sweep").exists()
