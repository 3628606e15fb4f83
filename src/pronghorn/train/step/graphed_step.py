"""The step with no host in it: every micro-batch a replay of one CUDA graph, the update a replay of another.

A packed batch has one of a few shapes (data/pack/batches.py: `Shapes`), so forward, loss, backward and the accumulation of
gradients are captured once a shape, on first use, all out of one memory pool, and replayed for ever. The host only copies the
next batch into place, on a stream of its own while the device still computes, and reads loss and gradient norm one step later.
Whether a step is sound is judged by the update itself, on the device (adamw.py): an unsound one changes nothing, nor does any
after it, until the host has seen it and stops the run.

    copy stream      batch k+1 -> staging          batch k+2 -> staging
    main stream      [staging -> inputs, graph k]  [staging -> inputs, graph k+1]  [update, report -> pinned memory]

Where several ranks train, gradients are summed before the update: over NCCL at the beginning of its graph, over gloo between
the graphs.

The same functions run without capture where it failed, and on the CPU, where the tests look at them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pronghorn.data.pack.loader import StepBatch
from pronghorn.errors import EnvironmentFault
from pronghorn.hf_types import HFModel
from pronghorn.kernels.runtime.dispatch import compile_kernels
from pronghorn.model.capture import Graphs, Work, first_line, raise_if_out_of_memory
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.load import DTYPES, Precision
from pronghorn.model.lora_grad_buffer import LoraGradBuffer, shared_gradients
from pronghorn.packs import PackedBatch
from pronghorn.train.dist.world import World
from pronghorn.train.objectives import Objective
from pronghorn.train.objectives.objective import Divisor, Sums
from pronghorn.train.step.fused_adamw import FusedAdamW
from pronghorn.train.step.graphed_sums import GraphedSums
from pronghorn.train.step.step import (
    EagerStep,
    StageTimer,
    Step,
    StepResult,
    finish_backward,
    losses_of,
    no_graph,
    why_not_graphed,
)

DRY_TOKENS = 1024  # for which kernels are compiled: sizes as whole batches have them, and next to no work


@dataclass
class _Micro:
    """What a shape needs: where its inputs lie, and the work on them."""

    inputs: PackedBatch
    rows_N: torch.Tensor | None  # the loss of each loss row, where the objective gives it
    run: Work  # a graph's replay, or the functions themselves


@dataclass
class _Staging:
    """Where a batch waits on the device until the one before is done with the inputs."""

    batch: PackedBatch
    loaded: torch.cuda.Event
    free: torch.cuda.Event


@dataclass
class _UnderWay:
    """What the host reads of a step, once it has arrived."""

    report: torch.Tensor
    rows: list[tuple[PackedBatch, torch.Tensor]]
    arrived: torch.cuda.Event | None


class GraphedStep(Step):
    depth = 1

    def __init__(
        self,
        model: HFModel,
        optimizer: FusedAdamW,
        *,
        device: torch.device,
        precision: Any,
        clip: float,
        say: Callable[[str], None],
        must: bool = False,
        objective: Objective | None = None,
        world: World | None = None,
    ) -> None:
        super().__init__(model, optimizer, device=device, precision=precision, clip=clip, objective=objective, world=world)
        self._adamw, self._say, self._must = optimizer, say, must
        self._cuda = device.type == "cuda"
        self._graphs = Graphs(device, failed=self._capture_failed)
        self._evaluated = GraphedSums(model, self._forward, self._graphs, say, device)
        self._built = 0  # the engine's `rebuilt` that the graphs belong to
        self._accumulated = False  # whether the step under way has gradients already
        self._micros: dict[tuple[Any, ...], _Micro] = {}  # by the shape of a pack
        self._staging: dict[tuple[Any, ...], deque[_Staging]] = {}
        self._update: Work | None = None
        self._sums_captured = False  # whether the update's graph has the sums over ranks
        self._added_up: list[torch.Tensor] = []
        self._sums: LoraGradBuffer | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._loss = torch.zeros((), device=device)
        terms = self.objective.terms
        self._share = torch.ones(() if terms == 1 else (terms,), device=device)  # 1 / what the step's loss is divided by
        self._watched = torch.zeros(len(self.objective.watched), device=device)
        self._report = torch.zeros(2 + len(self._watched), device=device)  # loss, gradient norm, what is watched
        self._limit = torch.full((), math.inf, device=device)  # of the step's loss, where it is guarded
        self._spiked = torch.zeros((), dtype=torch.int32, device=device)
        if self._cuda:
            self._copies = torch.cuda.Stream()

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin(self, step_batch: StepBatch, stage: StageTimer = lambda _: nullcontext()) -> None:
        with stage("step"):
            self._give_up_stale_graphs()
            if self._update is None:
                self._set_up(step_batch.batches[0])
            self._adamw.refresh_lr()
            self._set_divisor(self.objective.divisor(step_batch, self.world))
            self.objective.before_step(self.model, step_batch, self.device, self.autocast, self.world)
            if self.guards_loss:
                self._limit.fill_(self.loss_limit)
            self._accumulated = False
            rows: list[tuple[PackedBatch, torch.Tensor]] = []
            for batch in step_batch.batches:
                micro = self._micros.get(batch.shape) or self._prepare(batch)
                self._load(batch, micro.inputs)
                micro.run()
                if micro.rows_N is not None:
                    rows.append((batch, self._sent(micro.rows_N)))
                self._accumulated = True
            self.world.add_up([] if self._sums_captured else self._added_up)
            self._release_holds()
            assert self._update is not None
            self._update()
            self._send_report(rows)

    def finish(self, stage: StageTimer = lambda _: nullcontext()) -> StepResult:
        with stage("step"):
            done = self._under_way.popleft()
            if done.arrived is not None:
                done.arrived.synchronize()  # sleeps: a blocking event
            loss, grad_norm, *watched = done.report.tolist()
        return StepResult(loss, grad_norm, self.objective.figures(watched), losses_of(done.rows))

    @property
    def captures(self) -> bool:
        return self._graphs.captures and self._evaluated.captures

    def sums(self, batch: PackedBatch) -> Sums:
        return self._evaluated(batch)

    def release(self) -> None:
        super().release()
        if self._sums is not None:
            self._sums.release()
        if (engine := engine_of(self.model)) is not None:
            engine.accumulate_weights(False)

    def abandon(self) -> None:
        super().abandon()
        if self._cuda:
            self._copies.synchronize()  # before the memory that it writes is another tensor's
        self._micros.clear()
        self._evaluated.forget()
        self._staging.clear()
        self._forget_update()
        self._graphs.forget()
        self._sums, self._added_up = None, []

    def _give_up_stale_graphs(self) -> None:
        """Adapters that were switched off and on, or another dtype, make the layers rebuild buffers that the graphs read."""
        engine = engine_of(self.model)
        if self._update is None or engine is None or engine.rebuilt == self._built:
            return
        if self._graphs.captures:
            self._say("CUDA graphs are captured again: the layers' buffers were rebuilt")
        self.abandon()

    def _forget_update(self) -> None:
        self._update, self._sums_captured = None, False

    def _set_divisor(self, divisor: Divisor) -> None:
        if isinstance(divisor, tuple):
            for place, one in zip(self._share, divisor, strict=True):
                place.fill_(1.0 / one)
        else:
            self._share.fill_(1.0 / divisor)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """On its way to the host: 64 kB for 16,384 rows, 3 µs."""
        return torch.empty_like(tensor, device="cpu", pin_memory=self._cuda).copy_(tensor, non_blocking=True)

    def _send_report(self, rows: list[tuple[PackedBatch, torch.Tensor]]) -> None:
        report, arrived = self._sent(self._report), None
        if self._cuda:
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        self._under_way.append(_UnderWay(report, rows, arrived))

    # ---- what is captured ----------------------------------------------------------------------------------------

    def _forward_backward(self, inputs: PackedBatch, rows_N: torch.Tensor | None = None) -> None:
        try:
            sums = self._forward(inputs)
            loss = sums.loss * self._share
            loss = loss.sum() if loss.dim() else loss
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            finish_backward(self.model)  # joins its stream, without which a capture that fails could not even be ended
        self._loss += loss.detach()
        if sums.watched is not None:
            self._watched += sums.watched
        if rows_N is not None and sums.rows_N is not None:
            rows_N.copy_(sums.rows_N)

    def _clip_and_update(self) -> None:
        assert self._sums is not None
        self._sums.collect()
        if self.guards_loss:
            self._raise_guard()
        self._adamw.step()
        assert self._adamw.grad_norm is not None
        if self.guards_loss:
            self._lower_guard(self._adamw.grad_norm)
        self._report[0].copy_(self._loss)
        self._report[1].copy_(self._adamw.grad_norm)
        self._report[2:].copy_(self._watched)
        self._clear()

    def _sum_and_update(self) -> None:
        self.world.add_up(self._added_up)
        self._clip_and_update()

    def _raise_guard(self) -> None:
        """A loss above its limit counts as a refused step before this one, which makes the update refuse this one, too."""
        assert self._adamw.skipped is not None
        self._spiked.copy_((self._loss > self._limit) & (self._loss < math.inf))
        self._adamw.skipped += self._spiked

    def _lower_guard(self, norm: torch.Tensor) -> None:
        """Both are taken back, so that the next step counts; not if the gradient is unsound: then the run is to stop."""
        assert self._adamw.skipped is not None
        self._adamw.skipped -= 2 * self._spiked * ((norm > 0) & (norm < math.inf))

    def _compile(self, inputs: PackedBatch) -> None:
        """All kernels, together. Where that fails they are compiled as they are needed; whatever is wrong shows then."""
        try:
            self._graphs.attempt(lambda: compile_kernels(lambda: self._run_dry(inputs)))
        except Exception as error:  # noqa: BLE001  (nothing depends on it)
            self._say(f"kernels are compiled one by one: {first_line(error)}")
            self._clear()

    def _run_dry(self, inputs: PackedBatch) -> None:
        """Everything once, and what it leaves is cleared: it is not to be looked at."""
        self._forward_backward(inputs)
        self._clip_and_update()

    def _clear(self) -> None:
        for tensor in self._added_up:
            tensor.zero_()

    # ---- set-up, on first use ------------------------------------------------------------------------------------

    def _set_up(self, batch: PackedBatch) -> None:
        """Gradients get a place for good, all kernels are compiled, and the update is captured. It is tried once with its guard
        raised: every kernel of it runs, and nothing changes. `batch`: one of those to come."""
        self.model.train()
        gradients = shared_gradients(self._parameters)
        engine = engine_of(self.model)
        assert engine is not None
        compute = engine.embeddings.weight.dtype if self.precision == "fp32" else DTYPES[self.precision]
        self._sums = LoraGradBuffer(engine, compute)
        engine.accumulate_weights(True)
        self._added_up = [self._loss, self._sums.buffer, *gradients, *([self._watched] if len(self._watched) else [])]
        self._adamw.clip_norm, self._adamw.watched_loss = self.clip, self._loss
        self._adamw.refresh_lr()
        self._adamw.prepare()
        assert self._adamw.skipped is not None
        self._adamw.skipped.fill_(1)
        if self._graphs.captures and engine.can_run_dry:
            self._compile(batch.beginning(DRY_TOKENS).map(lambda tensor: tensor.to(self.device)))
        (self._update,) = self._graphs.captured(self._clip_and_update)
        if self.world.captures and not self.world.largest(int(not self._graphs.captures)):
            self._capture_sums()
        self._adamw.skipped.zero_()
        self._built = engine.rebuilt

    def _capture_sums(self) -> None:
        """The update once more, with the sums over ranks at its beginning: on all ranks, or on none. NCCL connects ranks in its
        first sum, which is therefore not captured. The graph must be gone before the ranks part: NCCL waits for it."""
        self._graphs.attempt(lambda: self.world.add_up(self._added_up))
        update, why = None, "its capture failed on another rank"
        try:
            (update,) = self._graphs.capture([self._sum_and_update])
        except RuntimeError as error:
            raise_if_out_of_memory(error)
            why = first_line(error)
        if self.world.largest(int(update is None)):
            self._say(f"the all-reduce runs outside the update's CUDA graph: {why}")
            return
        self._update, self._sums_captured = update, True
        self.world.before_parting(self._forget_update)

    def _prepare(self, batch: PackedBatch) -> _Micro:
        """Inputs for this shape, and its graph. What a step has accumulated so far outlives the trial runs; on the host, since
        the first of them needs all the memory there is."""
        began = time.perf_counter()
        inputs = batch.map(lambda tensor: tensor.to(self.device, copy=True))
        saved = [tensor.to("cpu", copy=True) for tensor in self._added_up] if self._accumulated else []
        engine = engine_of(self.model)
        assert engine is not None
        counted = engine.expert_counts.counts_LE.clone() if engine.expert_counts is not None else None
        rows_N = torch.zeros(inputs.sizes["N"], device=self.device) if self.objective.has_rows else None
        (run,) = self._graphs.captured(lambda: self._forward_backward(inputs, rows_N))
        self._graphs.tried = True
        if engine.expert_counts is not None:  # a trial does not count
            counts = engine.expert_counts.counts_LE
            counts.copy_(torch.zeros_like(counts) if counted is None else counted)
        self._clear()
        for tensor, before in zip(self._added_up, saved, strict=False):
            tensor.copy_(before)
        if self._cuda:
            copies = [batch.map(lambda tensor: torch.empty_like(tensor, device=self.device)) for _ in range(2)]
            # Their memory may be that of a tensor just freed, which kernels under way on this stream still write.
            self._copies.wait_stream(torch.cuda.current_stream())
            self._staging[batch.shape] = deque(_Staging(copy, torch.cuda.Event(), torch.cuda.Event()) for copy in copies)
        if self._graphs.captures:
            tokens, rows, entries = (batch.sizes[axis] for axis in "TNE")
            self._say(
                f"captured a CUDA graph for {tokens:,} tokens, {rows:,} of them with loss, up to {entries - 1} documents "
                f"({time.perf_counter() - began:.1f} s)"
            )
        self._micros[batch.shape] = _Micro(inputs, rows_N, run)
        return self._micros[batch.shape]

    def _capture_failed(self, error: Exception) -> None:
        reason = first_line(error)
        if self._must:
            raise EnvironmentFault(
                what="train.graph: on, but the CUDA graph capture failed",
                why=reason,
                fix="set train.graph: auto to run eagerly instead",
            ) from error
        self._say(f"CUDA graph capture failed, steps run eagerly: {reason}")

    # ---- inputs --------------------------------------------------------------------------------------------------

    def _load(self, batch: PackedBatch, inputs: PackedBatch) -> None:
        if not self._cuda:
            inputs.copy_from(batch)
            return
        ring = self._staging[batch.shape]
        ring.rotate(1)
        place = ring[0]
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(place.free)
            place.batch.copy_from(batch)
            place.loaded.record()
        torch.cuda.current_stream().wait_event(place.loaded)
        inputs.copy_from(place.batch)
        place.free.record()


def make_step(
    model: HFModel,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    precision: Precision,
    clip: float,
    graph: Literal["auto", "on", "off"],
    say: Callable[[str], None],
    objective: Objective | None = None,
    world: World | None = None,
) -> Step:
    """Captured as CUDA graphs where that is possible and not switched off; what stands against it is said."""
    why_not = "train.graph is off" if graph == "off" else why_not_graphed(model, optimizer, device, precision)
    if not why_not and isinstance(optimizer, FusedAdamW):
        return GraphedStep(
            model,
            optimizer,
            device=device,
            precision=precision,
            clip=clip,
            say=say,
            must=graph == "on",
            objective=objective,
            world=world,
        )
    if graph == "on":
        raise no_graph(why_not)
    if graph == "auto" and device.type == "cuda":
        say(f"steps run eagerly, without a CUDA graph: {why_not}")
    return EagerStep(model, optimizer, device=device, precision=precision, clip=clip, objective=objective, world=world)
