"""What feeds a run: a source of optimizer steps.

A source is made from recipe and tokenizer, before weights load. It then knows how many steps there are, the shapes of its
packs, and the keys by which a resumed run recognizes its data. It need not know its rows: one that makes them during the run
(with the model, as it stands before the step) declares its shapes by capacity.

Where a source stands is a `State`, opaque JSON. Each step carries the state that follows it; a checkpoint keeps that of the
last finished step, and `start` goes on from there with the same steps. So a source draws no random numbers of the run: what it
makes follows from recipe, state and weights. Each step also carries its rows, so that what looks for the cause of a bad step
asks the step, not the source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch

from pronghorn.data.encode.tokens import TokenRow, TokenTable
from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import State, StepBatch, StepPacking
from pronghorn.data.pack.packing import Packs, pack_in_order
from pronghorn.data.pack.parts import Deal
from pronghorn.data.preference.pair_packing import groups_of
from pronghorn.data.read.selection import Selection
from pronghorn.hf_types import HFModel, Tokenizer
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Recipe
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective
from pronghorn.train.objectives.objective import Autocast
from pronghorn.train.run.evaluate import Evaluation
from pronghorn.train.step.step import StageTimer

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Foreseen:
    """What `pronghorn plan` asks of a run's rows, before they are read."""

    tokens: int | None = None  # of the whole run; None: nobody knows
    estimated: bool = False  # `tokens` are not counted
    rows: dict[str, Any] = field(default_factory=dict)  # loss_share, attended, row_tokens (memory/forecast.py), if known


class Source(ABC):
    stage: ClassVar[str] = "wait"  # what the time of `next` is booked as
    ahead: ClassVar[bool] = True  # whether `next` may be called while steps are under way; else all of them are finished first

    recipe: Recipe
    total: int  # optimizer steps
    shapes: Shapes  # that packs are padded to
    pad_id: int
    known: Sequence[TokenTable] = ()  # rows that are known before the run: an objective may look at them. Held-out rows last
    held_out: TokenTable | None = None  # rows to evaluate on
    selection: Selection | None = None  # of data.select
    packs_per_step: int = 0  # on average; 0: as the recipe says
    evaluates: ClassVar[bool] = False  # whether it measures the model itself (`evaluate`), and not the objective's loss

    # ---- before the model loads ----------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def of(cls, recipe: Recipe, tokenizer: Tokenizer, *, report: Report, stage: StageTimer) -> Self:
        """Reads and refuses whatever can be refused without the model."""

    @classmethod
    def foreseen(cls, recipe: Recipe) -> Foreseen:
        """Without reading anything that takes long."""
        return Foreseen()

    @staticmethod
    @abstractmethod
    def require_state(state: object) -> None:
        """ValueError or TypeError if a checkpoint's state is none of this kind of source."""

    @property
    @abstractmethod
    def keys(self) -> dict[str, str]:
        """By which a resumed run recognizes its `data`, its `held_out` rows and its `select`ion (run_identity.py)."""

    @property
    def selected(self) -> dict[str, str]:
        """What `keys` has of the selection."""
        return self.selection.key if self.selection else {}

    @abstractmethod
    def summary(self) -> dict[str, Any]:
        """For the log and `check`: plain values, by the names that report/ reads; what is not known is absent."""

    def notices(self) -> list[str]:
        """What is allowed but probably not meant."""
        return []

    def dealt(self, ranks: int) -> list[str]:
        """Refuses what cannot be dealt out to so many ranks; returns what should be told."""
        return []

    def checked(self, report: Report) -> dict[str, Any]:
        """What only `check` shows, since it takes long: fields of `check.Facts`, `copies` for one."""
        return {}

    def device_bytes(self, element: int) -> int:
        """Memory of the device beside steps. `element`: bytes of a number in the run's precision."""
        return 0

    # ---- during the run ------------------------------------------------------------------------------------------

    def example(self) -> PackedBatch:
        """A batch of the run's shapes, by which a layer is timed. Here: rows of the longest length."""
        rows, packs = self._longest_rows(self.shapes.longest)
        return build_batch(rows, packs[0], self.recipe.train.capacity, self.pad_id, self.shapes)

    def start(
        self,
        state: State | None,
        *,
        objective: Objective,
        world: World,
        device: torch.device,
        autocast: Autocast,
        even: bool = False,
    ) -> None:
        """Before the first `next`; `state`: a checkpoint's. `even`: every rank has as many packs as any other."""
        self.objective, self.world, self.device, self.autocast = objective, world, device, autocast
        self.packing = StepPacking(
            self.recipe.train.capacity,
            self.pad_id,
            self.shapes,
            objective.complete,
            deal=Deal(world.rank, world.size, self.recipe.world.context),
            even=even or self.recipe.world.context > 1,  # they gather in each pack
            pin=device.type == "cuda",
        )

    def _longest_rows(self, longest: int) -> tuple[TokenTable, Packs]:
        """A pack of them: all that is known of rows that are made during the run."""
        capacity = self.recipe.train.capacity
        row = TokenRow(np.full(longest, self.pad_id, np.int32), ((0, longest),), "")
        table = TokenTable.of([row] * (capacity // longest))
        return table, pack_in_order(table.lengths, capacity)

    def declared(self, longest: int) -> Shapes:
        """Shapes that any pack fits, of rows that are made during the run, of up to so many tokens."""
        return Shapes.planned(*self._longest_rows(longest), self.recipe.train.capacity)

    def made(self, rows: Sequence[TokenRow], after: State, epoch: float) -> StepBatch:
        """A step of rows that were made for it: the same on all ranks, which share its packs."""
        table = TokenTable.of(rows)
        packs = pack_in_order(groups_of(table, self.objective.together), self.packing.capacity)
        return self.packing.step(table, list(packs), after, epoch)

    def evaluate(self, model: HFModel) -> Evaluation:
        """Measures the model on held-out rows, if it `evaluates`. On all ranks."""
        raise NotImplementedError

    def worth(self, said: Sequence[tuple[int, str]]) -> list[dict[str, float]]:
        """Rewards, by name, of answers to held-out rows; nothing where a row's answer has none."""
        return []

    @abstractmethod
    def next(self, model: HFModel) -> StepBatch:
        """The next step. `model`: with the weights after the step before, unless `ahead`."""
