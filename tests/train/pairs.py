"""A preference objective as a user of the interface would write it: the rows 2i and 2i + 1 of a table are the better and the
worse answer to one question, and a reference is the model without its adapter (DPO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pronghorn.data.pack.loader import evaluation_batches
from pronghorn.data.pack.packing import TokenRows
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.objectives.objective import Autocast, Objective, outputs_of
from samples import ListTable


class Pairs(Objective):
    together = 2

    def __init__(self, beta: float = 0.5) -> None:
        self._beta = beta
        self.references: dict[int, dict[int, Tensor]] = {}  # of a table: of a row: log-probabilities of its labels

    def loss(self, log_probs_N: Tensor, batch: PackedBatch) -> Tensor:
        margins, real = self._pairs(log_probs_N - batch.given_KN[0], batch)
        return (-F.logsigmoid(self._beta * margins) * real).sum()

    def count(self, batch: PackedBatch) -> Tensor:
        return self._pairs(torch.zeros_like(batch.loss_rows, dtype=torch.float32), batch)[1].sum()

    def prepare(self, model: Any, table: TokenRows, device: torch.device, autocast: Autocast) -> None:
        if id(table) in self.references:
            return
        self.references[id(table)] = found = {}
        with torch.no_grad(), model.disable_adapter(), autocast():
            for batch in evaluation_batches(table, 512, together=2):
                log_probs_N = outputs_of(model, batch.to(device)).values_N.cpu()
                counts = table.loss_counts[list(batch.documents)].tolist()
                found.update(zip(batch.documents, log_probs_N.split(counts), strict=True))

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        given_KN = torch.zeros(1, len(batch.loss_rows))
        known = [self.references[id(table)][row] for row in batch.documents]
        given_KN[0, batch.labels_T[batch.loss_rows] != IGNORED] = torch.cat(known)
        return replace(batch, given_KN=given_KN)

    def _pairs(self, values_N: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Better less worse of each pair; and which pairs are documents, not padding."""
        places = torch.searchsorted(batch.cu_seqlens, batch.loss_rows, right=True) - 1
        size = 2 * (-(-len(batch.cu_seqlens) // 2))
        sums = values_N.new_zeros(size).index_add(0, places, values_N)
        labels = torch.zeros_like(sums).index_add(0, places, (batch.labels_T[batch.loss_rows] != IGNORED).to(sums.dtype))
        return sums[0::2] - sums[1::2], (labels[0::2] * labels[1::2] > 0).to(sums.dtype)


def pair_table(pairs: int, seed: int = 0) -> ListTable:
    """Questions with a better answer that ends in low tokens and a worse one that ends in high ones."""
    random = np.random.default_rng(seed)
    rows, marks = [], []
    for _ in range(pairs):
        question = random.integers(3, 250, int(random.integers(3, 20))).tolist()
        for low in (3, 130):
            answer = random.integers(low, low + 100, int(random.integers(2, 15))).tolist()
            rows.append(question + answer)
            marks.append([False] * len(question) + [True] * len(answer))
    return ListTable(rows, marks)
