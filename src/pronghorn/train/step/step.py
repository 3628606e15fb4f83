"""One optimizer step: forward and backward of each micro-batch, the health check, clipping, the update.

Nothing outside this file and graphed_step.py knows how a step is computed. A step is begun, and its numbers are read when it is
finished; up to `depth` steps may be under way before the first of them is read. Here, eagerly, it is none: begin does it all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import EnvironmentFault, HealthStop
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import engine_of, running
from pronghorn.model.load import DTYPES, Precision
from pronghorn.packs import PackedBatch
from pronghorn.train.dist.context import group_of, of_whole_documents
from pronghorn.train.dist.expert_shards import trained_shards_of
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective, Supervised
from pronghorn.train.objectives.objective import Sums, document_losses, mean_of
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.optim import trainable

StageTimer = Callable[[str], AbstractContextManager[None]]
SMALLEST_SCALE = 1.0  # fp16: below this, unscaled gradients overflow by themselves


@dataclass(frozen=True)
class StepResult:
    """Where loss or gradient norm are not finite, or the norm is zero, nothing was updated (`health.require_sound`)."""

    loss: float  # the objective's mean over the step; supervised: over its trained tokens
    grad_norm: float  # before clipping
    figures: dict[str, float] = field(default_factory=dict)  # what else the objective shows of the step
    # summed loss of each of the step's documents on this rank, before the update, where the objective gives it
    losses: npt.NDArray[np.float64] | None = field(default=None, compare=False)
    skipped: bool = False  # fp16 only: the scaled gradients overflowed, the scale was lowered, nothing was updated


def losses_of(batches: Sequence[tuple[PackedBatch, torch.Tensor]]) -> npt.NDArray[np.float64] | None:
    """Those of `StepResult`. `batches`: with the loss of each loss row."""
    return np.concatenate([document_losses(batch, rows_N) for batch, rows_N in batches]) if batches else None


class Step(ABC):
    depth = 0  # steps that may be under way when the next one begins
    guards_loss = False  # whether `loss_limit` counts; set before the first step
    loss_limit = math.inf  # of the step that begins next: above it, nothing is updated, and the steps after it are
    updating = False  # the weights are changing: a step that fails now cannot be repeated

    def __init__(
        self,
        model: HFModel,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        precision: Precision,
        clip: float,
        objective: Objective | None = None,
        world: World | None = None,
    ) -> None:
        """Without an `objective`, it is supervised fine-tuning; without a `world`, of one rank."""
        self.model, self.optimizer, self.device, self.precision, self.clip = model, optimizer, device, precision, clip
        self.objective, self.world = objective or Supervised(), world or World()
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self._parameters = list(trainable(model).values())
        self._spread = trained_shards_of(model)
        self._holds: list[Callable[[], None]] = []

    @abstractmethod
    def begin(self, step_batch: StepBatch, stage: StageTimer = lambda _: nullcontext()) -> None:
        """Queue a whole step. A step whose loss or gradient is not sound changes no weight, nor does any step after it."""

    @abstractmethod
    def finish(self, stage: StageTimer = lambda _: nullcontext()) -> StepResult:
        """The numbers of the oldest step that was begun and not finished; waits for it."""

    @property
    def captures(self) -> bool:
        """Whether evaluations, too, gain by packs of few shapes."""
        return False

    def sums(self, batch: PackedBatch) -> Sums:
        """Those of an evaluation's batch, which is on the host. Called without gradients, between steps."""
        return self._forward(batch.to(self.device))

    def _forward(self, batch: PackedBatch) -> Sums:
        with self.autocast():
            return running(self.model, lambda: self.objective.sums(self.model, batch))

    def hold_update(self, until: Callable[[], None]) -> None:
        """`until` is called before the weights change next: a checkpoint's copies read them until then."""
        self._holds.append(until)

    def release(self) -> None:
        """No step will follow: the model's gradients are autograd's again, for whoever looks at it next."""
        self._holds.clear()

    def abandon(self) -> None:
        """The step that was begun last failed, and all before it are finished: gradients, and whatever was captured, are given
        up. The weights are those of the last step that was finished."""
        self._release_holds()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a micro-batch may still be running in what is about to be freed
        self.release()
        for parameter in self._parameters:
            parameter.grad = None
        if isinstance(self.optimizer, FusedAdamW):
            self.optimizer.forget_gradients()

    def _release_holds(self) -> None:
        while self._holds:
            self._holds.pop()()

    def autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.precision, self.device)


