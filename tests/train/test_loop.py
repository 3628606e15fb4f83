"""Whole runs on a tiny real model: they learn, resume bit for bit, stop for the right reasons and account for their time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from watching import RecipeFor, Silent, losses_of, notices_of, same, stop_at, weights

from fake_nvml import Cuda, FakeNvml
from pronghorn.errors import CheckpointError, EnvironmentFault, HealthStop, Interrupted, RecipeError
from pronghorn.report import gpu_watch
from pronghorn.report.account import account
from pronghorn.report.gpu_log import GpuLog
from pronghorn.report.run_log import history, read_log
from pronghorn.report.run_stats import run_stats
from pronghorn.report.stages import Stages
from pronghorn.train import loop
from pronghorn.train.checkpoint.checkpoint import LEAST_MARGIN
from pronghorn.train.loop import train
from pronghorn.train.objectives import Supervised
from pronghorn.train.objectives.objective import Sums
from pronghorn.train.run import answers, run_folder
from pronghorn.train.setup import setup
from pronghorn.train.source import source_of

SHORT = {"steps": 2}  # for what happens after a run, whatever it learned


def test_a_run_learns_and_leaves_everything_behind(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(train={"epochs": 6, "lr": 1e-2}, method="full")
    pages: list[str] = []
    display = Silent(lambda step: pages.append((Path(recipe.output) / "report.html").read_text(encoding="utf-8")))
    result = train(recipe, display=display, stages=Stages())
    assert result.reason == "done"
    assert "running: step " in pages[0]  # there is something to look at from the first step on
    assert "running: step " not in (result.folder / "report.html").read_text(encoding="utf-8")
    events = history(read_log(result.folder))
    steps = [e for e in events if e["event"] == "step"]
    first = next(i for i, event in enumerate(display.events) if event["event"] == "step")
    assert [label for label, before in display.progresses if before <= first][-1] == "first step"  # told what one waits for
    assert [e["step"] for e in steps] == list(range(1, result.step + 1))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert all(e["grad_norm"] > 0 for e in steps)
    assert steps[-1]["seen_tokens"] == sum(e["tokens"] for e in steps)
    evals = [e for e in events if e["event"] == "eval"]
    assert evals[-1]["step"] == result.step
    assert evals[-1]["generations"][0]["expected"]
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert (result.folder / "report.html").stat().st_size > 1000
    assert (result.checkpoint / "config.json").is_file()
    end = events[-1]
    assert (end["event"], end["reason"], end["exit_code"]) == ("end", "done", 0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "full", "train": {"steps": 4, "lr": 1e-3, "optimizer": "adamw_8bit"}},
        {"lora": {"r": 4, "dropout": 0.3, "dora": True, "plus_ratio": 4.0}},
        {"data": {"workers": 2}, "train": {"steps": 5, "batch_tokens": 65536, "batch_rows": 9}},
        {"method": "qlora", "compute": "fp8", "precision": "bf16"},
    ],
    ids=["lora", "full, moments in 8 bits", "dropout and dora", "workers and rows", "qlora in fp8"],
)
def test_a_run_stopped_at_any_step_ends_with_the_same_weights(
    recipe_for: RecipeFor, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The kinds differ in what is put back, not in where a run stops: one of them stops everywhere, the others once."""
    stops = (2,) if changes else (1, 4, 6)  # 4 is an evaluation step, 6 a checkpoint step, and an epoch has 5
    changes = {"train": {"steps": 4 if changes else 7}} | changes
    whole = train(recipe_for(**changes, output=str(tmp_path / "whole")), display=Silent())
    recipe = recipe_for(**changes, output=str(tmp_path / "parts"))

    for expected in stops:
        with pytest.raises(Interrupted) as caught:
            train(recipe, display=stop_at(*stops))
        assert caught.value.exit_code == 143
        assert (tmp_path / "parts" / f"checkpoint-{expected}").is_dir()
    parts = train(recipe, display=Silent())
    assert parts.step == whole.step > stops[-1]
    for file in ("training_state.safetensors", next(whole.checkpoint.glob("*model.safetensors")).name):
        assert (whole.checkpoint / file).read_bytes() == (parts.checkpoint / file).read_bytes()
    assert losses_of(parts.folder) == losses_of(whole.folder)


