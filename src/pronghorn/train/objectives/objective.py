"""What every objective is: a function of what the model's head gives of a packed batch's loss rows (model/head.py). Of the
LM head these are the log-probabilities of labels, never logits; of a reward model, scores.

An objective says how they become a loss, and what the step's summed loss is divided by. It may keep rows of the data together
in one pack (the two answers of a preference pair), look at the model before the first step (a reference's log-probabilities),
and give the loss rows of every batch numbers of its own. Steps, evaluation and the search for rows that break a step call
`sums` and `count`, and know nothing else about it. What others need to know of it is in its row of recipe_objective.py.

A loss of several terms, each a mean over something else (pairs; tokens of the chosen answers), has a sum and a count for each.
What people watch (rewards, accuracies) are further sums of the same forward.

N = loss rows of the batch, K = numbers that the objective keeps for each of them, C = terms of the loss, W = watched sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pronghorn.data.pack.loader import StepBatch
from pronghorn.data.pack.packing import TokenRows
from pronghorn.data.pack.parts import loss_places
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.head import Outputs
from pronghorn.model.heads import head_in
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.dist.world import World

Autocast = Callable[[], AbstractContextManager[Any]]
Progress = Callable[[str, int, int], None]  # what, how many are done, of how many

Divisor = float | tuple[float, ...]  # of each term


class Sums(NamedTuple):
    """Summed loss and watched figures of a batch."""

    loss: Tensor  # float32: a number, or [C]
    watched: Tensor | None = None  # [W] float32, detached
    rows_N: Tensor | None = None  # the loss of each loss row, detached, where the loss is their sum


class Objective(ABC):
    needs: ClassVar[tuple[str, ...]] = ()  # what it is made of beside its parameters: reference, capacity, pad_id
    terms = 1  # C
    watched: ClassVar[tuple[str, ...]] = ()  # what the W sums are; `figures` makes what people read of them
    scores: ClassVar[tuple[str, ...]] = ()  # figures that are better when they are higher: eval.best may name one
    spikes: ClassVar[bool] = True  # whether a loss far above those before it means trouble
    has_rows: ClassVar[bool] = False  # whether `sums` gives the loss of each loss row
    trained = False  # whether all weights train and have: the model is no longer its own reference
    progress: Progress = staticmethod(lambda *_: None)  # told of what takes long before the first step
    together = 1  # rows of the table, one after the other, that stay in one pack, side by side

    @abstractmethod
    def loss(self, values_N: Tensor, batch: PackedBatch) -> Tensor:
        """The batch's summed loss, float32, or the sums of its terms. `values_N`: of each of `batch.loss_rows`. Captured in a
        CUDA graph: shapes are those of the batch, and nothing asks the device for a number."""

    def count(self, batch: PackedBatch) -> Tensor:
        """What the batch adds to the number that the step's summed loss is divided by: its labels. [C] if there are several
        terms. From its tensors alone, on their device."""
        return (batch.labels_T != IGNORED).sum()

    def watch(self, values_N: Tensor, batch: PackedBatch) -> Tensor | None:
        """[W], under the same rules as `loss`; not differentiated."""
        return None

    def figures(self, watched: Sequence[float]) -> dict[str, float]:
        """What people read, of the W sums of a whole step or evaluation. On the host."""
        return {}

    def remarks(self, step: int, figures: Mapping[str, float]) -> list[str]:
        """What to tell people of a step's figures."""
        return []

    def prepare(  # noqa: B027  (most objectives need nothing)
        self, model: HFModel, table: TokenRows, device: torch.device, autocast: Autocast
    ) -> None:
        """Before the first step on `table`, and before each evaluation on it: what has to be known of its rows. The model may
        be in the middle of training: a reference is its base, without adapters."""

    def before_step(  # noqa: B027
        self, model: HFModel, step_batch: StepBatch, device: torch.device, autocast: Autocast, world: World
    ) -> None:
        """Outside of what is captured, before the step's batches: what its loss needs to know of all of them."""

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        """On the host, in the loader's threads: the batch with `given_KN`, if the objective has numbers for its loss rows."""
        return batch

    # ---- what steps and evaluation call --------------------------------------------------------------------------

    def loss_sum(self, model: HFModel, batch: PackedBatch) -> Tensor:
        """The batch's summed loss, and in training the routers' auxiliary loss. The head is computed for the loss rows only."""
        return self.sums(model, batch).loss

    def sums(self, model: HFModel, batch: PackedBatch) -> Sums:
        found = outputs_of(model, batch)
        total = self.loss(found.values_N, batch)
        if found.balance is not None:
            count = self.count(batch)
            first = count if self.terms == 1 else torch.cat([count[:1], torch.zeros_like(count[1:])])
            total = total + found.balance * first
        with torch.no_grad():
            return Sums(total, self.watch(found.values_N.detach(), batch))

    def divisor(self, step_batch: StepBatch, world: World) -> Divisor:
        """The divisor of the whole step, so that the loss does not depend on how its rows fell into micro-batches and ranks."""
        counts = torch.stack([self.count(batch).reshape(self.terms) for batch in step_batch.batches]).sum(0)
        found = world.total(*counts.tolist())
        return found[0] if self.terms == 1 else tuple(max(1.0, count) for count in found)


def document_losses(batch: PackedBatch, rows_N: Tensor) -> npt.NDArray[np.float64]:
    """Summed loss of each document of a batch, in float64 and in one order. The batch is on the host. `rows_N`: as in
    `Sums`."""
    return losses_between(loss_borders(batch), rows_N)


def loss_borders(batch: PackedBatch) -> npt.NDArray[np.int64]:
    """Where the loss rows of each document begin, and where the last one's end. The batch is on the host."""
    return np.searchsorted(loss_places(batch).numpy(), batch.cu_seqlens.numpy()[: len(batch.documents) + 1])


def losses_between(borders: npt.NDArray[np.integer], rows_N: Tensor) -> npt.NDArray[np.float64]:
    return np.diff(np.concatenate([[0.0], rows_N.cpu().double().numpy().cumsum()])[borders])


def mean_of(sums: Tensor, divisor: Divisor) -> Tensor:
    """The loss: each term's sum divided by its count."""
    if isinstance(divisor, tuple):
        return (sums / torch.tensor(divisor, dtype=sums.dtype, device=sums.device)).sum()
    return sums / divisor


def outputs_of(model: HFModel, batch: PackedBatch) -> Outputs:
    """What the model's head gives of each loss row, differentiable, on whatever layers the model has."""
    engine, base = engine_of(model), base_of(model)
    if engine is not None:
        return engine.head.outputs(engine.packed_rows(batch))
    return head_in(base.config).own_outputs(base, batch)
