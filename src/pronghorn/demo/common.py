"""What the demos share: a display, the small model, a folder for generated data, and the figures at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pronghorn.demo.smollm2 import demo_model
from pronghorn.program import command
from pronghorn.recipe import Recipe
from pronghorn.report.display import Display, make_display
from pronghorn.report.run_log import read_log
from pronghorn.report.stages import Stages
from pronghorn.report.summary import summary
from pronghorn.train.run.steps import RunResult

ASKED = "Room 305 here, please wake me at 7:00."  # what the last lines suggest to ask


class Demo(NamedTuple):
    display: Display
    stages: Stages
    model: Path
    data: Path  # where its rows go


@contextmanager
def started(output: Path, *, as_json: bool) -> Iterator[Demo]:
    """The display is closed at the end, also of a demo that fails."""
    stages = Stages()
    display = make_display(json=as_json, stages=stages)
    try:
        with stages("load"):
            folder = demo_model(display.progress)
        yield Demo(display, stages, folder, output.with_name(f"{output.name}-data"))
    finally:
        display.close()


def recipe_of(model: Path, data: Path, output: Path, *, max_length: int, pack: int, lr: float, **more: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": str(model),
            "lora": {"r": 16, "alpha": 16},
            "data": {"train": [str(data / "train.jsonl")], "eval": str(data / "held_out.jsonl"), "max_length": max_length},
            "train": {"epochs": 1, "batch_tokens": pack, "capacity": pack, "lr": lr, "warmup": 0.1},
            "checkpoint": {"every": 1000, "keep": 1},
            "output": str(output),
            **more,
        }
    )


def finish(
    demo: Demo,
    output: Path,
    result: RunResult,
    figures: dict[str, Any],
    sentence: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
    chat: Sequence[str] = (),
    ask: tuple[str, str] | None = None,
    between: Callable[[Console], None] = lambda _: None,
) -> None:
    """The figures as a line of JSON, or the run's summary with a sentence of them. `between`: what is shown before it;
    `chat`: more words of the command that it suggests; `ask`: another one, with its label."""
    told = {**figures, "adapter": str(result.checkpoint), "seconds": demo.stages.total(), "report": str(output / "report.html")}
    if as_json:
        print(json.dumps(told))
        return
    console = Console()
    console.print(summary(read_log(output)))
    between(console)
    console.print(f"{sentence(told)}; {told['seconds']:.0f} s in total", style="bold")
    print(f"adapter:    {told['adapter']} (PEFT format)")  # print breaks no line, so commands can be copied whole
    print(f"report:     {told['report']}")
    label, line = ask or ("ask it:", command("chat", str(output), *chat, "--prompt", ASKED))
    print(f"{label:11} {line}")
    print(f"export:     {command('export', str(output), '--to', 'merged')}")
    print(f"next:       {command('new', 'my.yaml')}")
