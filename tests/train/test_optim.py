"""AdamW against its formula in float64, the groups, the schedules step by step, and a state that comes back by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from watching import RecipeFor

from pronghorn.errors import CheckpointError
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora, Train
from pronghorn.train.step.optim import lr_scale, make_optimizer, optimizer_tensors, restore_optimizer, set_lr, trainable
from samples import make_model
from tables import table


def random_grads(model: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in trainable(model).values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


# Groups -----------------------------------------------------------------------------------------------------------------


def setting(key: str, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Of every parameter that trains, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)]: group[key] for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == trainable(model).keys()
    return found


@pytest.mark.parametrize("dora", [False, True], ids=["norms", "magnitudes of DoRA"])
def test_matrices_decay_and_vectors_do_not(recipe_for: RecipeFor, dora: bool) -> None:
    model = add_adapter(make_model(), Lora(r=4, dora=True), seed=1) if dora else make_model()
    recipe = recipe_for(method="lora" if dora else "full", train={"weight_decay": 0.1})
    decay = setting("weight_decay", model, make_optimizer(model, recipe))
    assert {name: 0.0 if "norm" in name or "magnitude" in name else 0.1 for name in decay} == decay
    assert 0.0 in decay.values()


def test_lora_plus_makes_b_learn_faster_than_a(recipe_for: RecipeFor) -> None:
    model = add_adapter(make_model(), Lora(r=4), seed=1)
    optimizer = make_optimizer(model, recipe_for(lora={"plus_ratio": 16.0}, train={"lr": 1e-3}))
    rates = setting("lr", model, optimizer)
    assert {name: pytest.approx(1.6e-2 if ".lora_B." in name else 1e-3) for name in rates} == rates
    set_lr(optimizer, 0.25)  # the schedule keeps the ratio
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([2.5e-4, 4e-3])


# AdamW ------------------------------------------------------------------------------------------------------------------


def test_adamw_follows_its_formula(recipe_for: RecipeFor) -> None:
    """Twelve steps with decay and warm-up, judged by the formula written out in float64."""
    changes = {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-2, "warmup": 0.3}
    recipe = recipe_for(method="full", train=changes)
    spec, (b1, b2) = recipe.train, recipe.train.betas
    model = make_model()
    optimizer = make_optimizer(model, recipe)
    truth = {name: p.detach().double() for name, p in trainable(model).items()}
    m = {name: torch.zeros_like(w) for name, w in truth.items()}
    v = {name: torch.zeros_like(w) for name, w in truth.items()}
    for step in range(12):
        lr = set_lr(optimizer, lr_scale(step, 12, spec))
        random_grads(model, step)
        for name, parameter in trainable(model).items():
            g = parameter.grad.double()
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g * g
            unbiased_m, unbiased_v = m[name] / (1 - b1 ** (step + 1)), v[name] / (1 - b2 ** (step + 1))
            decay = spec.weight_decay if parameter.ndim == 2 else 0.0
            truth[name] = truth[name] * (1 - lr * decay) - lr * unbiased_m / (unbiased_v.sqrt() + spec.eps)
        optimizer.step()
    for name, parameter in trainable(model).items():
        moved = float((truth[name] - make_model().state_dict()[name]).norm())
        rounding = 12 * 2**-24 * float(truth[name].norm())  # each step rounds the weight once
        assert float((parameter.detach().double() - truth[name]).norm()) < 1e-5 * moved + rounding, name


# Schedule ---------------------------------------------------------------------------------------------------------------


def scales(total: int, **spec: Any) -> list[float]:
    return [lr_scale(step, total, Train(**spec)) for step in range(total)]


@table(
    ("total", "warmup", "schedule", "expected"),
    [
        (10, 0.3, "constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        (4, 0.6, "constant", [0.25, 0.5, 0.75, 1]),  # 2.4 steps are three
        (10, 3, "constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),  # a number of steps
        (4, 9, "linear", [0.1, 0.2, 0.3, 0.4]),
        (5, 0.0, "linear", [1, 0.8, 0.6, 0.4, 0.2]),  # to one step above zero
        (6, 0.16, "linear", [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        (8, 0.0, "cosine", [0.5 * (1 + math.cos(math.pi * n / 8)) for n in range(8)]),  # half a wave
        (3, 0.0, "constant", [1, 1, 1]),
        (10, 2, "wsd", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1 - math.sqrt(1 / 2)]),  # a fifth decays
        (4, 9, "wsd", [0.1, 0.2, 0.3, 0.4]),
    ],
)
def test_the_schedules_step_by_step(total: int, warmup: float, schedule: str, expected: list[float]) -> None:
    assert scales(total, warmup=warmup, schedule=schedule) == pytest.approx(expected)


@table(
    ("early", "decay", "steps"), [(8, 0.2, 10), (7, 0.2, 9), (9, 0.5, 18), (3, 0.75, 12), (5, 4, 9), (17, 4, 20), (1, 0.2, 3)]
)
def test_an_early_decay_is_that_of_a_run_planned_for_fewer_steps(early: int, decay: float, steps: int) -> None:
    """Not the last two rows: no run is longer than planned, and none decays while it warms up."""
    spec = Train(schedule="wsd", decay=decay, warmup=2)
    found = [lr_scale(step, 20, spec, early) for step in spec.decays(20, early)]
    assert spec.decays(20, early).stop == steps
    assert found == [1 - math.sqrt(n / len(found)) for n in range(len(found))]
    if (early, decay) not in ((17, 4), (1, 0.2)):
        assert spec.decays(20, early) == spec.decays(steps)


@table("schedule", ["cosine", "linear", "constant", "wsd"])
@table("total", [1, 2, 3, 7, 100, 1001])
@table("warmup", [0.0, 0.03, 0.5, 0.99])
def test_a_rate_is_always_above_zero_and_reaches_no_more_than_the_base(schedule: Any, total: int, warmup: float) -> None:
    found = scales(total, warmup=warmup, schedule=schedule)
    assert all(0 < scale <= 1 for scale in found)
    top = found.index(max(found))
    assert found[: top + 1] == sorted(found[: top + 1])
    assert found[top:] == sorted(found[top:], reverse=True)


# State ------------------------------------------------------------------------------------------------------------------


def stepped(recipe: Recipe, seed: int = 1, steps: int = 3) -> tuple[Any, torch.optim.Optimizer]:
    model = add_adapter(make_model(), recipe.lora, seed=seed)
    optimizer = make_optimizer(model, recipe)
    for step in range(steps):
        random_grads(model, step)
        optimizer.step()
    return model, optimizer


def assert_goes_on_the_same(model: Any, optimizer: Any, stored: dict[str, torch.Tensor], other: Any, recipe: Recipe) -> None:
    """`other` with the weights of `model` and the stored state: the state is the same bits, and so are the weights after
    another step."""
    other.load_state_dict(model.state_dict())
    restored, kept = make_optimizer(other, recipe), {name: tensor.clone() for name, tensor in stored.items()}
    restore_optimizer(restored, other, stored)
    again = optimizer_tensors(restored, other)
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], stored[name]) for name in stored)
    for one, its_optimizer in ((model, optimizer), (other, restored)):
        random_grads(one, 7)
        its_optimizer.step()
    assert all(torch.equal(p, trainable(other)[name]) for name, p in trainable(model).items())
    assert all(torch.equal(kept[name], stored[name]) for name in stored)  # what was restored is a copy


def test_the_state_comes_back_to_the_bit(recipe_for: RecipeFor) -> None:
    recipe = recipe_for(lora={"plus_ratio": 2.0, "dora": True})
    model, optimizer = stepped(recipe)
    stored = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, model).items()}
    assert len(stored) == 3 * len(trainable(model))
    other = add_adapter(make_model(), recipe.lora, seed=1)
    assert_goes_on_the_same(model, optimizer, stored, other, recipe)


def test_a_state_of_another_adapter_is_refused(recipe_for: RecipeFor) -> None:
    recipe = recipe_for()
    model, optimizer = stepped(recipe)
    stored = optimizer_tensors(optimizer, model)
    wider = recipe_for(lora={"r": 8})
    other, its_optimizer = stepped(wider, steps=0)
    with pytest.raises(CheckpointError, match="does not fit parameter") as caught:
        restore_optimizer(its_optimizer, other, stored)
    assert "--fresh" in caught.value.fix
    missing = dict(list(stored.items())[1:])
    with pytest.raises(CheckpointError, match=next(iter(stored)).split("/")[2]):
        restore_optimizer(optimizer, model, missing)
