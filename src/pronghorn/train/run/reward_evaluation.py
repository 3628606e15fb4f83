"""`pronghorn eval` of a run that learned from rewards: what answers to held-out prompts are worth now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pronghorn.data.prepare import prepare
from pronghorn.errors import CommandError
from pronghorn.model.causal_lm import install
from pronghorn.recipe_rollouts import OWN
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import objective_of
from pronghorn.train.run.reward_models import reward_models
from pronghorn.train.run.trained_run import TrainedRun
from pronghorn.train.source import RolloutSource


def evaluate_rewards(
    trained: TrainedRun,
    *,
    data: str | None,
    report: Callable[[str, int, int], None],
    refused: Sequence[str] = (),
    samples: int | None = None,
    **files: Path | None,
) -> dict[str, Any]:
    """`data`: another file than the run's held-out rows. `refused`: options that are given, and mean nothing here. `samples`:
    how many prompts are answered. `files`: code of the user's, which runs."""
    if refused:
        raise CommandError(
            what=f"{refused[0]}: answers of this run are measured by its rewards",
            why=f"objective {trained.recipe.objective} learned from them",
            fix=f"remove {', '.join(refused)}",
        )
    if samples is not None and samples < 1:
        raise CommandError(what=f"--samples {samples} is too small", fix="use 1 or more")
    own = trained.recipe.answering.model_copy(update={"engine": OWN})  # a server may be at work for the run
    recipe, tokenizer = trained.recipe.model_copy(update={"rollouts": own}), trained.tokenizer()
    if samples is not None:
        recipe = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"samples": samples})})
    models = reward_models(recipe)
    source = RolloutSource.of(recipe, tokenizer, report=report, stage=lambda _: nullcontext(), models=models, **files)
    source.require_same_kind(trained.cursor)
    if data:
        read = prepare((data,), recipe.data, tokenizer, progress=report, wanted="prompts", answer=recipe.answer_tokens)
        source.hold_out(read.tokens)
    elif source.held_out is None:
        raise CommandError(what="the run has no held-out data", where=str(trained.path), fix="pass some: --data FILE")
    elif isinstance(recipe.data.eval, float) and trained.data != source.keys["data"]:
        raise CommandError(
            what="the prompts that the run held out cannot be found again",
            where=str(trained.path),
            why="the data changed since the run",
            fix="restore the files of data.train, or pass rows that were not trained on: --data FILE",
        )
    model, _, device = trained.load()
    install(model, fp8=recipe.fp8)
    source.start(None, objective=objective_of(recipe), world=World(), device=device, autocast=nullcontext)
    found = source.evaluate(model)
    return {
        "checkpoint": str(trained.path),
        "documents": len(source.held_out or ()),
        "samples": found.samples,
        "figures": found.figures,
    }
