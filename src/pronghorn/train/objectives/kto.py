"""KTO: answers marked as good or bad, each by itself, against a reference and the step's divergence from it.

    r_d        = log p(answer d) - log p_ref(answer d)
    kto        good: w_g (1 - sigma(beta (r_d - z)))     bad: w_b (1 - sigma(beta (z - r_d)))
    apo_zero   good: w_g (1 - sigma(beta r_d))           bad: w_b sigma(beta r_d)

z estimates KL(p, p_ref): the mean of r over mismatched documents, each prompt of the step with the answer of the row before it
in the table, at least 0. They pass the model without gradient before the step (TRL does the same for every micro-batch), so z
is the same however rows fall into packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pronghorn.data.pack.batches import build_batch
from pronghorn.data.pack.loader import StepBatch
from pronghorn.data.pack.packing import TokenRows, pack_in_order
from pronghorn.hf_types import HFModel
from pronghorn.packs import PackedBatch
from pronghorn.train.dist.world import World
from pronghorn.train.objectives.objective import Autocast, Objective, outputs_of
from pronghorn.train.objectives.preference import answers_of
from pronghorn.train.objectives.reference import Reference

HELD_OUT = 256  # rows of a table whose mismatched documents are enough for an evaluation's z


class Mismatched:
    """The table's prompts, each with the answer of the row before; cut to the longest row of the table."""

    def __init__(self, table: TokenRows) -> None:
        self._table = table
        self._answers = np.array([self._answer_at(row) for row in range(len(table))], dtype=np.int64)
        before = np.roll(np.arange(len(table)), 1)
        answers = table.lengths[before] - self._answers[before]
        self.lengths: npt.NDArray[np.int32] = np.minimum(self._answers + answers, table.lengths.max()).astype(np.int32)
        self.loss_counts: npt.NDArray[np.int32] = np.array(
            [int(self.loss(row)[1:].sum()) for row in range(len(table))], dtype=np.int32
        )

    def _answer_at(self, row: int) -> int:
        marks = self._table.loss(row)
        return int(np.argmax(marks)) if marks.any() else len(marks)

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, i: int) -> npt.NDArray[np.int32]:
        return self._joined(i, self._table.ids(i), self._table.ids(i - 1 if i else len(self) - 1))

    def loss(self, i: int) -> npt.NDArray[np.bool_]:
        return self._joined(i, self._table.loss(i), self._table.loss(i - 1 if i else len(self) - 1))

    def _joined(self, i: int, mine: npt.NDArray[Any], other: npt.NDArray[Any]) -> npt.NDArray[Any]:
        joined: npt.NDArray[Any] = np.concatenate([mine[: self._answers[i]], other[self._answers[i - 1] :]])
        return joined[: self.lengths[i]]


class Kto(Objective):
    needs: ClassVar[tuple[str, ...]] = ("reference", "capacity")
    scores: ClassVar[tuple[str, ...]] = ("rewards/margins",)
    watched: ClassVar[tuple[str, ...]] = (
        "chosen",
        "rejected",
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
        "kl",
        "batches",
    )

    def __init__(
        self,
        reference: Reference,
        capacity: int,
        *,
        beta: float = 0.1,
        loss: str = "kto",
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        self.reference, self.beta, self.kind = reference, beta, loss
        self._capacity, self._weights = capacity, (desirable_weight, undesirable_weight)
        self._tables: dict[int, Mismatched] = {}
        self._training: TokenRows | None = None
        self.divergence = torch.zeros(())  # z, on the device of the model, where a captured step reads it

    def loss(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        answers = answers_of(log_probs_N, batch)
        rewards = self.beta * (answers.log_ratios - self.divergence)
        good = self._weights[0] * (1 - torch.sigmoid(rewards))
        bad = self._weights[1] * torch.sigmoid(rewards)
        costs = torch.where(answers.roles_D == 0, good, bad)
        return torch.where(answers.roles_D >= 0, costs, 0.0).sum()

    def count(self, batch: PackedBatch) -> Tensor:
        assert batch.roles_D is not None
        return (batch.roles_D >= 0).sum()

    def watch(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        answers = answers_of(log_probs_N, batch)
        good, bad = ((answers.roles_D == role).to(log_probs_N.dtype) for role in (0, 1))
        rewards = self.beta * answers.log_ratios
        sums = [good, bad, good * rewards, bad * rewards, good * answers.log_probs_D, bad * answers.log_probs_D]
        return torch.cat([torch.stack(sums).sum(1), self.divergence[None], torch.ones_like(self.divergence)[None]])

    def figures(self, watched: Sequence[float]) -> dict[str, float]:
        found = dict(zip(self.watched, watched, strict=True))
        shown = {"kl": found["kl"] / max(1.0, found["batches"])}
        for kind in ("chosen", "rejected"):
            if found[kind]:
                shown |= {f"{name}/{kind}": found[f"{name}/{kind}"] / found[kind] for name in ("rewards", "logps")}
        if found["chosen"] and found["rejected"]:
            shown["rewards/margins"] = shown["rewards/chosen"] - shown["rewards/rejected"]
        return shown

    # ---- the reference, and the divergence from it -------------------------------------------------------------------

    def prepare(self, model: HFModel, table: TokenRows, device: torch.device, autocast: Autocast) -> None:
        self.reference.prepare(model, table, device, autocast, trained=self.trained, progress=self.progress)
        if self._training is None:
            self._training, self.divergence = table, self.divergence.to(device)
        if self.kind != "kto":
            return
        if id(table) not in self._tables:
            self._tables[id(table)] = Mismatched(table)
            self.reference.prepare(
                model, self._tables[id(table)], device, autocast, trained=self.trained, progress=self.progress
            )
        if table is not self._training:
            rows = np.arange(min(len(table), HELD_OUT))
            self._estimate(model, self._tables[id(table)], rows, device, autocast, World())

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        return self.reference.complete(batch, table)

    def before_step(
        self, model: HFModel, step_batch: StepBatch, device: torch.device, autocast: Autocast, world: World
    ) -> None:
        if self.kind == "kto" and self._training is not None:
            self._estimate(model, self._tables[id(self._training)], step_batch.documents, device, autocast, world)

    @torch.no_grad()
    def _estimate(
        self,
        model: HFModel,
        table: Mismatched,
        rows: npt.NDArray[np.int64],
        device: torch.device,
        autocast: Autocast,
        world: World,
    ) -> None:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for members in pack_in_order(table.lengths[rows], self._capacity):
            batch = self.reference.complete(build_batch(table, rows[members], self._capacity), table).to(device)
            assert batch.given_KN is not None
            with autocast():
                found = outputs_of(model, batch).values_N
            total += (found - batch.given_KN[0])[: batch.loss_tokens].sum(dtype=torch.float64)
        summed, count = world.total(float(total), len(rows))
        self.divergence.fill_(max(0.0, summed / max(1.0, count)))
