"""What a run optimizes: a loss made of the log-probabilities of a packed batch's labels (objective.py)."""

from __future__ import annotations

from pronghorn.recipe import Recipe
from pronghorn.train.objectives.objective import Objective
from pronghorn.train.objectives.supervised import Supervised

__all__ = ["Objective", "Supervised", "objective_of"]


def objective_of(recipe: Recipe) -> Objective:
    """The objective that the recipe asks for."""
    return Supervised()
