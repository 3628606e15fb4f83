"""Exports of checkpoints that tests make by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pronghorn.export.job import Options
from pronghorn.export.run import Written, export_trained
from pronghorn.export.targets import asked_for
from pronghorn.recipe import Recipe
from pronghorn.train.trained_run import Trained


def export(
    checkpoint: Path, recipe: Recipe, target: Path, to: str, figures: dict[str, Any] | None = None, **options: Any
) -> Written:
    """One target, not checked unless asked for."""
    (asked,) = asked_for(to)
    (written,) = export_trained(
        Trained(checkpoint, recipe), [(asked, target)], figures or {}, Options(**{"check": False, **options})
    )
    return written
