"""The walks of compat/dropin/module_walk.py against torch's own: the same names, the same objects, the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from torch import nn

from pronghorn.compat.dropin.module_walk import remember_walks


class ItsOwn(nn.Module):
    """A part that hides what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(1, 1)

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        yield f"{prefix}.hidden", self


def tree() -> nn.Module:
    shared, weight = nn.Linear(2, 2), nn.Parameter(nn.Linear(2, 2).weight.detach())
    model = nn.Module()
    model.first = nn.Sequential(shared, nn.ModuleList([nn.LayerNorm(2), shared, nn.Sequential()]))
    model.second = nn.ModuleDict({"a": shared, "b": nn.Linear(2, 2, bias=False), "c": ItsOwn()})
    model.second["b"].weight = weight
    model.tied = nn.Linear(2, 2)
    model.tied.weight = weight
    model.own = nn.Parameter(weight.detach().clone())
    model.register_module("absent", None)
    model.last = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))))
    return model


def lists(model: nn.Module) -> tuple[list[Any], list[Any]]:
    return (
        [(name, id(module)) for name, module in model.named_modules()],
        [(name, id(one)) for name, one in model.named_parameters()],
    )


def as_torch_walks(model: nn.Module) -> bool:
    theirs = (
        [(name, id(module)) for name, module in nn.Module.named_modules(model)],
        [(name, id(one)) for name, one in nn.Module.named_parameters(model)],
    )
    return lists(model) == theirs


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a child more": lambda model: model.add_module("more", nn.Linear(1, 1)),
    "a child less": lambda model: delattr(model, "first"),
    "another child of the same name": lambda model: setattr(model, "tied", nn.Linear(2, 2)),
    "a child deep inside": lambda model: model.last[0][0].append(nn.Linear(1, 1)),
    "a child by another name": lambda model: model.last[0]._modules.update(other=model.last[0]._modules.pop("0")),
    "a child moved on": lambda model: model.last._modules.update(a=model.first._modules.pop("1")),
    "another parameter": lambda model: setattr(model.tied, "weight", nn.Parameter(model.own.detach())),
    "a parameter more": lambda model: model.last.register_parameter("more", nn.Parameter(model.own.detach())),
    "a parameter less": lambda model: setattr(model.tied, "bias", None),
    "another table": lambda model: setattr(model.last[0], "_modules", dict(model.last[0]._modules, more=nn.Linear(1, 1))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    model = tree()
    remember_walks(model)
    assert as_torch_walks(model)
    assert as_torch_walks(model)
    before = lists(model)
    CHANGES[change](model)
    assert as_torch_walks(model)
    assert lists(model) != before


def test_other_kinds_of_walks_are_torchs() -> None:
    model = tree()
    asked = ({"prefix": "base"}, {"remove_duplicate": False})
    before = [list(model.named_modules(**kind)) for kind in asked], [list(model.named_parameters(**kind)) for kind in asked]
    one_level, memo = list(model.named_parameters(recurse=False)), cast("set[nn.Module]", {model.first})
    rest = list(model.named_modules(set(memo)))
    remember_walks(model)
    assert (
        [list(model.named_modules(**kind)) for kind in asked],
        [list(model.named_parameters(**kind)) for kind in asked],
    ) == before
    assert list(model.named_modules(memo)) == rest
    assert model.first in memo
    assert [name for name, _ in model.named_parameters(recurse=False)] == [name for name, _ in one_level]


def test_a_copy_walks_over_its_own_parts() -> None:
    outer = nn.Sequential(tree(), nn.Linear(1, 1))
    for model in (outer, outer[0]):
        remember_walks(model)
    copied = copy.deepcopy(outer)
    assert as_torch_walks(outer)
    assert as_torch_walks(copied)
    assert not {id(one) for one in copied.modules()} & {id(one) for one in outer.modules()}
    assert not any(module.training for module in copied.eval().modules())
    assert outer.training
