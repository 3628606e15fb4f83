"""One run of hours.py: trained and counted, and judged by final rows that it never saw."""

from __future__ import annotations

import gc
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pronghorn.data.encode.tokens import TokenizerFiles, padding_id
from pronghorn.data.prepare import prepare
from pronghorn.evaluation.held_out import HeldOut
from pronghorn.model.lora import restore_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Eval
from pronghorn.report.stages import Stages
from pronghorn.train.loop import train
from pronghorn.train.run.evaluate import evaluate
from pronghorn.train.run.trained_run import TrainedRun


class Events:
    """A run's display: what it said."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def handle(self, event: dict[str, Any]) -> None:
        self.found.append(event)

    def progress(self, label: str, done: int, total: int) -> None:
        """Not needed here."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.found if event["event"] == kind]


def trained(values: dict[str, Any], folder: Path, alone: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a run took, and its dev losses. A run whose gradient is zero has measured nothing. `alone`: a run with the GPU to
    itself, whose steps and evaluations took what this one's would have taken."""
    shutil.rmtree(folder, ignore_errors=True)
    recipe, events = Recipe.model_validate(values), Events()
    began = time.monotonic()
    stages = Stages(began)
    result = train(recipe, display=events, stages=stages)
    held = time.monotonic() - began
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the next run plans by what is free
    steps, looks, (start,) = events.of("step"), events.of("eval"), events.of("start")
    assert all(step["grad_norm"] > 0 for step in steps), "a step had no gradient"
    each_step, each_look = (median(one["seconds"] for one in of) for of in (steps, looks[1:] or looks))
    if alone is not None:
        each_step, each_look = alone["step_seconds"] / alone["steps"], alone["eval_seconds"] / alone["looks"]
    step_seconds, eval_seconds = len(steps) * each_step, len(looks) * each_look
    score_seconds = (start["data"].get("select") or {}).get("scored_seconds", 0.0)
    said, dev = recipe.train, prepare((str(recipe.data.eval),), recipe.data, TokenizerFiles(recipe.model, recipe.data)).tokens
    return {
        "batch": said.batch_tokens, "lr": said.lr, "planned_steps": start["steps"], "steps": len(steps),
        "tokens": sum(step["tokens"] for step in steps), "looks": len(looks), "dev_tokens": int(dev.lengths.sum()),
        "seconds": step_seconds + eval_seconds + score_seconds,
        "step_seconds": step_seconds, "eval_seconds": eval_seconds, "score_seconds": score_seconds,
        "held_seconds": None if alone else held,
        "stages": {name: round(spent, 3) for name, spent in stages.seconds.items() if spent > 0.001},
        "reason": result.reason, "why": result.why, "best_step": result.best_step,
        "dev_loss": min(look["loss"] for look in looks), "curve": [[look["step"], round(look["loss"], 5)] for look in looks],
    }  # fmt: skip


class Judge:
    """The final rows of one data set, and a model that takes up one run's adapter after the other."""

    def __init__(self, loaded: tuple[Any, Any, Any], final: Path, run: Path, answers: int) -> None:
        """`answers`: how many rows are answered, too."""
        self.model, self.tokenizer, self.device = loaded
        recipe = TrainedRun(run, "best").recipe
        self.table = prepare((str(final),), recipe.data, self.tokenizer).tokens
        spec = Eval(metrics=("exact_match",), samples=max(1, answers), generations=0)
        self.held_out = HeldOut.of(self.table, self.tokenizer, spec) if answers else None

    @staticmethod
    def loaded(run: Path) -> tuple[Any, Any, Any]:
        one = TrainedRun(run, "best")
        found = one.load()
        one.give_layers(found[0])
        return found

    def __call__(self, run: Path) -> dict[str, Any]:
        one = TrainedRun(run, "best")
        restore_adapter(self.model, one.path)
        began = time.monotonic()
        result = evaluate(self.model, self.table, capacity=one.recipe.train.capacity, device=self.device,
                          pad_id=padding_id(self.tokenizer), autocast=nullcontext)  # fmt: skip
        found = {"judged_step": one.step, "final_loss": result.loss, "final_rows": len(self.table)}
        if self.held_out is not None:
            judged = self.held_out.judge(self.held_out.ask(self.model, capture=self.device.type == "cuda"))
            found["exact"] = "".join(str(int(row["exact_match"])) for row in judged.rows)
        return {**found, "judge_seconds": time.monotonic() - began}
