"""`pronghorn demo`: a small real model learns one narrow, checkable skill while you watch.

It goes the way every run goes (recipe, data, training, checkpoint, report) and measures the skill itself before and
after: the share of held-out requests that are answered with exactly the right JSON.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pronghorn.data.tokens import load_tokenizer
from pronghorn.demo import hotel
from pronghorn.demo.smollm2 import demo_model
from pronghorn.model.generate import generate_answers
from pronghorn.model.load import DTYPES, load_model, pick_device, resolve_precision
from pronghorn.recipe import Recipe
from pronghorn.report.display import make_display
from pronghorn.report.run_log import history, read_log
from pronghorn.report.stages import Stages
from pronghorn.report.summary import render, summary
from pronghorn.train.loop import train
from pronghorn.train.trained_run import TrainedRun

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
        "eval": {"every": 1000, "generations": 3},
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
        _, held_out_file = hotel.write(data, train=TRAIN_ROWS, held_out=HELD_OUT_ROWS)
        held_out = [json.loads(line) for line in held_out_file.read_text(encoding="utf-8").splitlines()]
        recipe = demo_recipe(folder, data, output)
        with stages("evaluate"):
            before = _answers(_base_model(recipe), held_out, display.progress)
        result = train(recipe, display=display, stages=stages)
        with stages("evaluate"):
            model, tokenizer, _ = TrainedRun(output, "last").load()
            after = _answers((model, tokenizer), held_out, display.progress)
    finally:
        display.close()
    figures = {
        "held_out": len(held_out), "exact_before": hotel.exact_match(before, held_out)[0],
        "exact_after": hotel.exact_match(after, held_out)[0], "adapter": str(result.checkpoint), "seconds": stages.total(),
        "report": str(output / "report.html"),
    }
    if as_json:
        print(json.dumps(figures))
        return
    _show(figures, held_out, before, after, output)


def _base_model(recipe: Recipe) -> tuple[Any, Any]:
    device = pick_device()
    model = load_model(recipe.model, DTYPES[resolve_precision(recipe.precision, device)], device)
    return model, load_tokenizer(recipe.model, None)


def _answers(model_and_tokenizer: tuple[Any, Any], rows: list[dict[str, Any]], progress: Any) -> list[str]:
    model, tokenizer = model_and_tokenizer
    prompts = [
        tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in rows
    ]
    answers = generate_answers(model, tokenizer, prompts, max_new_tokens=ANSWER_TOKENS, progress=progress)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return answers


def _show(figures: dict[str, Any], rows: list[dict[str, Any]], before: list[str], after: list[str], output: Path) -> None:
    console = Console()
    console.print(render(summary(history(read_log(output)))))
    table = Table(title="three requests it has never seen", show_lines=True)
    for column in ("the guest says", "before", "after"):
        table.add_column(column, overflow="fold")
    for row, first, last in list(zip(rows, before, after, strict=True))[:3]:
        table.add_row(row["messages"][-2]["content"], first[:160], last)
    console.print(table)
    count = figures["held_out"]
    console.print(f"exact answers on {count} held-out requests: {figures['exact_before']} before"
                  f" ({figures['exact_before'] / count:.0%}), {figures['exact_after']} after"
                  f" ({figures['exact_after'] / count:.0%}); {figures['seconds']:.0f} s in all", style="bold")
    chat = shlex.join(["pronghorn", "chat", str(output), "--system", hotel.SYSTEM_PROMPT, "--prompt",
                       "Room 305 here, please wake me at 7:00."])
    console.print(f"adapter:    {figures['adapter']} (stock PEFT loads it)", soft_wrap=True, highlight=False)
    console.print(f"report:     {figures['report']}\ntalk to it: {chat}", soft_wrap=True, highlight=False)
