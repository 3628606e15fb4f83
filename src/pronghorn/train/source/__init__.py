"""What feeds a run (source.py), by recipe."""

from __future__ import annotations

from pronghorn.hf_types import Tokenizer
from pronghorn.recipe import Recipe
from pronghorn.train.source.source import Report, Source
from pronghorn.train.source.table import TableSource
from pronghorn.train.step.step import StageTimer

__all__ = ["Source", "TableSource", "kind_of", "source_of"]


def kind_of(recipe: Recipe) -> type[Source]:
    return TableSource


def source_of(recipe: Recipe, tokenizer: Tokenizer, *, report: Report, stage: StageTimer) -> Source:
    return kind_of(recipe).of(recipe, tokenizer, report=report, stage=stage)
