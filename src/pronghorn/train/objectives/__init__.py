"""What a run optimizes: a loss made of the log-probabilities of a packed batch's labels (objective.py)."""

from __future__ import annotations

from pronghorn.recipe import Recipe
from pronghorn.train.objectives.cpo import Cpo, SimPo
from pronghorn.train.objectives.dpo import Dpo
from pronghorn.train.objectives.kto import Kto
from pronghorn.train.objectives.objective import Objective
from pronghorn.train.objectives.orpo import Orpo
from pronghorn.train.objectives.reference import Reference, Store
from pronghorn.train.objectives.reward import Reward
from pronghorn.train.objectives.supervised import Supervised

__all__ = ["Objective", "Supervised", "objective_of"]

WITHOUT_REFERENCE: dict[str, type[Cpo | SimPo | Orpo]] = {"cpo": Cpo, "simpo": SimPo, "orpo": Orpo}
NOT_PARAMETERS = ("name", "share_prompt")  # of an objective's class


def objective_of(recipe: Recipe, store: Store | None = None, pad_id: int = 0) -> Objective:
    """The objective that the recipe asks for. `store`: keeps what a reference says beyond the run's process. `pad_id`: a token
    that ends no answer."""
    spec, capacity = recipe.objective, recipe.train.capacity
    given = {key: value for key, value in spec.model_dump(exclude_none=True).items() if key not in NOT_PARAMETERS}
    if spec.name == "supervised":
        return Supervised()
    if spec.name == "reward":
        return Reward(pad_id, **given)
    if spec.name in WITHOUT_REFERENCE:
        return WITHOUT_REFERENCE[spec.name](**given)
    reference = Reference(capacity, store)
    return Kto(reference, capacity, **given) if spec.name == "kto" else Dpo(reference, **given)