def test_a_run_keeps_a_log_of_its_gpu_and_goes_on_in_it_when_it_is_resumed(
    recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "cuda", Cuda())
    monkeypatch.setattr(gpu_watch, "CDLL", lambda _: FakeNvml())
    with pytest.raises(Interrupted):
        train(recipe_for(train={"steps": 3}), display=stop_at(2))
    result = train(recipe_for(train={"steps": 3}), display=Silent())
    lines = [json.loads(line) for line in (result.folder / "gpu.jsonl").read_text().splitlines()]
    assert {line["session"] for line in lines} == {1, 2}
    assert len(lines) >= 4  # the first and the last of each session
    assert GpuLog.of(result.folder).joules == 500 * (len(lines) - 2)
    assert "<h3>GPU power, W</h3>" in (result.folder / "report.html").read_text(encoding="utf-8")


def test_a_finished_run_is_not_run_again_nor_touched_by_what_is_refused(recipe_for: RecipeFor) -> None:
    first = train(recipe_for(train=SHORT), display=Silent())
    for change in ({}, {"checkpoint": {"every": 50}, "data": {"workers": 3}}):  # what does not touch the numbers may change
        display = Silent()
        again = train(recipe_for(train=SHORT, **change), display=display)
        assert (again.step, again.checkpoint) == (first.step, first.checkpoint)
        assert not [e for e in display.events if e["event"] == "step"]
    with pytest.raises(RecipeError, match=r"memory\.budget"):
        train(recipe_for(train=SHORT, memory={"budget": "1MB"}), display=Silent(), fresh=True)
    assert first.checkpoint.is_dir()
    assert not list(first.folder.parent.glob("*.old-*"))


def test_a_changed_recipe_is_refused_on_resume(recipe_for: RecipeFor) -> None:
    """With --fresh the run starts over beside the old one."""
    first = train(recipe_for(train=SHORT), display=Silent())
    changes: list[dict[str, Any]] = [{"train": SHORT | {"lr": 5e-3}}, {"lora": {"r": 8}}, {"data": {"max_length": 100}}]
    for change in changes:
        with pytest.raises(CheckpointError, match="recipe changed") as caught:
            train(recipe_for(**({"train": SHORT} | change)), display=Silent())
        assert "--fresh" in caught.value.fix
    display = Silent()
    train(recipe_for(**changes[0]), display=display, fresh=True)
    assert (first.folder.with_name("run.old-1") / "run.jsonl").is_file()
    assert next(e["step"] for e in display.events if e["event"] == "step") == 1


def test_early_stopping_says_why(recipe_for: RecipeFor) -> None:
    stop = {"patience": 2, "min_delta": 0.5}
    recipe = recipe_for(train={"epochs": 20, "lr": 1e-6}, eval={"every": 2, "generations": 0, "stop": stop})
    result = train(recipe, display=Silent())
    assert result.reason == "early stop"
    assert "improved by less than 0.5 in 2 evaluations" in result.why
    assert result.step == 6  # the first evaluation sets the mark, two more bring nothing
    end = read_log(result.folder)[-1]
    assert end["why"] == result.why
    again = train(recipe, display=Silent())  # the decision is part of the checkpoint
    assert (again.reason, again.step) == ("early stop", 6)


