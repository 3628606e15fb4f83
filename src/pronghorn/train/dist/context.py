"""Packs that consecutive ranks share (`world.context`), so that a document may be longer than one GPU can hold.

C ranks are a group. Every pack goes to one group, and each of its ranks gets 2 of 2 C pieces (data/pack/parts.py). Layers work
on rows; attention alone gathers the keys and values of the group (model/layers/shared_pack.py). Gradients and losses are summed
over all ranks, as those of different packs are.

    4 ranks, context 2      pack 0: ranks 0 and 1      pack 1: ranks 2 and 3

What a rank does alone (held-out answers, a reference to look at) takes whole packs and knows nothing of this.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pronghorn.data.pack.parts import Deal
from pronghorn.errors import RecipeError
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.families import why_not_fast
from pronghorn.model.layers.build import why_not_in_parts
from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import World


def require_context(recipe: Recipe, config: HFConfig) -> None:
    """Before anything is read: what cannot be shared. What of the recipe alone cannot be is in recipe_misfits.py, of the number
    of ranks in launch.py."""
    if recipe.world.context == 1:
        return
    why = why_not_fast(config) or why_not_in_parts(config)
    if recipe.train.graph == "on":
        why = why or "train.graph: on is set, and steps whose attention gathers are not captured; set train.graph: auto"
    if why:
        raise RecipeError(
            what=f"world.context: {recipe.world.context}: ranks cannot share the packs of this run",
            why=why,
            fix="set world.context: 1",
        )


def share_packs(model: HFModel, world: World, context: int, plan: str) -> None:
    """From here on the model takes parts of packs as well as whole ones. All ranks call it. `plan`: what layers recompute, where
    attention gathers once more, so all ranks must do the same."""
    world.require_same(lambda: {"memory plan": plan})
    engine = engine_of(model)
    assert engine is not None, "require_context knows why"
    engine.context = world.neighbours(context)


def group_of(model: HFModel) -> World | None:
    """The ranks that share packs with this one."""
    engine = engine_of(model)
    return None if engine is None else engine.context  # type: ignore[return-value]  # share_packs made it


def deal_of(model: HFModel, world: World) -> Deal:
    group = group_of(model)
    return Deal(world.rank, world.size, 1 if group is None else group.size)


def of_whole_documents(
    losses: npt.NDArray[np.float64] | None, group: World | None
) -> npt.NDArray[np.float64] | None:
    """Losses of documents, of which each rank of a group knows a part: the first of them gets the sums, others nothing."""
    if group is None or losses is None:
        return losses
    sums = group.total(*losses.tolist())
    return np.array(sums) if group.rank == 0 else None
