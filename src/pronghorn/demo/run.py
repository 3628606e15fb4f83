"""`pronghorn demo`: a small real model learns one narrow, checkable skill while you watch.

It goes the way every run goes (recipe, data, training, checkpoint, report), and its metric is the skill itself: the share of
held-out requests that are answered with exactly the right JSON, by the model before and after.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronghorn.demo import hotel
from pronghorn.demo.smollm2 import demo_model
from pronghorn.errors import printable
from pronghorn.recipe import Recipe
from pronghorn.report.answers import Answer, mean_scores, read_answers
from pronghorn.report.display import make_display
from pronghorn.report.run_log import history, read_log
from pronghorn.report.stages import Stages
from pronghorn.report.summary import render, summary
from pronghorn.train.loop import train
from pronghorn.train.run_evaluation import Asked, evaluate_run

METRIC = "json_match"
# 420 rows of 67 tokens: 54 of 56, 101 of 105 and 102 of 105 held-out requests exact with three seeds; with 350 rows one
# of two seeds stayed at 92 of 105.
TRAIN_ROWS = 420
HELD_OUT_ROWS = 70  # ten of each kind
ANSWER_TOKENS = 48  # the longest command has 41


def demo_recipe(model: Path, data: Path, output: Path) -> Recipe:
    return Recipe.model_validate({
        "model": str(model),
        "lora": {"r": 16, "alpha": 16},
        "data": {"train": [str(data / "train.jsonl")], "eval": str(data / "held_out.jsonl"), "max_length": 256},
        "train": {"epochs": 1, "batch_tokens": 512, "capacity": 512, "lr": 2e-3, "warmup": 0.1},
        "eval": {"every": 1000, "generations": 3, "metrics": [METRIC], "samples": HELD_OUT_ROWS,
                 "max_new_tokens": ANSWER_TOKENS},
        "checkpoint": {"every": 1000, "keep": 1},
        "output": str(output),
    })


def run_demo(output: Path, *, as_json: bool) -> None:
    stages = Stages()
    display = make_display(json=as_json, stages=stages)
    try:
        with stages("load"):
            folder = demo_model(display.progress)
        data = output.with_name(f"{output.name}-data")
        hotel.write(data, train=TRAIN_ROWS, held_out=HELD_OUT_ROWS)
        result = train(demo_recipe(folder, data, output), display=display, stages=stages)
        answers = read_answers(output)
        if METRIC not in mean_scores(answers):  # a finished run of an earlier version, which measured nothing
            with stages("evaluate"):
                asked = Asked({"metrics": [METRIC], "max_new_tokens": ANSWER_TOKENS}, base=True, answers=output)
                evaluate_run(output, "last", data=None, report=display.progress, asked=asked)
            answers = read_answers(output)
    finally:
        display.close()
    figures = {
        "held_out": len(answers), "exact_before": exact([one.base_scores for one in answers]),
        "exact_after": exact([one.scores for one in answers]), "adapter": str(result.checkpoint), "seconds": stages.total(),
        "report": str(output / "report.html"),
    }
    if as_json:
        print(json.dumps(figures))
        return
    _show(figures, answers, output)


def exact(scores: list[dict[str, float]]) -> int:
    return sum(one.get(METRIC) == 1.0 for one in scores)


def _show(figures: dict[str, Any], answers: list[Answer], output: Path) -> None:
    console = Console()
    console.print(render(summary(history(read_log(output)))))
    table = Table(title="three requests it has never seen", show_lines=True)
    for column in ("the guest says", "before", "after"):
        table.add_column(column, overflow="fold")
    for one in answers[:3]:
        table.add_row(*(Text(printable(said)) for said in (one.prompt, (one.base or "")[:160], one.answer)))
    console.print(table)
    count = figures["held_out"]
    console.print(f"exact answers on {count} held-out requests: {figures['exact_before']} before"
                  f" ({figures['exact_before'] / count:.0%}), {figures['exact_after']} after"
                  f" ({figures['exact_after'] / count:.0%}); {figures['seconds']:.0f} s in all", style="bold")
    chat = shlex.join(["pronghorn", "chat", str(output), "--system", hotel.SYSTEM_PROMPT, "--prompt",
                       "Room 305 here, please wake me at 7:00."])
    console.print(f"adapter:    {figures['adapter']} (stock PEFT loads it)", soft_wrap=True, highlight=False)
    console.print(f"report:     {figures['report']}\ntalk to it: {chat}", soft_wrap=True, highlight=False)
