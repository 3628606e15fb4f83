"""`pronghorn demo --preference`: a small real model learns which of two replies the house prefers, by DPO, while you watch.

The figure is the share of held-out pairs whose chosen reply is the likelier one to the model: about half before, nearly all
after. Both come from log-probabilities of whole replies, so nothing has to be generated and judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from pronghorn.data.encode.tokens import TokenTable
from pronghorn.demo import replies
from pronghorn.demo.common import finish, recipe_of, started
from pronghorn.model.causal_lm import install
from pronghorn.recipe import Recipe
from pronghorn.train.loop import train
from pronghorn.train.objectives.reference import Floats, reference_log_probs
from pronghorn.train.run.trained_run import TrainedRun
from pronghorn.train.source import source_of

TRAIN, HELD_OUT = 96, 48  # pairs; a style is learnt within the first fifty
PACK = 512  # tokens: about six pairs


def preference_recipe(model: Path, data: Path, output: Path) -> Recipe:
    more = {"objective": {"name": "dpo", "beta": 0.1}, "eval": {"every": 1000, "generations": 0}}
    return recipe_of(model, data, output, max_length=128, pack=PACK, lr=5e-4, **more)


def run_preference_demo(output: Path, *, as_json: bool) -> None:
    with started(output, as_json=as_json) as demo:
        replies.write(demo.data, train=TRAIN, held_out=HELD_OUT)
        told = f"demo: {TRAIN} pairs of replies to train on, {HELD_OUT} held out; a few minutes on a CPU"
        demo.display.handle({"event": "notice", "text": told})
        recipe = preference_recipe(demo.model, demo.data, output)
        result = train(recipe, display=demo.display, stages=demo.stages)
        with demo.stages("evaluate"):
            before, after, count = preferred(output, demo.display.progress)
    figures = {"held_out": count, "preferred_before": before, "preferred_after": after}
    finish(demo, output, result, figures, _sentence, as_json=as_json)


def preferred(run: Path, report: Callable[[str, int, int], None]) -> tuple[int, int, int]:
    """Held-out pairs whose chosen reply is the likelier one: to the model before, and after; and how many there are."""
    trained = TrainedRun(run, "last")
    model, tokenizer, device = trained.load()
    table = source_of(trained.recipe, tokenizer, report=report, stage=lambda _: nullcontext()).held_out
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
    """For each pair: whether the chosen answer's labels have the larger sum."""
    sums = np.add.reduceat(values, np.concatenate([[0], np.cumsum(table.loss_counts)[:-1]]))
    return sums[0::2] > sums[1::2]


def _sentence(figures: dict[str, Any]) -> str:
    before, after, count = (figures[key] for key in ("preferred_before", "preferred_after", "held_out"))
    return (
        f"the model prefers the formal reply in {before} of {count} held-out pairs before training ({before / count:.0%}),"
        f" in {after} after ({after / count:.0%})"
    )