@pytest.mark.parametrize(
    ("stop", "why"),
    [
        ({"every": 2, "stop": {"patience": 1, "min_delta": 0.5}}, "improved by less than 0.5 in 1 evaluation"),
        ({"every": 1, "stop": {"gain": 0.5}}, "with a probability of 0.9 by less than"),  # a trend needs four evaluations
    ],
    ids=["patience", "gain"],
)
def test_an_early_stop_of_a_constant_rate_begins_the_decay(
    stop: dict[str, Any], why: str, recipe_for: RecipeFor, tmp_path: Path
) -> None:
    """The run ends as one that was planned for its steps, wherever it was stopped in between."""
    train_on = {"steps": 20, "lr": 1e-3, "schedule": "wsd", "decay": 0.34, "warmup": 0.0}
    stop = {"generations": 0, **stop}

    def run(name: str, display: Silent, **changes: Any) -> Any:
        chosen = {"train": train_on, "eval": stop, "output": str(tmp_path / name), **changes}
        return train(recipe_for(**chosen), display=display)

    planned = run("planned", Silent(), train=train_on | {"steps": 7}, eval=stop | {"stop": None})
    whole = run("whole", Silent())
    assert (planned.reason, whole.reason, whole.step) == ("done", "early stop", planned.step)
    assert why in whole.why
    assert "decayed from step 4 on" in whole.why
    assert same(weights(whole.checkpoint), weights(planned.checkpoint))
    for step in (2, 4, 6):  # the verdict comes after step 4, and is in its checkpoint
        with pytest.raises(Interrupted):
            run("parts", stop_at(step))
    parts = run("parts", Silent())
    assert (parts.step, parts.why) == (whole.step, whole.why)
    assert same(weights(parts.checkpoint), weights(whole.checkpoint))
    assert losses_of(parts.folder) == losses_of(whole.folder)
    again = run("parts", Silent())
    assert (again.reason, again.why, again.checkpoint) == ("early stop", whole.why, parts.checkpoint)
    (event,) = [event for event in history(read_log(parts.folder)) if event["event"] == "decay"]
    assert (event["step"], event["steps"]) == (4, 7)
    stats = run_stats(events := read_log(parts.folder))
    assert (stats.step, stats.steps, stats.planned) == (7, 7, 20)
    books = account(stats, events)
    assert books is not None
    assert [(one.by, one.count, one.what) for one in books.not_spent] == [("stop", 13, whole.why)]
    assert books.error is not None
    assert books.error > 0


def test_a_longer_run_goes_on_from_before_the_decay_and_ends_as_one_that_was_planned_so(
    recipe_for: RecipeFor, tmp_path: Path
) -> None:
    """Whether the decay began as planned or by an early stop, and wherever the longer run is killed."""
    base = {"schedule": "wsd", "decay": 0.34, "warmup": 2, "lr": 1e-3}
    evaluated = {"every": 100, "generations": 0}
    keep = {"every": 100, "keep": 1}

    def run(name: str, train_on: dict[str, Any], display: Silent | None = None, **changes: Any) -> Any:
        output = str(tmp_path / name)
        recipe = recipe_for(train=base | train_on, checkpoint=keep, output=output, **{"eval": evaluated, **changes})
        return train(recipe, display=display or Silent())

    whole = run("whole", {"epochs": 3, "steps": None})
    short = run("parts", {"epochs": 1, "steps": None})
    stable = [path for path in short.folder.glob("checkpoint-*") if path != short.checkpoint]
    (start,) = [int(path.name.split("-")[1]) for path in stable]  # kept, though one is to be kept
    assert start < short.step < whole.step
    with pytest.raises(Interrupted):
        run("parts", {"epochs": 3, "steps": None}, stop_at(start + 1))
    aside = short.checkpoint.with_name(f"{short.checkpoint.name}.decayed")
    assert aside.is_dir()
    parts = run("parts", {"epochs": 3, "steps": None})
    assert (parts.reason, parts.step) == ("done", whole.step)
    for file in ("training_state.safetensors", "adapter_model.safetensors"):
        assert (whole.checkpoint / file).read_bytes() == (parts.checkpoint / file).read_bytes()
    assert losses_of(parts.folder) == losses_of(whole.folder)
    assert (parts.folder / "rows.jsonl").read_bytes() == (whole.folder / "rows.jsonl").read_bytes()
    told = notices_of(parts.folder)
    assert any(f"the run goes on from checkpoint-{start}, where its rate was constant" in text for text in told)
    assert any(f"renamed to {aside.name}" in text for text in told)

    stops = {"eval": evaluated | {"every": 2, "stop": {"patience": 1, "min_delta": 9.0}}}  # after step 4
    stopped = run("stopped", {"steps": 12}, **stops)
    assert (stopped.reason, stopped.step) == ("early stop", 7)
    with pytest.raises(CheckpointError, match=r"eval\.stop ended this run after step 4, and would again"):
        run("stopped", {"steps": 15}, **stops)
    assert run("stopped", {"steps": 12}, **stops).step == 7  # as it was
    freed = run("stopped", {"steps": 12})
    assert (freed.reason, freed.step) == ("done", 12)
    assert any("eval.stop is taken away: the run goes on from checkpoint-4" in text for text in notices_of(freed.folder))
    freed = run("stopped", {"steps": 15})
    assert (freed.reason, freed.step) == ("done", 15)
    planned = run("planned", {"steps": 15})
    assert same(weights(freed.checkpoint), weights(planned.checkpoint))


