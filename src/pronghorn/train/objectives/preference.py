"""What preference objectives have in common: log-probabilities of whole answers, and the comparison of chosen with rejected.

N = loss rows, D = slots for documents (data/pack/batches.py), C = terms of the loss. An answer's log-probability is the sum of
its labels', its score the sum or the mean of them, less the reference's where there is one. Every rejected answer is a
comparison with the chosen one of its group. The loss is a mean over the comparisons of the step; with a supervised part, its
second term is a mean over the labels of the chosen answers. So it does not depend on how groups fall into packs.

Sums over the rows of a document go through a mask [D, N] and not through index_add, whose order on a GPU changes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.data.pack.packing import TokenRows
from pronghorn.hf_types import HFModel
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.objectives.objective import Autocast, Objective
from pronghorn.train.objectives.reference import Reference
from pronghorn.train.objectives.watch import Watch


class Answers(NamedTuple):
    """Figures of each document slot."""

    log_probs_D: Tensor  # sums
    reference_D: Tensor  # the reference's, 0 without one
    labels_D: Tensor  # how many there are, at least 1
    roles_D: Tensor

    @property
    def log_ratios(self) -> Tensor:
        """[D]"""
        return self.log_probs_D - self.reference_D

    def means(self, sums_D: Tensor) -> Tensor:
        return sums_D / self.labels_D


def answers_of(log_probs_N: Tensor, batch: PackedBatch) -> Answers:
    assert batch.document_N is not None, "not a table of preference data"
    assert batch.roles_D is not None
    slots = torch.arange(len(batch.roles_D), device=log_probs_N.device)
    mine_DN = batch.document_N[None] == slots[:, None]

    def sums(values_N: Tensor) -> Tensor:
        return torch.where(mine_DN, values_N[None], 0.0).sum(1)

    reference = torch.zeros_like(log_probs_N) if batch.given_KN is None else batch.given_KN[0].to(log_probs_N.dtype)
    labels_D = sums((batch.row_labels != IGNORED).to(log_probs_N.dtype)).clamp(min=1.0)
    return Answers(sums(log_probs_N), sums(reference), labels_D, batch.roles_D)


def preferred(deltas: Tensor, smoothing: float) -> Tensor:
    """-log of the probability that the better answer is preferred; `smoothing`: the share of pairs the wrong way round."""
    loss = -F.logsigmoid(deltas)
    return loss if smoothing == 0.0 else (1 - smoothing) * loss - smoothing * F.logsigmoid(-deltas)


class Preference(Objective):
    """Pairs. A subclass says what a comparison costs (`compared`), and what an answer's reward is (`shown`, `rewards`)."""

    beta: float
    scores: ClassVar[tuple[str, ...]] = ("rewards/accuracies", "rewards/margins")
    watched: ClassVar[tuple[str, ...]] = (
        "comparisons",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "shorter",  # comparisons whose chosen answer is the shorter one
        "accurate and shorter",
    )

    def __init__(self, *, sft_weight: float = 0.0, reference: Reference | None = None) -> None:
        """`sft_weight`: of the chosen answers' supervised loss. `reference`: for objectives that compare with one."""
        self.sft_weight, self.reference = sft_weight, reference
        self.terms = 2 if sft_weight else 1
        self._watch = Watch()

    def rewards(self, answers: Answers) -> Tensor:
        """[D], as people read them."""
        return self.beta * self.shown(answers)

    @abstractmethod
    def compared(self, answers: Answers, firsts_D: Tensor) -> Tensor:
        """[D]: what each answer costs, compared with that at `firsts_D`; read where it is a rejected one. (Gather with
        index_select: a CUDA graph can replay its backward.)"""

    # ---- what the step calls -----------------------------------------------------------------------------------------

    def loss(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        answers = answers_of(log_probs_N, batch)
        assert batch.firsts_D is not None
        costs = torch.where(answers.roles_D > 0, self.compared(answers, batch.firsts_D), 0.0).sum()
        if not self.sft_weight:
            return costs
        supervised = -torch.where(answers.roles_D == 0, answers.log_probs_D, 0.0).sum()
        return torch.stack([costs, self.sft_weight * supervised])

    def count(self, batch: PackedBatch) -> Tensor:
        assert batch.roles_D is not None
        assert batch.document_N is not None
        comparisons = (batch.roles_D > 0).sum()
        if not self.sft_weight:
            return comparisons
        chosen = (batch.roles_D[batch.document_N] == 0) & (batch.row_labels != IGNORED)
        return torch.stack([comparisons, chosen.sum()])

    def watch(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        answers = answers_of(log_probs_N, batch)
        first, real = batch.firsts_D, (answers.roles_D > 0).to(log_probs_N.dtype)
        assert first is not None
        rewards = self.rewards(answers)
        accurate = (rewards[first] > rewards).to(real) * real
        shorter = (answers.labels_D[first] < answers.labels_D).to(real) * real
        found = [real, real * rewards[first], real * rewards, accurate, real * (rewards[first] - rewards)]
        shown = self.shown(answers)
        found += [real * shown[first], real * shown, shorter, accurate * shorter]
        return torch.stack(found).sum(1)

    def shown(self, answers: Answers) -> Tensor:
        """[D]: the log-probabilities that people read."""
        return answers.log_probs_D

    def figures(self, watched: Sequence[float]) -> dict[str, float]:
        found = dict(zip(self.watched, watched, strict=True))
        count = max(1.0, found.pop("comparisons"))
        shorter, right = found.pop("shorter"), found.pop("accurate and shorter")
        means = {name: total / count for name, total in found.items()}
        return means | ({"rewards/accuracies_shorter": right / shorter} if shorter else {})

    def remarks(self, step: int, figures: Mapping[str, float]) -> list[str]:
        return self._watch.look(step, figures, None)

    def prepare(self, model: HFModel, table: TokenRows, device: torch.device, autocast: Autocast) -> None:
        if self.reference is not None:
            self.reference.prepare(model, table, device, autocast, trained=self.trained, progress=self.progress)

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        return batch if self.reference is None else self.reference.complete(batch, table)
