"""`pronghorn demo --preference`: a small real model learns which of two replies the house prefers, by DPO, while you watch.

The figure is the share of held-out pairs whose chosen reply is the likelier one to the model: about half before, nearly all
after. Both come from log-probabilities of whole replies, so nothing has to be generated and judged.
"""

from __future__ import annotations

import json
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pronghorn.data.tokens import TokenTable
from pronghorn.demo import replies
from pronghorn.demo.smollm2 import demo_model
from pronghorn.model.causal_lm import install
from pronghorn.recipe import Recipe
from pronghorn.report.display import make_display
from pronghorn.report.run_log import history, read_log
from pronghorn.report.stages import Stages
from pronghorn.report.summary import render, summary
from pronghorn.train.loop import train
from pronghorn.train.objectives.reference import Floats, reference_log_probs
from pronghorn.train.setup import prepare_data
from pronghorn.train.trained_run import TrainedRun

TRAIN, HELD_OUT = 96, 48  # pairs; a style is learnt within the first fifty
PACK = 512  # tokens: about six pairs


def preference_recipe(model: Path, data: Path, output: Path) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "lora": {"r": 16, "alpha": 16},
            "objective": {"name": "dpo", "beta": 0.1},
            "data": {"train": [str(data / "train.jsonl")], "eval": str(data / "held_out.jsonl"), "max_length": 128},
            "train": {"epochs": 1, "batch_tokens": PACK, "capacity": PACK, "lr": 5e-4, "warmup": 0.1},
            "eval": {"every": 1000, "generations": 0},
            "checkpoint": {"every": 1000, "keep": 1},
            "output": str(output),
        }
    )


def run_preference_demo(output: Path, *, as_json: bool) -> None:
    stages = Stages()
    display = make_display(json=as_json, stages=stages)
    try:
        with stages("load"):
            folder = demo_model(display.progress)
        data = output.with_name(f"{output.name}-data")
        replies.write(data, train=TRAIN, held_out=HELD_OUT)
        told = f"demo: {TRAIN} pairs of replies to train on, {HELD_OUT} held out; a few minutes on a CPU"
        display.handle({"event": "notice", "text": told})
        result = train(preference_recipe(folder, data, output), display=display, stages=stages)
        with stages("evaluate"):
            before, after, count = preferred(output, display.progress)
    finally:
        display.close()
    figures = {
        "held_out": count,
        "preferred_before": before,
        "preferred_after": after,
        "adapter": str(result.checkpoint),
        "seconds": stages.total(),
        "report": str(output / "report.html"),
    }
    if as_json:
        print(json.dumps(figures))
        return
    _show(figures, output)


def preferred(run: Path, report: Any) -> tuple[int, int, int]:
    """Held-out pairs whose chosen reply is the likelier one: to the model before, and after; and how many there are."""
    trained = TrainedRun(run, "last")
    model, tokenizer, device = trained.load()
    table = prepare_data(trained.recipe, tokenizer, report=report, stage=lambda _: nullcontext()).evaluation
    assert table is not None
    install(model)
    capacity = trained.recipe.train.capacity
    before = reference_log_probs(model, table, capacity, device, nullcontext)
    merged = model.merge_and_unload()  # the adapter is part of it now, and is not left out
    install(merged)
    after = reference_log_probs(merged, table, capacity, device, nullcontext)
    counts = [int((likelier := _likelier(table, values)).sum()) for values in (before, after)]
    return counts[0], counts[1], len(likelier)


def _likelier(table: TokenTable, values: Floats) -> Any:
    """Of each pair: whether the chosen answer's labels have the larger sum."""
    sums = np.add.reduceat(values, np.concatenate([[0], np.cumsum(table.loss_counts)[:-1]]))
    return sums[0::2] > sums[1::2]


def _show(figures: dict[str, Any], output: Path) -> None:
    console = Console()
    console.print(render(summary(history(read_log(output)))))
    count = figures["held_out"]
    shares = [f"{figures[key] / count:.0%}" for key in ("preferred_before", "preferred_after")]
    console.print(
        f"the formal reply is the likelier one in {figures['preferred_before']} of {count} held-out pairs before ({shares[0]}),"
        f" in {figures['preferred_after']} after ({shares[1]}); {figures['seconds']:.0f} s in total",
        style="bold",
    )
    chat = shlex.join(["pronghorn", "chat", str(output), "--prompt", "Room 305 here, please wake me at 7:00."])
    console.print(f"adapter:    {figures['adapter']} (PEFT format)", soft_wrap=True, highlight=False)
    console.print(f"report:     {figures['report']}\nchat:       {chat}", soft_wrap=True, highlight=False)