@pytest.mark.parametrize(
    ("schedule", "warmup", "said"),
    [
        ("wsd", 0.5, "is inside the warm-up of a run of 40 steps, which has 20"),
        ("wsd", 0.1, ""),
        ("constant", 0.1, ""),
        ("cosine", 0.1, "recipe changed"),
    ],
)
def test_a_longer_run_of_another_warm_up_is_told_or_refused(
    schedule: str, warmup: float, said: str, recipe_for: RecipeFor
) -> None:
    changes: dict[str, Any] = {"schedule": schedule, "warmup": warmup, "lr": 1e-4}
    train(recipe_for(train=changes | {"steps": 8}, eval={"every": 100, "generations": 0}), display=Silent())
    longer = recipe_for(train=changes | {"steps": 40 if said else 11}, eval={"every": 100, "generations": 0})
    if said:
        with pytest.raises(CheckpointError, match=said):
            train(longer, display=Silent())
        return
    result = train(longer, display=Silent())
    assert result.step == 11
    assert "the warm-up was 1 step; a run planned for 11 steps has 2 (train.warmup: 0.1)" in notices_of(result.folder)


def test_the_best_checkpoint_is_kept(recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 2.5])
    real = answers.evaluate
    monkeypatch.setattr(answers, "evaluate", lambda *a, **k: type(real(*a, **k))(loss=next(losses), tokens=1))
    recipe = recipe_for(train={"steps": 8}, eval={"every": 2, "generations": 0}, checkpoint={"every": 2, "keep": 1})
    result = train(recipe, display=Silent())
    assert result.best_step == 4
    assert sorted(p.name for p in result.folder.glob("checkpoint-*")) == sorted({"checkpoint-4", f"checkpoint-{result.step}"})


