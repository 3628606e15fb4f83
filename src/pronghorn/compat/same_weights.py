"""Ensures that backward reads the weights that its forward read.

Between the two a program may, say, evaluate with averaged weights and restore them. Every forward refills the layers' buffers
of weights and adapters, so a backward after another forward refills them first. Weights changed in place since are refused, as
torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import attrgetter, is_
from typing import NamedTuple

import torch
from torch import Tensor

from pronghorn.model.causal_lm import FastCausalLM

VERSION = attrgetter("_version")  # how often torch has seen a weight changed
TRAINS = attrgetter("requires_grad")


class Stamp(NamedTuple):
    weights: Sequence[Tensor]
    versions: list[int]
    trains: list[bool]


def stamp(weights: Sequence[Tensor]) -> Stamp:
    return Stamp(weights, list(map(VERSION, weights)), list(map(TRAINS, weights)))


class SameWeights:
    """The guard (model/layers/types.py) of one forward; all layers share it."""

    def __init__(self, engine: FastCausalLM, dtype: torch.dtype) -> None:
        self.engine, self.dtype = engine, dtype
        self._prepared: int | None = None  # which `prepare` filled the buffers; known when the first layer runs

    def remember(
        self, weights: Sequence[Tensor], now: Callable[[], Sequence[Tensor]], where: str
    ) -> Callable[[], AbstractContextManager[bool]]:
        """What to enter around the backward; gives whether another forward came in between. `requires_grad` is there as at
        the forward: loops that train two parts alternately may have switched."""
        if self._prepared is None:
            self._prepared = self.engine.prepared
        return partial(self._as_at_forward, stamp(weights), now, where)

    @contextmanager
    def _as_at_forward(self, then: Stamp, now: Callable[[], Sequence[Tensor]], where: str) -> Iterator[bool]:
        switched = [
            weight for weight, trains in zip(then.weights, then.trains, strict=True) if weight.requires_grad is not trains
        ]
        for weight in switched:
            weight.requires_grad_(not weight.requires_grad)
        try:
            others = self._restore()
            require_same(then, now(), where)
            yield others
        finally:
            for weight in switched:
                weight.requires_grad_(not weight.requires_grad)

    def _restore(self) -> bool:
        """Returns whether another forward had refilled the buffers."""
        others = self.engine.prepared != self._prepared
        if others:
            self.engine.prepare(self.dtype)
            self._prepared = self.engine.prepared
        return others


def require_same(then: Stamp, now: Sequence[Tensor], where: str) -> None:
    if len(then.weights) != len(now) or not all(map(is_, then.weights, now)):
        raise RuntimeError(
            f"the weights of {where} changed between forward and backward: call backward before replacing "
            "weights or switching adapters"
        )
    if list(map(VERSION, now)) == then.versions:
        return
    for weight, was in zip(now, then.versions, strict=True):
        if weight._version != was:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a weight of "
                f"{where}, {list(weight.shape)}, is at version {weight._version}; expected version {was} instead. Call "
                "backward before the optimizer's step, or compute the loss again after it"
            )
