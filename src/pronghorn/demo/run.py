"""`pronghorn demo`: a small real model learns one narrow, checkable skill while you watch.

It goes the way every run goes (recipe, data, training, checkpoint, report), and its metric is the skill itself: the share of
held-out requests that are answered with exactly the right JSON, by the model before and after. How many rows there are depends
on how fast the machine is (machine_speed.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pronghorn.demo import hotel
from pronghorn.demo.common import finish, recipe_of, started
from pronghorn.demo.machine_speed import ANSWER_TOKENS, STEP_TOKENS, Work, choose, speed_here
from pronghorn.errors import printable
from pronghorn.recipe import Recipe
from pronghorn.report.answers import AnswerRow, read_answers
from pronghorn.report.display import Display
from pronghorn.report.stages import Stages
from pronghorn.train.loop import train

METRIC = "json_match"


def demo_recipe(model: Path, data: Path, output: Path, held_out: int) -> Recipe:
    answered = {"generations": 3, "metrics": [METRIC], "samples": held_out, "max_new_tokens": ANSWER_TOKENS}
    return recipe_of(model, data, output, max_length=256, pack=STEP_TOKENS, lr=2e-3, eval={"every": 1000, **answered})


def run_demo(output: Path, *, as_json: bool) -> None:
    with started(output, as_json=as_json) as demo:
        display, stages = demo.display, demo.stages
        work = _work(demo.model, demo.data, output, display, stages)
        hotel.write(demo.data, train=work.train_rows, held_out=work.held_out_rows)
        recipe = demo_recipe(demo.model, demo.data, output, work.held_out_rows)
        if work.seconds is not None or not _begun(output):
            display.handle({"event": "notice", "text": work.told})
        result = train(recipe, display=display, stages=stages)
        answers = read_answers(output)
    before, after = (exact([getattr(one, which) for one in answers]) for which in ("base_scores", "scores"))
    figures = {"held_out": len(answers), "exact_before": before, "exact_after": after}
    chat = ("--system", hotel.SYSTEM_PROMPT)
    finish(
        demo, output, result, figures, _sentence, as_json=as_json, chat=chat, between=lambda console: _table(console, answers)
    )


def _work(model: Path, data: Path, output: Path, display: Display, stages: Stages) -> Work:
    """A demo that was interrupted goes on with its own rows: others would be another run."""
    rows = [_rows(data / name) for name in ("train.jsonl", "held_out.jsonl")]
    if _begun(output) and all(rows):
        return Work(rows[0], rows[1], None)
    return choose(speed_here(model, display, stages))


def _begun(output: Path) -> bool:
    return (output / "run.jsonl").exists()


def _rows(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else 0


def exact(scores: list[dict[str, float]]) -> int:
    return sum(one.get(METRIC) == 1.0 for one in scores)


def _table(console: Console, answers: list[AnswerRow]) -> None:
    table = Table(title="three held-out requests", show_lines=True)
    for column in ("the guest says", "before", "after"):
        table.add_column(column, overflow="fold")
    for one in answers[:3]:
        table.add_row(*(Text(printable(said)) for said in (one.prompt, (one.base or "")[:160], one.answer)))
    console.print(table)


def _sentence(figures: dict[str, Any]) -> str:
    before, after, count = (figures[key] for key in ("exact_before", "exact_after", "held_out"))
    told = f"exact answers on {count} held-out requests: {before} before ({before / count:.0%})"
    return f"{told}, {after} after ({after / count:.0%})"