def finish_backward(model: HFModel) -> None:
    """After a micro-batch's backward, also one that was broken off: nothing waits in host memory any more."""
    engine = engine_of(model)
    if engine is not None and engine.offload is not None:
        engine.offload.finish()


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """fp32 means fp32: no autocast at all, and no TF32 (torch's default keeps it off for products). Without a cache of cast
    weights: our layers do their own casts, and a cache must not outlive the captured step that filled it."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision], cache_enabled=False)


class EagerStep(Step):
    _result: StepResult | None = None
    _rows: Sequence[tuple[PackedBatch, torch.Tensor]] = ()  # of the step under way, with the loss of each loss row

    def begin(self, step_batch: StepBatch, stage: StageTimer = lambda _: nullcontext()) -> None:
        with stage("step"):
            loss_sum, norm, watched = self._forward_backward(step_batch)
            loss, grad_norm = float(loss_sum), float(norm)  # waits for the device, so the time is booked where it was spent
            figures = self.objective.figures(watched.tolist())
        losses = of_whole_documents(losses_of(self._rows), group_of(self.model))
        self._result = StepResult(loss, grad_norm, figures, losses)
        with stage("optimizer"):
            if self.scaler.is_enabled() and not math.isfinite(grad_norm) and math.isfinite(loss):
                self._result = self._lower_scale(loss)
            elif self.guards_loss and self.loss_limit < loss < math.inf:
                self.scaler.update()  # no overflow; nothing else changes
            elif math.isfinite(loss) and math.isfinite(grad_norm) and grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters, self.clip, norm)
                self._release_holds()
                self.updating = True
                self.scaler.step(self.optimizer)
                self.updating = False
                self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)

    def finish(self, stage: StageTimer = lambda _: nullcontext()) -> StepResult:
        assert self._result is not None, "no step has started"
        result, self._result = self._result, None
        return result

    def _forward_backward(self, step_batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss, gradient norm, what the objective watches)"""
        self.model.train()
        if self._spread is not None:
            self._spread.drop_gradients()
        total, divisor = torch.zeros((), device=self.device), self.objective.divisor(step_batch, self.world)
        watched = torch.zeros(len(self.objective.watched), device=self.device)
        self.objective.before_step(self.model, step_batch, self.device, self.autocast, self.world)
        self._rows = rows = list[tuple[PackedBatch, torch.Tensor]]()
        for left, host_batch in zip(reversed(range(len(step_batch.batches))), step_batch.batches, strict=True):
            batch = host_batch.to(self.device)
            if self._spread is not None:
                self._spread.before_backward(last=left == 0)
            try:
                # Divided by the count of the whole step: the loss does not depend on how tokens fell into micro-batches.
                sums = self._forward(batch)
                loss = mean_of(sums.loss, divisor)
                with self.world.guarded():
                    self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            finally:
                finish_backward(self.model)
            total += loss.detach()
            if sums.rows_N is not None:
                rows.append((host_batch, sums.rows_N))
            watched += 0.0 if sums.watched is None else sums.watched
        if self._spread is not None:
            return total, self._spread.sum_up([total, watched]), watched
        if self.world.size > 1:  # they must be of one shape on all ranks
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        self.world.add_up([total, *gradients, *([watched] if len(watched) else [])])
        self.scaler.unscale_(self.optimizer)
        return total, torch.nn.utils.get_total_norm(gradients), watched

    def _lower_scale(self, loss: float) -> StepResult:
        self.scaler.step(self.optimizer)  # does nothing: unscale_ saw the overflow
        self.scaler.update()
        if self.scaler.get_scale() < SMALLEST_SCALE:
            raise HealthStop(
                what="fp16 gradients overflow at every loss scale; the weights are unchanged",
                why="the largest fp16 number is 65,504",
                fix="set precision: bf16 or fp32, or lower train.lr",
            )
        return StepResult(loss, float("inf"), skipped=True)


def no_graph(why: str) -> EnvironmentFault:
    return EnvironmentFault(
        what="train.graph: on, but this run cannot be captured as a CUDA graph",
        why=why,
        fix="set train.graph: auto (or off), or remove the cause named above",
    )


def why_not_graphed(model: HFModel, optimizer: torch.optim.Optimizer, device: torch.device, precision: Precision) -> str:
    if device.type != "cuda":
        return "no NVIDIA GPU found"
    if precision == "fp16":
        return "the fp16 loss scale is updated on the host"
    if not isinstance(optimizer, FusedAdamW):
        return f"the optimizer is {type(optimizer).__name__}"
    engine = engine_of(model)
    if engine is not None and engine.shards is not None:
        return "sharded weights are gathered in every step (world.shard)"
    if engine is not None and engine.context is not None:
        return "attention gathers keys and values of other ranks (world.context)"
    if engine is None:
        return "the model uses the transformers layers, which synchronize with the host"
    return next((why for layer in engine.layers if (why := layer.why_not_fused())), "")
