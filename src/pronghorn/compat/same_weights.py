"""Ensures that backward reads the weights that its forward read.

Between the two a program may, say, evaluate with averaged weights and restore them. Every forward refills the layers' buffers
of weights and adapters, so a backward after another forward refills them first. Weights changed in place since are refused, as
torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

VERSION = attrgetter("_version")  # how often torch has seen a weight changed


TRAINS = attrgetter("requires_grad")


class Stamp(NamedTuple):
    weights: Sequence[Tensor]
    versions: list[int]
    trains: list[bool]


def stamp(weights: Sequence[Tensor]) -> Stamp:
    return Stamp(weights, list(map(VERSION, weights)), list(map(TRAINS, weights)))


class Prepared(Protocol):
    """FastCausalLM, as used here."""

    prepared: int  # how often

    def prepare(self, dtype: torch.dtype) -> None: ...


class Weights:
    """As one forward found them."""

    def __init__(self, model: Prepared, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.prepared = model.prepared

    def restore(self) -> bool:
        """Before a layer's backward. Returns whether another forward had replaced them."""
        others = self.model.prepared != self.prepared
        if others:
            self.model.prepare(self.dtype)
            self.prepared = self.model.prepared
        return others


@contextmanager
def as_at_forward(
    weights: Weights | None, then: Stamp | None, now: Callable[[], Sequence[Tensor]], where: str
) -> Iterator[bool]:
    """Around a backward; yields whether another forward came in between. `requires_grad` is as at the forward: loops that train
    two parts alternately may have switched."""
    if weights is None or then is None:
        yield False
        return
    switched = [weight for weight, trains in zip(then.weights, then.trains, strict=True) if weight.requires_grad is not trains]
    for weight in switched:
        weight.requires_grad_(not weight.requires_grad)
    try:
        others = weights.restore()
        require_same(then, now(), where)
        yield others
    finally:
        for weight in switched:
            weight.requires_grad_(not weight.requires_grad)


def require_same(then: Stamp, now: Sequence[Tensor], where: str) -> None:
    if len(then.weights) != len(now) or not all(map(is_, then.weights, now)):
        raise RuntimeError(
            f"the weights of {where} changed between forward and backward: call backward before replacing "
            "weights or switching adapters"
        )
    versions = list(map(VERSION, now))
    if versions != then.versions:
        shape, was, found = next(
            (list(weight.shape), was, found)
            for weight, was, found in zip(now, then.versions, versions, strict=True)
            if was != found
        )
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a weight of "
            f"{where}, {shape}, is at version {found}; expected version {was} instead. Call backward before the "
            "optimizer's step, or compute the loss again after it"
        )
