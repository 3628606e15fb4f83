"""train.optimizer: which optimizer it makes, that its state comes back bit for bit, and that 8 bits learn as 32 do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_optim import assert_goes_on_the_same, random_grads
from watching import RecipeFor

from pronghorn.errors import CheckpointError
from pronghorn.kernels.optim.adamw8bit import SMALL, blocks_of
from pronghorn.recipe import Recipe
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.optim import make_optimizer, optimizer_tensors, restore_optimizer, trainable
from samples import make_model

KINDS = ["adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"]


def stepped(recipe: Recipe, steps: int = 3) -> tuple[Any, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model, recipe)
    for step in range(steps):
        random_grads(model, step)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("kind", "ours"), list(zip(KINDS, [False, True, False, True], strict=True)))
def test_each_kind_makes_its_optimizer(recipe_for: RecipeFor, kind: str, ours: bool) -> None:
    """On a CPU: what is paged lies in the same memory as everything else."""
    model, optimizer = stepped(recipe_for(method="full", train={"optimizer": kind, "weight_decay": 0.1}))
    assert isinstance(optimizer, FusedAdamW) == ours
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    dtypes = {p.numel() >= SMALL: optimizer.state[p]["exp_avg"].dtype for p in trainable(model).values()}
    assert dtypes == {True: torch.uint8 if ours else torch.float32, False: torch.float32}


def test_the_state_of_8_bits_comes_back_to_the_bit(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(method="full", train={"optimizer": "adamw_8bit"})
    model, optimizer = stepped(recipe)
    stored = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    large = [name for name, p in trainable(model).items() if p.numel() >= SMALL]
    assert large
    for name in large:
        parameter = trainable(model)[name]
        assert stored[f"optimizer/exp_avg/{name}"].dtype == torch.uint8
        assert stored[f"optimizer/exp_avg_sq_absmax/{name}"].shape == (blocks_of(parameter.numel()),)
    assert len(stored) == 3 * len(trainable(model)) + 2 * len(large)
    assert_goes_on_the_same(model, optimizer, stored, make_model(), recipe)


def test_states_of_other_kinds_are_refused(recipe_for: RecipeFor) -> None:
    recipes = [recipe_for(method="full", train={"optimizer": kind}) for kind in ("adamw", "adamw_8bit")]
    for mine, other in (recipes, recipes[::-1]):
        model, optimizer = stepped(mine)
        another = make_model()
        with pytest.raises(CheckpointError, match="does not fit parameter"):
            restore_optimizer(make_optimizer(another, other), another, optimizer_tensors(optimizer, model))


def test_another_number_of_bits_is_another_run(recipe_for: RecipeFor) -> None:
    recipes = {kind: recipe_for(train={"optimizer": kind}) for kind in KINDS}
    assert recipes["adamw"].differences(recipes["paged_adamw"]) == {}
    assert recipes["paged_adamw_8bit"].differences(recipes["adamw_8bit"]) == {}
    assert recipes["adamw"].differences(recipes["paged_adamw_8bit"]) == {"train.optimizer": "adamw -> adamw_8bit"}
