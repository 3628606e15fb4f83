"""`train.average`: the mean of the adapter's weights after each of the run's last steps, beside the last ones.

Mean of A and mean of B, which is not the mean of B A: the window is short. The sum is on the host, in float32, and in
checkpoints, so a resumed run ends with the same bits. With wsd, the window lies inside the decay: a run whose decay began early
averages as one that was planned so. At the end both are evaluated on the held-out rows, and the mean is kept only where the
rows, one by one, show it to be better.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pronghorn.recipe_parts import Train, steps_between
from pronghorn.train.run.evaluate import Evaluation
from pronghorn.train.run.paired import Counts, difference
from pronghorn.train.step.optim import trainable

PREFIX = "average/"
SURE = 1.2816  # standard errors: a mean that is not better is kept one time in ten


@dataclass
class Average:
    first: int = 0  # step after which the first weights were added
    count: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    kept: bool = False  # the model has the mean

    def add(self, model: torch.nn.Module, first: int) -> None:
        """The weights as they are after a step of the window that begins at `first`."""
        if first != self.first:
            self.first, self.count, self.sums = first, 0, {}
        self.count += 1
        for name, weight in trainable(model).items():
            value = weight.detach().to("cpu", torch.float32, copy=True)
            self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def put_in(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """The mean becomes the model's weights; returns those it had."""
        before = {name: weight.detach().to("cpu", copy=True) for name, weight in trainable(model).items()}
        put(model, {name: one / self.count for name, one in self.sums.items()})
        return before

    def decided(self, step: int, mean: Evaluation, last: Evaluation, counts_R: Counts) -> dict[str, Any]:
        """Keeps the mean if its loss is shown to be lower than the last weights' on the same rows. Returns what to log."""
        assert mean.losses_R is not None
        assert last.losses_R is not None
        change, error = difference(mean.losses_R, last.losses_R, counts_R)
        self.kept, self.sums = change + SURE * error < 0, {}
        losses = f"held-out loss {mean.loss:.4f}, of the last weights {last.loss:.4f} (row by row {change:+.4f} ± {error:.4f})"
        verdict = "the mean is kept" if self.kept else "the mean is not shown to be better, so the last weights are kept"
        text = f"step {step}: mean of the weights after the last {self.count:,} steps: {losses}; {verdict}"
        paired = {"loss": mean.loss, "last_loss": last.loss, "change": change, "change_error": error}
        return {"kept": self.kept, "steps": self.count, **paired, "text": text}

    # ---- in checkpoints ----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        return {f"{PREFIX}{name}": one.clone() for name, one in self.sums.items()}

    def values(self) -> dict[str, Any]:
        """Plain JSON; of the last checkpoint: whether its weights are the mean of so many."""
        return {"first": self.first, "count": self.count, "kept": self.kept}

    @classmethod
    def of(cls, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Average:
        stored = values.get("average") or {}
        sums = {name.removeprefix(PREFIX): one for name, one in tensors.items() if name.startswith(PREFIX)}
        return cls(int(stored.get("first", 0)), int(stored.get("count", 0)), sums, bool(stored.get("kept")))


def window(train: Train, total: int, decays: range) -> range:
    """Steps after which weights are averaged, from 1. `total`, `decays`: of the run as it will end."""
    if train.average is None:
        return range(0)
    return range(max(total - steps_between(train.average, total), decays.start if decays else 0) + 1, total + 1)


@torch.no_grad()
def put(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in trainable(model).items():
        weight.copy_(weights[name])
