"""Sums of batches without gradients, replayed as CUDA graphs: evaluations take them, over and over.

The eager forward of a small model waits for its launches most of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pronghorn.hf_types import HFModel
from pronghorn.model.capture import Graphs, Work, first_line
from pronghorn.model.causal_lm import engine_of
from pronghorn.packs import PackedBatch
from pronghorn.train.objectives.objective import Sums

EAGER_FIRST = 4  # packs of each shape: a capture takes as long as several of them


@dataclass
class _Held:
    """A shape's inputs, the work on them, and where it leaves its sums."""

    inputs: PackedBatch
    sums: Sums
    replay: Work


class GraphedSums:
    def __init__(
        self,
        model: HFModel,
        run: Callable[[PackedBatch], Sums],
        graphs: Graphs,
        say: Callable[[str], None],
        device: torch.device,
    ) -> None:
        """`run`: on a batch that is on the device. `graphs`: the training step's; both use one pool, as they never run at
        once."""
        self._model, self._run, self._graphs, self._say, self._device = model, run, graphs, say, device
        self._held: dict[tuple[Any, ...], _Held] = {}
        self._met = Counter[tuple[Any, ...]]()
        self._built = 0  # the engine's `rebuilt` that the graphs belong to
        self.captures = True  # until a capture fails

    def __call__(self, batch: PackedBatch) -> Sums:
        """The model is in evaluation mode, without gradients."""
        if self._built != self._rebuilt:
            self.forget()
        held = self._held.get(batch.shape)
        if held is None and self.captures and self._graphs.captures:
            self._met[batch.shape] += 1
            held = self._capture(batch) if self._met[batch.shape] > EAGER_FIRST else None
        if held is None:
            return self._run(batch.to(self._device))
        held.inputs.copy_from(batch)
        held.replay()
        return _each(held.sums, torch.clone)  # the next replay of any graph writes over them

    def forget(self) -> None:
        self._held.clear()

    @property
    def _rebuilt(self) -> int:
        engine = engine_of(self._model)
        return 0 if engine is None else engine.rebuilt

    def _capture(self, batch: PackedBatch) -> _Held | None:
        """Held against the eager sums, bit for bit. Tried twice, as training's first capture is (model/capture.py)."""
        inputs = batch.map(lambda tensor: tensor.to(self._device, copy=True))
        for last in (False, True):
            left: list[Sums] = []
            try:
                self._graphs.attempt(lambda: left.append(_each(self._run(inputs), torch.clone)))  # noqa: B023  (runs here)
                (replay,) = self._graphs.capture([lambda: left.append(self._run(inputs))])  # noqa: B023
                replay()
            except RuntimeError as error:
                if last:
                    self._give_up(first_line(error))
                continue
            eager, replayed = left
            if _differ(eager, replayed):
                self._give_up("a replay's sums differ from the eager ones")
                break
            self._built = self._rebuilt
            self._held[batch.shape] = _Held(inputs, replayed, replay)
            return self._held[batch.shape]
        return None

    def _give_up(self, why: str) -> None:
        self.captures = False
        self._say(f"evaluations run eagerly, without a CUDA graph: {why}")


def _each(sums: Sums, change: Callable[[torch.Tensor], torch.Tensor]) -> Sums:
    return Sums(*(None if one is None else change(one) for one in sums))  # type: ignore[arg-type]


def _differ(one: Sums, other: Sums) -> bool:
    pairs = zip(one, other, strict=True)
    return any(mine is not None and theirs is not None and not mine.equal(theirs) for mine, theirs in pairs)
