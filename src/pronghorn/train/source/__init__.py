"""What feeds a run (source.py), by recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pronghorn.errors import CommandError
from pronghorn.hf_types import Tokenizer
from pronghorn.recipe import Recipe
from pronghorn.rewards.scoring import Model
from pronghorn.train.source.rollouts import RolloutSource
from pronghorn.train.source.source import Report, Source
from pronghorn.train.source.table import TableSource
from pronghorn.train.step.step import StageTimer

__all__ = ["RolloutSource", "Source", "TableSource", "kind_of", "source_of"]


def kind_of(recipe: Recipe) -> type[Source]:
    return RolloutSource if recipe.objective.kind.reads == "prompts" else TableSource


def source_of(
    recipe: Recipe, tokenizer: Tokenizer, *, report: Report, stage: StageTimer, models: Mapping[str, Model] | None = None,
    ranks: int = 1, **files: Path | None,
) -> Source:  # fmt: skip
    """`models`: reward models, by the names of their rewards. `files`: `reward_file` and `episode_file`, code of the user's,
    which runs. `ranks`: that share a step. The source's recipe has the sizes that `auto` stands for."""
    kind = kind_of(recipe)
    if issubclass(kind, RolloutSource):
        return kind.of(recipe, tokenizer, report=report, stage=stage, models=models, **files)
    if any(files.values()):
        option = next(name for name, file in files.items() if file).replace("_", "-")
        raise CommandError(
            what=f"--{option}: objective {recipe.objective} has no rewards",
            fix="remove it, or set objective: grpo, gspo or rloo",
        )
    if issubclass(kind, TableSource):
        return kind.of(recipe, tokenizer, report=report, stage=stage, ranks=ranks)
    return kind.of(recipe, tokenizer, report=report, stage=stage)
