"""What a run optimizes: a loss made of what the model's head gives of a packed batch's rows (objective.py)."""

from __future__ import annotations

from typing import Any

from pronghorn.recipe import Recipe
from pronghorn.train.objectives.cpo import Cpo, SimPo
from pronghorn.train.objectives.dpo import Dpo
from pronghorn.train.objectives.kto import Kto
from pronghorn.train.objectives.objective import Objective
from pronghorn.train.objectives.orpo import Orpo
from pronghorn.train.objectives.policy import Grpo, Gspo, Rloo
from pronghorn.train.objectives.reference import Reference, Store
from pronghorn.train.objectives.reward import Reward
from pronghorn.train.objectives.supervised import Supervised

__all__ = ["Objective", "Supervised", "objective_of"]

CLASSES: dict[str, type[Objective]] = {
    "supervised": Supervised,
    "dpo": Dpo,
    "rpo": Dpo,
    "cpo": Cpo,
    "simpo": SimPo,
    "orpo": Orpo,
    "kto": Kto,
    "reward": Reward,
    "grpo": Grpo,
    "gspo": Gspo,
    "rloo": Rloo,
}


def objective_of(recipe: Recipe, store: Store | None = None, pad_id: int = 0) -> Objective:
    """The objective that the recipe asks for. `store`: keeps what a reference says beyond the run's process. `pad_id`: a token
    that ends no answer."""
    made, capacity = CLASSES[recipe.objective.name], recipe.train.capacity
    known: dict[str, Any] = {"reference": Reference(capacity, store), "capacity": capacity, "pad_id": pad_id}
    if recipe.rollouts is not None:
        known |= {"longest": recipe.rollouts.max_new_tokens, "temperature": recipe.rollouts.temperature}
    return made(**{name: known[name] for name in made.needs}, **recipe.objective.given)
