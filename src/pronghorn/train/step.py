"""One optimizer step, eagerly: forward and backward of each micro-batch, the health check, clipping, the update.

Nothing outside this file knows how a step is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from pronghorn.data.batches import StepBatch
from pronghorn.errors import HealthStop
from pronghorn.model.load import DTYPES, Precision
from pronghorn.train.objectives import loss_sum
from pronghorn.train.optim import trainable

StageTimer = Callable[[str], AbstractContextManager[None]]
SMALLEST_SCALE = 1.0  # fp16: below this, unscaled gradients overflow by themselves


@dataclass(frozen=True)
class StepResult:
    loss: float  # mean over the step's trained tokens
    grad_norm: float  # before clipping
    skipped: bool = False  # fp16 only: the scaled gradients overflowed, the scale was lowered, nothing was updated


class EagerStep:
    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, *, device: torch.device, precision: Precision,
                 clip: float) -> None:
        self.model, self.optimizer, self.device, self.precision, self.clip = model, optimizer, device, precision, clip
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self._parameters = list(trainable(model).values())

    def autocast(self) -> AbstractContextManager[Any]:
        """fp32 means fp32: no autocast at all, and no TF32 (torch's default keeps it off for products)."""
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision])

    def __call__(self, step_batch: StepBatch, judge: Callable[[float, float], None], stage: StageTimer) -> StepResult:
        """`judge(loss, grad_norm)` raises before a broken number can reach the weights."""
        with stage("step"):
            loss_sum, norm = self._forward_backward(step_batch)
            loss, grad_norm = float(loss_sum), float(norm)  # waits for the device, so the time is booked where it was spent
        with stage("optimizer"):
            if self.scaler.is_enabled() and not math.isfinite(grad_norm) and math.isfinite(loss):
                return self._lower_scale(loss)
            judge(loss, grad_norm)
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self.clip, norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss, grad_norm)

    def _forward_backward(self, step_batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
        self.model.train()
        total = torch.zeros((), device=self.device)
        for host_batch in step_batch.batches:
            batch = host_batch.to(self.device)
            with self.autocast():
                # Divided by the count of the whole step: the loss does not depend on how tokens fell into micro-batches.
                loss = loss_sum(self.model, batch) / step_batch.loss_tokens
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        return total, torch.nn.utils.get_total_norm(p.grad for p in self._parameters if p.grad is not None)

    def _lower_scale(self, loss: float) -> StepResult:
        self.scaler.step(self.optimizer)  # does nothing: unscale_ saw the overflow
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.get_scale() < SMALLEST_SCALE:
            raise HealthStop(what="fp16 gradients overflow at every loss scale; the weights were not touched",
                             why="fp16 holds numbers up to 65,504", fix="set precision: bf16 or fp32, or lower train.lr")
        return StepResult(loss, float("inf"), skipped=True)
