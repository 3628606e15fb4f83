"""Losses that stand out: where the limit lies, and what a run does about a row of noise among clean ones."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from watching import RecipeFor, Silent

from pronghorn.errors import DataError, HealthStop, Interrupted
from pronghorn.recipe import Recipe
from pronghorn.report.run_log import history, read_log
from pronghorn.train.loop import train
from pronghorn.train.step import spikes
from pronghorn.train.step.spikes import MOST_IN_A_ROW, WINDOW, GaveUp, LeftOut, Spikes, losses_of
from samples import write_rows

# The limit --------------------------------------------------------------------------------------------------------------


def after(losses: list[float], policy: Any = "warn") -> Spikes:
    return Spikes(policy, enumerate(losses, start=1))


def test_a_spike_does_not_hide_the_next_one() -> None:
    noisy = after([0.3] * 63 + [12.6])
    assert noisy.limit(66) == pytest.approx(0.8)
    assert noisy.add(66, 12.6, noisy.limit(66), "runs/x")
    assert not noisy.add(67, 0.5, noisy.limit(67), "runs/x")


def test_noise_of_twenty_percent_is_no_spike_in_a_hundred_thousand_steps() -> None:
    random = np.random.default_rng(0)
    told = 0
    for _ in range(100):
        losses = np.exp(random.normal(0.5, 0.2, 1000))
        limit = after(losses[:WINDOW].tolist()).limit(WINDOW + 2)
        told += int((losses > limit).sum())
    assert told == 0


def test_the_first_steps_and_a_falling_loss_are_no_spikes() -> None:
    few = after([5.0] * 15)
    assert few.limit(100) == math.inf
    falling = Spikes("warn")
    for step in range(1, 200):
        loss = 0.3 + 5 * math.exp(-step / 20)
        assert not falling.add(step, loss, falling.limit(step), "runs/x")


def test_the_limit_knows_losses_up_to_two_steps_before() -> None:
    losses = [1.0] * 30 + [40.0] * 40
    assert after(losses[:50]).limit(52) == after(losses).limit(52) == after(losses[:51]).limit(52)
    stored = json.loads(json.dumps({"losses": after(losses).losses}))
    assert Spikes("warn", losses_of(stored)).limit(72) == after(losses).limit(72)


def test_a_level_that_stays_is_no_spike_for_long_and_skipping_gives_up() -> None:
    risen = after([1.0] * WINDOW)
    told = [risen.add(step, 9.0, risen.limit(step), "runs/x") for step in range(WINDOW + 1, 2 * WINDOW)]
    assert told[0]
    assert not told[-1]
    skipping = after([1.0] * WINDOW, "skip")
    for step in range(1, MOST_IN_A_ROW + 1):
        assert skipping.add(WINDOW + step, 9.0, 2.0, "runs/x")
    with pytest.raises(GaveUp, match="10 steps were skipped") as caught:
        skipping.add(WINDOW + MOST_IN_A_ROW + 1, 9.0, 2.0, "runs/x")
    assert (caught.value.exit_code, caught.value.where) == (4, "runs/x")


def test_a_checkpoint_is_gone_back_to_three_times() -> None:
    LeftOut((), (4, 4, 8, 8, 8)).require_one_more(4, 9, 7.0, "runs/x")
    with pytest.raises(GaveUp, match="again after 3 rewinds to checkpoint-8"):
        LeftOut((), (4, 4, 8, 8, 8)).require_one_more(8, 9, 7.0, "runs/x")


# Runs -------------------------------------------------------------------------------------------------------------------


class Watching(Silent):
    def __init__(self, look: Callable[[dict[str, Any]], None] = lambda event: None) -> None:
        super().__init__()
        self.look = look

    def handle(self, event: dict[str, Any]) -> None:
        self.look(event)


SPIKE = 11  # the step that has the row of noise, with this seed


@pytest.fixture
def noisy(recipe_for: RecipeFor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecipeFor:
    """Sixty rows that are learnt in ten steps, and one of noise; the statistics of six steps."""
    monkeypatch.setattr(spikes, "WINDOW", 6)
    monkeypatch.setattr(spikes, "LEAST", 5)
    noise = "".join(chr(int(letter)) for letter in np.random.default_rng(5).integers(33, 127, 110))
    talks = [(f"say {n % 3}", "yes yes yes yes") for n in range(60)]
    talks.insert(17, ("x", noise))
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in talks]
    data = write_rows(tmp_path / "noisy.jsonl", rows)

    def build(policy: str, name: str = "run") -> Recipe:
        return recipe_for(
            method="full",
            health={"spike": policy},
            checkpoint={"every": 3, "keep": 9},
            output=str(tmp_path / name),
            data={"train": [str(data)], "eval": None, "max_length": 192},
            train={"steps": 13, "batch_tokens": 256, "lr": 3e-2, "schedule": "constant", "seed": 5},
        )

    return build


def weights(run: Path) -> bytes:
    return (run / "checkpoint-13" / "model.safetensors").read_bytes()


def said(run: Path) -> list[str]:
    return [event["text"] for event in read_log(run) if event["event"] in ("notice", "rewind")]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in history(read_log(run)) if event["event"] == "step"}


def test_warn_says_which_rows_and_goes_on(noisy: RecipeFor) -> None:
    run = train(noisy("warn"), display=Watching()).folder
    [text] = [text for text in said(run) if "loss spike" in text]
    assert text.startswith(f"step {SPIKE}: loss spike: ")
    assert text.endswith("noisy.jsonl:18")
    assert losses(run)[SPIKE] > 3 * losses(run)[SPIKE - 1]


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_run_with_a_spike_that_is_stopped_ends_with_the_same_bits(policy: str, noisy: RecipeFor, tmp_path: Path) -> None:
    """Before the spike and after it, and, where it goes back, killed as soon as it has said so."""
    whole = train(noisy(policy, "whole"), display=Watching()).folder
    assert losses(whole)[13] < losses(whole)[SPIKE - 1] * 1.5
    text = next(text for text in said(whole) if "loss spike" in text)
    assert ("the update is skipped" if policy == "skip" else "rewinding to checkpoint-9") in text
    assert (SPIKE in losses(whole)) == (policy == "skip")
    seen: set[Any] = set()

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "rewind":
            raise RuntimeError("killed")
        if event["event"] == "step" and event["step"] in (SPIKE - 1, SPIKE + 1) and event["step"] not in seen:
            seen.add(event["step"])
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = noisy(policy, "parts")
    ends: list[str] = []
    while len(ends) < 6:
        try:
            train(recipe, display=Watching(stop))
            break
        except (Interrupted, RuntimeError) as error:
            ends.append(type(error).__name__)
    assert sorted(ends) == ["Interrupted"] * 2 + ["RuntimeError"] * (policy == "rewind")
    assert weights(tmp_path / "parts") == weights(whole)
    assert losses(tmp_path / "parts") == losses(whole)


def test_a_rewind_that_does_not_help_ends_the_run(noisy: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spikes, "MOST_REWINDS", 0)
    recipe = noisy("rewind")
    with pytest.raises(HealthStop, match="again after 0 rewinds to checkpoint-9") as caught:
        train(recipe, display=Watching())
    assert "--allow-change train.lr" in caught.value.fix
    run = Path(recipe.output)
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert read_log(run)[-1]["reason"] == "health"


def test_a_log_that_cannot_be_read_is_told_before_the_run_begins(recipe_for: RecipeFor) -> None:
    recipe = recipe_for()
    Path(recipe.output).mkdir()
    (Path(recipe.output) / "run.jsonl").write_text('[]\n{"event":"end"}\n')
    with pytest.raises(DataError, match="invalid line"):
        train(recipe, display=Watching())
