"""`pronghorn demo`: a small real model learns one narrow, checkable skill while you watch.

It goes the way every run goes (recipe, data, training, checkpoint, report), and its metric is the skill itself: the share of
held-out requests that are answered with exactly the right JSON, by the model before and after. How many rows there are depends
on how fast the machine is (machine_speed.py).
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
from pronghorn.demo.machine_speed import ANSWER_TOKENS, STEP_TOKENS, Work, choose, measure
from pronghorn.demo.smollm2 import demo_model
from pronghorn.errors import printable
from pronghorn.model.load import DTYPES, load_model, pick_device, resolve_precision
from pronghorn.recipe import Recipe
from pronghorn.report.answers import Answer, mean_scores, read_answers
from pronghorn.report.display import Display, make_display
from pronghorn.report.run_log import history, read_log
from pronghorn.report.stages import Stages
from pronghorn.report.summary import render, summary
from pronghorn.train.loop import train
from pronghorn.train.run_evaluation import Asked, evaluate_run

METRIC = "json_match"


def demo_recipe(model: Path, data: Path, output: Path, held_out: int) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "lora": {"r": 16, "alpha": 16},
            "data": {"train": [str(data / "train.jsonl")], "eval": str(data / "held_out.jsonl"), "max_length": 256},
            "train": {"epochs": 1, "batch_tokens": STEP_TOKENS, "capacity": STEP_TOKENS, "lr": 2e-3, "warmup": 0.1},
            "eval": {
                "every": 1000,
                "generations": 3,
                "metrics": [METRIC],
                "samples": held_out,
                "max_new_tokens": ANSWER_TOKENS,
            },
            "checkpoint": {"every": 1000, "keep": 1},
            "output": str(output),
        }
    )


def run_demo(output: Path, *, as_json: bool) -> None:
    stages = Stages()
    display = make_display(json=as_json, stages=stages)
    try:
        with stages("load"):
            folder = demo_model(display.progress)
        data = output.with_name(f"{output.name}-data")
        work = _work(folder, data, output, display, stages)
        hotel.write(data, train=work.train_rows, held_out=work.held_out_rows)
        recipe = demo_recipe(folder, data, output, work.held_out_rows)
        if work.seconds is not None or not _begun(output):
            display.handle({"event": "notice", "text": work.told})
        result = train(recipe, display=display, stages=stages)
        answers = read_answers(output)
        if METRIC not in mean_scores(answers):  # a finished run of an earlier version, which measured nothing
            with stages("evaluate"):
                asked = Asked({"metrics": [METRIC], "max_new_tokens": ANSWER_TOKENS}, base=True, answers=output)
                evaluate_run(output, "last", data=None, report=display.progress, asked=asked)
            answers = read_answers(output)
    finally:
        display.close()
    figures = {
        "held_out": len(answers),
        "exact_before": exact([one.base_scores for one in answers]),
        "exact_after": exact([one.scores for one in answers]),
        "adapter": str(result.checkpoint),
        "seconds": stages.total(),
        "report": str(output / "report.html"),
    }
    if as_json:
        print(json.dumps(figures))
        return
    _show(figures, answers, output)


def _work(model: Path, data: Path, output: Path, display: Display, stages: Stages) -> Work:
    """A demo that was interrupted goes on with its own rows: others would be another run."""
    rows = [_rows(data / name) for name in ("train.jsonl", "held_out.jsonl")]
    if _begun(output) and all(rows):
        return Work(rows[0], rows[1], None)
    device = pick_device()
    if device.type != "cpu":
        return choose(None)
    label = "measuring this machine's speed"
    with stages("load"):
        display.progress(label, 0, 0)
        speed = measure(load_model(str(model), DTYPES[resolve_precision("auto", device)], device))
        display.progress(label, 1, 1)
    return choose(speed)


def _begun(output: Path) -> bool:
    return (output / "run.jsonl").exists()


def _rows(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else 0


def exact(scores: list[dict[str, float]]) -> int:
    return sum(one.get(METRIC) == 1.0 for one in scores)


def _show(figures: dict[str, Any], answers: list[Answer], output: Path) -> None:
    console = Console()
    console.print(render(summary(history(read_log(output)))))
    table = Table(title="three held-out requests", show_lines=True)
    for column in ("the guest says", "before", "after"):
        table.add_column(column, overflow="fold")
    for one in answers[:3]:
        table.add_row(*(Text(printable(said)) for said in (one.prompt, (one.base or "")[:160], one.answer)))
    console.print(table)
    count = figures["held_out"]
    console.print(
        f"exact answers on {count} held-out requests: {figures['exact_before']} before "
        f"({figures['exact_before'] / count:.0%}), {figures['exact_after']} after "
        f"({figures['exact_after'] / count:.0%}); {figures['seconds']:.0f} s in total",
        style="bold",
    )
    chat = shlex.join(
        [
            "pronghorn",
            "chat",
            str(output),
            "--system",
            hotel.SYSTEM_PROMPT,
            "--prompt",
            "Room 305 here, please wake me at 7:00.",
        ]
    )
    console.print(f"adapter:    {figures['adapter']} (PEFT format)", soft_wrap=True, highlight=False)
    console.print(f"report:     {figures['report']}\nchat:       {chat}", soft_wrap=True, highlight=False)
