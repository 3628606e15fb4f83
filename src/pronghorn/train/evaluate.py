"""Held-out loss, a few generated answers, and the decision to go on."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pronghorn.data.batches import TokenRows, evaluation_batches
from pronghorn.errors import counted
from pronghorn.recipe import Stop
from pronghorn.train.objectives import loss_sum


@dataclass(frozen=True)
class Evaluation:
    loss: float
    tokens: int  # held-out tokens that carry loss

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # e**710 is beyond a float


@torch.no_grad()
def evaluate(model: Any, table: TokenRows, *, capacity: int, device: torch.device, pad_id: int,
             autocast: Callable[[], AbstractContextManager[Any]],
             progress: Callable[[str, int, int], None] | None = None) -> Evaluation:
    """Mean over all held-out tokens with loss: the same number for any capacity."""
    was_training = model.training
    model.eval()
    total, count, seen = torch.zeros((), dtype=torch.float64, device=device), 0, 0
    for batch in evaluation_batches(table, capacity, pad_id):
        with autocast():
            total += loss_sum(model, batch.to(device)).double()
        count += len(batch.loss_rows)
        seen += len(batch.documents)
        if progress:
            progress("evaluating", seen, len(table))
    model.train(was_training)
    return Evaluation(loss=float(total) / count, tokens=count)


@dataclass(frozen=True)
class Progress:
    """How far the held-out loss has come: saved in checkpoints, so that patience survives a resume."""

    best_loss: float = math.inf
    best_step: int | None = None
    without_gain: int = 0  # evaluations in a row that gained less than min_delta over `reference`
    reference: float = math.inf

    def after(self, loss: float, step: int, stop: Stop | None) -> Progress:
        better = replace(self, best_loss=loss, best_step=step) if loss < self.best_loss else self
        if loss < self.reference - (stop.min_delta if stop else 0.0):
            return replace(better, reference=loss, without_gain=0)
        return replace(better, without_gain=self.without_gain + 1)

    def verdict(self, stop: Stop | None) -> str:
        """Why the run should end, or nothing."""
        if stop is None or self.without_gain < stop.patience:
            return ""
        return (f"held-out loss gained less than {stop.min_delta} in {counted(self.without_gain, 'evaluation')} in a row;"
                f" best {self.best_loss:.4f} at step {self.best_step}")

    def as_dict(self) -> dict[str, Any]:
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        restored: dict[str, Any] = {k: math.inf if v is None and k != "best_step" else v for k, v in values.items()}
        return cls(**restored)