def test_evaluations_and_checkpoints_may_come_at_shares_of_the_run(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(train={"steps": 6}, eval={"every": 0.5, "generations": 0}, checkpoint={"every": 0.34, "keep": 9})
    result = train(recipe, display=Silent())
    evaluated = [event["step"] for event in read_log(result.folder) if event["event"] == "eval"]
    assert evaluated == [3, 6]
    saved = {int(path.name.split("-")[1]) for path in result.folder.glob("checkpoint-*")}
    assert saved == {3, 6}  # a third of six steps, rounded up


def broken_at(number: int, monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    """The two micro-batches of the step after so many; not their rows, when each is looked at alone."""
    real, calls = Supervised.sums, [0]

    def losses(self: Supervised, model: Any, batch: Any) -> Sums:
        calls[0] += model.training and torch.is_grad_enabled()
        found = real(self, model, batch)
        return found._replace(loss=found.loss * (value if calls[0] in (number + 1, number + 2) else 1.0))

    monkeypatch.setattr(Supervised, "sums", losses)


def test_a_non_finite_loss_never_reaches_the_weights(recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"checkpoint": {"every": 100}, "train": {"steps": 6}}
    recipe = recipe_for(**changes)
    with monkeypatch.context() as broken:
        broken_at(6, broken, float("nan"))  # two micro-batches a step: the fourth step
        with pytest.raises(HealthStop, match="step 4: the loss is not finite") as caught:
            train(recipe, display=Silent())
    assert "train.jsonl:" in caught.value.why
    kept = Path(recipe.output) / "checkpoint-3"
    assert all(torch.isfinite(tensor).all() for tensor in weights(kept).values())
    assert read_log(Path(recipe.output))[-1]["reason"] == "health"
    healed = train(recipe, display=Silent())
    whole = train(recipe_for(**changes, output=recipe.output + "-whole"), display=Silent())
    assert same(weights(healed.checkpoint), weights(whole.checkpoint))


def test_zero_gradients_stop_the_run(recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_at(0, monkeypatch, 0.0)
    with pytest.raises(HealthStop, match="all gradients are zero"):
        train(recipe_for(), display=Silent())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory": {"budget": "1MB"}}, "memory.budget"),
        ({"data": {"eval": None}, "eval": {"stop": {"patience": 1}}}, "eval.stop needs held-out data"),
    ],
)
def test_what_would_be_ignored_is_refused(recipe_for: RecipeFor, change: dict[str, Any], said: str) -> None:
    recipe = recipe_for(**change)
    with pytest.raises(RecipeError, match=said):
        train(recipe, display=Silent())
    assert not Path(recipe.output).exists()


def test_the_number_of_steps_is_exact(recipe_for: RecipeFor) -> None:
    from contextlib import nullcontext

    from pronghorn.data.encode.tokens import load_tokenizer

    recipe = recipe_for(train={"epochs": 2}, data={"eval": None})
    data = source_of(recipe, load_tokenizer(recipe.model, None), report=lambda *a: None, stage=lambda _: nullcontext())
    result = train(recipe, display=Silent())
    last = [e for e in read_log(result.folder) if e["event"] == "step"][-1]
    assert (last["step"], last["epoch"]) == (data.total, 2.0)
    manifest = json.loads((result.folder / f"checkpoint-{result.step}" / "manifest.json").read_text())
    assert manifest["values"]["cursor"] == {"epoch": 2, "pack": 0}


def test_with_so_many_rows_in_a_step_losses_and_steps_do_not_depend_on_capacity(recipe_for: RecipeFor, tmp_path: Path) -> None:
    found = []
    for capacity in (128, 1024):
        size = {"batch_tokens": 65536, "batch_rows": 16, "capacity": capacity, "epochs": 2}
        result = train(recipe_for(train=size, output=str(tmp_path / str(capacity))), display=Silent())
        found.append([event for event in read_log(result.folder) if event["event"] == "step"])
    one, *others = found
    assert len(one) == 6  # 40 rows: 16, 16 and 8, twice
    for other in others:
        for key in ("step", "tokens", "loss_tokens", "lr"):
            assert [event[key] for event in other] == [event[key] for event in one]
        assert [event["loss"] for event in other] == pytest.approx([event["loss"] for event in one], rel=1e-5)


@pytest.mark.parametrize(("method", "precision"), [("lora", "fp32"), ("lora", "fp16"), ("qlora", "bf16"), ("full", "bf16")])
def test_fast_and_own_layers_give_the_same_run(recipe_for: RecipeFor, tmp_path: Path, method: str, precision: str) -> None:
    curves = {}
    for layers in ("fast", "own"):
        recipe = recipe_for(
            method=method,
            precision=precision,
            layers=layers,
            data={"eval": None},
            train={"steps": 4, "batch_tokens": 256, "lr": 5e-3},
            output=str(tmp_path / layers),
        )
        steps = [e for e in read_log(train(recipe, display=Silent()).folder) if e["event"] == "step"]
        curves[layers] = [(e["loss"], e["grad_norm"]) for e in steps]
    assert len(curves["fast"]) == 4
    # Seen at most: 1e-7 in fp32; 6e-3 for a gradient norm in bf16, where the loss differs by 2e-5.
    assert curves["fast"] == [pytest.approx(pair, rel=1e-5 if precision == "fp32" else 2e-2) for pair in curves["own"]]


def test_a_disk_that_no_checkpoint_would_fit_on_is_refused_before_the_first_step(
    recipe_for: RecipeFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint keeps a margin free; a run that leaves less would train up to its first one. Weights were not read yet."""
    room = SimpleNamespace(total=10**9, used=10**9 - LEAST_MARGIN, free=LEAST_MARGIN)
    monkeypatch.setattr(setup, "load_model", None)
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda _: room)
    recipe, display = recipe_for(), Silent()
    with pytest.raises(EnvironmentFault, match="not enough disk space for this run"):
        train(recipe, display=display)
    assert display.events == []
    assert not Path(recipe.output).exists()
