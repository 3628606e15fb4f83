"""A reward model: Bradley-Terry on scores that a linear head reads at the end of each answer (model/heads/score.py).

    cost = -log sigma(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2          c: center_weight

A mean over the comparisons of the step. The margin is the pair's, 0 where the data has none. A batch's loss rows are one for
each document slot: the document's last token that is not padding, which is where transformers' classifier reads, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.data.pack.packing import TokenRows
from pronghorn.data.preference.pair_packing import ends_of
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.objectives.objective import Objective
from pronghorn.train.objectives.watch import Watch


class Reward(Objective):
    """Figures have the names of TRL's RewardTrainer (whose least and greatest reward of a batch are no sums, and left out)."""

    needs: ClassVar[tuple[str, ...]] = ("pad_id",)
    scores: ClassVar[tuple[str, ...]] = ("accuracy", "margin")
    watched: ClassVar[tuple[str, ...]] = ("comparisons", "answers", "accuracy", "margin", "mean_reward")

    def __init__(self, pad_id: int, *, center_weight: float = 0.0) -> None:
        self._pad_id, self.center = pad_id, center_weight
        self._watch = Watch()

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        assert batch.roles_D is not None, "not a table of preference data"
        slots, tokens = len(batch.roles_D), len(batch.ids_T)
        ends = ends_of(table, np.array(batch.documents, np.int64), self._pad_id)
        rows, labels = torch.full((slots,), tokens - 1), torch.full((slots,), IGNORED)
        rows[: len(ends)], labels[: len(ends)] = torch.from_numpy(ends), 0  # any label: it marks what is no padding
        return replace(batch, loss_rows=rows, labels_N=labels, document_N=torch.arange(slots))

    def loss(self, scores_N: Tensor, batch: PackedBatch) -> Tensor:
        scores_D = _of_slots(scores_N, batch)
        assert batch.firsts_D is not None
        assert batch.margins_D is not None
        assert batch.roles_D is not None
        chosen_D = scores_D.index_select(0, batch.firsts_D)
        costs_D = -F.logsigmoid(chosen_D - scores_D - batch.margins_D)
        if self.center:
            costs_D = costs_D + self.center * (chosen_D + scores_D) ** 2
        return torch.where(batch.roles_D > 0, costs_D, 0.0).sum()

    def count(self, batch: PackedBatch) -> Tensor:
        assert batch.roles_D is not None
        return (batch.roles_D > 0).sum()

    def watch(self, scores_N: Tensor, batch: PackedBatch) -> Tensor:
        scores_D = _of_slots(scores_N, batch)
        assert batch.roles_D is not None
        rejected, answers = ((batch.roles_D >= least).to(scores_D.dtype) for least in (1, 0))
        ahead = scores_D[batch.firsts_D] - scores_D
        found = [rejected, answers, rejected * (ahead > 0), rejected * ahead, answers * scores_D]
        return torch.stack(found).sum(1)

    def figures(self, watched: Sequence[float]) -> dict[str, float]:
        comparisons, answers, accurate, margins, total = watched
        count = max(1.0, comparisons)
        return {"accuracy": accurate / count, "margin": margins / count, "mean_reward": total / max(1.0, answers)}

    def remarks(self, step: int, figures: Mapping[str, float]) -> list[str]:
        return self._watch.look(step, {"rewards/accuracies": figures["accuracy"]}, None)


def _of_slots(scores_N: Tensor, batch: PackedBatch) -> Tensor:
    """[D]; 0 of a slot without a row, as in a beginning of a batch (`PackedBatch.beginning`)."""
    assert batch.document_N is not None
    assert batch.roles_D is not None
    return scores_N.new_zeros(len(batch.roles_D)).index_copy(0, batch.document_N, scores_N)
