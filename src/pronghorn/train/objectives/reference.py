"""Log-probabilities of a reference: the same weights without adapters, in one packed pass without gradient, kept for the run.

Where all weights train, the reference is what they were before the first step, so it is computed then, for held-out rows too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.pack.loader import evaluation_batches
from pronghorn.data.pack.packing import TokenRows
from pronghorn.errors import RecipeError
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import running, without_adapters
from pronghorn.packs import IGNORED, PackedBatch
from pronghorn.train.objectives.objective import Autocast, Progress, outputs_of

Floats = npt.NDArray[np.float32]


class Store(Protocol):
    """Keeps the log-probabilities beyond the run's process."""

    def load(self, table: TokenRows) -> Floats | None: ...
    def save(self, table: TokenRows, values: Floats) -> None: ...


class Reference:
    """The reference's log-probabilities: for each table a number per label, in the order of its rows."""

    def __init__(self, capacity: int, store: Store | None = None) -> None:
        self._capacity, self._store = capacity, store
        self._known: dict[int, tuple[TokenRows, Floats, npt.NDArray[np.int64]]] = {}

    def prepare(
        self,
        model: HFModel,
        table: TokenRows,
        device: torch.device,
        autocast: Autocast,
        *,
        trained: bool = False,
        progress: Progress = lambda *_: None,
    ) -> None:
        """`trained`: all weights train and have changed, so a reference can no longer be computed."""
        if id(table) in self._known:
            return
        values = None if self._store is None else self._store.load(table)
        if values is None:
            if trained:
                raise RecipeError(
                    what="the reference model's log-probabilities are missing and cannot be recomputed",
                    why="with method: full, the reference is the model before the first step, and the weights have changed",
                    fix="restore the run's cache, or start over with --fresh (the old folder is renamed, not deleted)",
                )
            values = reference_log_probs(model, table, self._capacity, device, autocast, progress)
            if self._store is not None:
                self._store.save(table, values)
        begins = np.concatenate([[0], np.cumsum(table.loss_counts, dtype=np.int64)])
        self._known[id(table)] = (table, values, begins)

    def complete(self, batch: PackedBatch, table: TokenRows) -> PackedBatch:
        """Adds the reference's log-probabilities to a batch, as `given_KN` with K = 1."""
        _, values, begins = self._known[id(table)]
        given_N = torch.zeros(len(batch.loss_rows))
        if batch.documents:
            known = np.concatenate([values[begins[row] : begins[row + 1]] for row in batch.documents])
            given_N[batch.row_labels != IGNORED] = torch.from_numpy(known)
        return replace(batch, given_KN=given_N[None])


@torch.no_grad()
def reference_log_probs(
    model: HFModel,
    table: TokenRows,
    capacity: int,
    device: torch.device,
    autocast: Autocast,
    progress: Progress = lambda *_: None,
) -> Floats:
    """Log-probabilities of all labels of the table, row by row."""
    begins = np.concatenate([[0], np.cumsum(table.loss_counts, dtype=np.int64)])
    found = np.zeros(int(begins[-1]), dtype=np.float32)
    was_training = model.training
    model.eval()
    done = 0
    progress("scoring with the reference model", done, len(table))
    try:
        with without_adapters(model), autocast():
            for batch in evaluation_batches(table, capacity):
                outputs = running(model, lambda batch=batch: outputs_of(model, batch.to(device)))  # type: ignore[misc]
                log_probs = outputs.values_N[: batch.loss_tokens].float().cpu().numpy()
                at = 0
                for row in batch.documents:
                    count = int(table.loss_counts[row])
                    found[begins[row] : begins[row + 1]] = log_probs[at : at + count]
                    at += count
                done += len(batch.documents)
                progress("scoring with the reference model", done, len(table))
    finally:
        model.train(was_training)
    return found
