"""The plan of a run's memory: made from the recipe before anything loads, applied to the loaded model, lowered when it must be.

Before the weights load, config, data and budget tell whether the run fits at all. If everything fits, as it does mostly, that
is the plan. If not, one layer is timed on the device (memory/calibrate.py) once it is there, and the fastest plan is chosen.
Without a GPU there is a plan only where a budget is given: then the host's memory stands for the device's.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pronghorn.data.pack.batches import Shapes
from pronghorn.errors import EnvironmentFault, ModelError, RecipeError
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.memory.calibrate import calibrate
from pronghorn.memory.costs import Costs, predicted_costs
from pronghorn.memory.dry_run import evaluation_bytes, host_moments
from pronghorn.memory.forecast import job_of, memory_lines, picture, problem_of
from pronghorn.memory.gpus import local_gpu, reckoned_with
from pronghorn.memory.job import CONTEXT_BYTES, Job, head_share, local_target
from pronghorn.memory.levels import KEEP
from pronghorn.memory.offload import OffloadPool
from pronghorn.memory.plan import Plan, host_room, make_plan, parse_budget, plan_of
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.load import DTYPES, Precision
from pronghorn.packs import PackedBatch
from pronghorn.recipe import Recipe
from pronghorn.train.run.run_forecast import why_no_plan

EVALUATION_TOKENS = 4096  # of a pack without gradients: a quarter of a training pack's memory
# A pack costs the host about 50 ms (SmolLM2-135M on an H200, 2,048 or 4,096 tokens), so a GPU waits in packs of a small model.
# Up to so many tokens then, as long as a pack has no more numbers than 4,096 tokens of a model of width 4,096.
MOST_EVALUATION_TOKENS = 16384
EVALUATION_NUMBERS = 4096 * 4096
COMPARED_AFTER = 10  # steps: then the plan is held against what was measured
HARD_LIMIT = 1.06  # of a budget that was asked for: fragments included, the allocator takes no more
SMALL_BLOCKS = 100 * 2**20  # nor this, in which it rounds up, 2 to 20 MiB at a time, and which a tiny model would notice
# How torch and Python say that the host's memory, or its limit for this process, is at its end.
NO_MEMORY = ("can't allocate memory", "not enough memory: you tried", "can't start new thread")
WARM_UP = 3  # of them, in which kernels are compiled and graphs captured


def evaluation_capacity(recipe: Recipe, width: int = 0) -> int:
    """Tokens of a pack in an evaluation: the result is the same for any. `width`: of the model, where it is on a GPU."""
    fitting = min(MOST_EVALUATION_TOKENS, EVALUATION_NUMBERS // width) if width else 0
    if fitting > EVALUATION_TOKENS:
        tokens = max(fitting, recipe.data.max_length)
    else:
        tokens = min(recipe.train.capacity, max(recipe.data.max_length, EVALUATION_TOKENS))
    return -(-tokens // recipe.world.piece_unit) * recipe.world.piece_unit


# ---- before the model is there -----------------------------------------------------------------------------------------------


def plan_memory(
    recipe: Recipe,
    config: HFConfig,
    shapes: Shapes,
    device: torch.device,
    precision: Precision,
    *,
    evaluates: bool = False,
    ranks: int = 1,
    packs: int = 0,
    beside: int = 0,
) -> RunMemory | None:
    """None where there is nothing to plan. An error if the budget is too small, with the smallest that works. `ranks`: that the
    weights are spread over. `packs`: of a step, where the recipe does not say. `beside`: bytes that stay beside steps."""
    explicit = recipe.memory.budget != "auto"
    if device.type != "cuda" and not explicit:
        return None
    found = _job_and_costs(recipe, config, shapes, device, precision, ranks)
    if isinstance(found, str):
        if explicit:
            raise RecipeError(
                what=f"memory.budget: {recipe.memory.budget} cannot be planned for this run",
                why=found,
                fix="set memory.budget: auto, or remove the cause named above",
            )
        return None
    job, costs = found
    looks = evaluates and job.graphed
    aside = beside + (evaluation_bytes(job, evaluation_capacity(recipe, job.shape.width)) if looks else 0)
    budget, remark = budget_of(recipe.memory.budget, device)
    problem = problem_of(job, costs, budget, host_room(), aside)
    if device.type == "cuda" and host_moments(job) > problem.host > 0:
        raise RecipeError(
            what=f"train.optimizer: {job.optimizer} needs {host_moments(job) / 1e9:.1f} GB of host RAM",
            why=f"only {problem.host / 1e9:.1f} GB of free host RAM can be pinned",
            fix="set train.optimizer: paged_adamw_8bit or adamw_8bit, or free host RAM",
        )
    return RunMemory(
        make_plan(problem),
        device,
        local_gpu(device) is not None,
        packs or recipe.step_packs(),
        explicit=explicit,
        remark=remark,
    )


def plan_of_everything(
    recipe: Recipe, config: HFConfig, shapes: Shapes, device: torch.device, precision: Precision
) -> Plan | str:
    """What the run would take with all activations saved, on this machine's GPU or on an H200; or why nobody knows."""
    found = _job_and_costs(recipe, config, shapes, device, precision)
    return found if isinstance(found, str) else plan_of(problem_of(*found, 0, 0), (KEEP,) * found[0].shape.layers, 1)


def _job_and_costs(
    recipe: Recipe, config: HFConfig, shapes: Shapes, device: torch.device, precision: Precision, ranks: int = 1
) -> tuple[Job, Costs] | str:
    """Or why the run cannot be planned."""
    if why := why_no_plan(recipe, config):
        return why
    job = run_job(recipe, config, shapes, device, precision, ranks)
    try:
        return job, predicted_costs(job, reckoned_with(local_gpu(device), fp8=job.fp8))
    except ModelError as error:  # layers that are not one node (dry_run.py)
        return error.why


def run_job(
    recipe: Recipe, config: HFConfig, shapes: Shapes, device: torch.device, precision: Precision, ranks: int = 1
) -> Job:
    """With the sizes of the first epoch's batches. A pack of a later one may be larger; it would re-plan the run."""

    def usual(sizes: tuple[int, ...]) -> int:  # the last one fits whatever could come
        return sizes[-2] if len(sizes) > 1 else sizes[-1]

    graphed = device.type == "cuda" and precision != "fp16" and recipe.train.graph != "off" and ranks == 1
    job = job_of(recipe, config)
    return replace(
        job,
        element=DTYPES[precision].itemsize,
        loss_rows=min(usual(shapes.sizes["N"]), job.capacity),  # one of several ranks that share a pack may have all
        documents=usual(shapes.sizes["E"]),
        attended=shapes.typical,
        graphed=graphed and job.graphed,
        ranks=ranks,
        only_experts=ranks > 1 and recipe.world.shard == "experts",
        target=local_target(device),
    )


def budget_of(text: str, device: torch.device) -> tuple[int, str]:
    """(bytes that this process may take, what there is to say about it)"""
    if device.type != "cuda":
        return parse_budget(text, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), ""
    free, total = torch.cuda.mem_get_info(device)
    room = min(total, free + torch.cuda.memory_reserved(device) + CONTEXT_BYTES)  # ours already: the context, what is loaded
    asked, most = parse_budget(text, total, room), parse_budget("auto", total, room)
    if asked > most:
        return most, f"memory.budget is {text}, but only {most / 1e9:.1f} GB are available for tensors"
    return asked, ""


# ---- with the model ----------------------------------------------------------------------------------------------------------


@dataclass
class RunMemory:
    """A plan and, once it is applied, the pool that its layers share."""

    plan: Plan
    device: torch.device
    timed: bool  # whether the plan's milliseconds are of this device
    micro_batches: int
    explicit: bool = False  # the budget is a limit that somebody set
    remark: str = ""
    pool: OffloadPool | None = None

    @property
    def keeps_everything(self) -> bool:
        return set(self.plan.choices) == {KEEP}

    def apply(
        self,
        model: HFModel,
        batch: Callable[[], PackedBatch],
        dtype: torch.dtype,
        say: Callable[[str], None],
        *,
        timed: bool = True,
    ) -> bool:
        """Whether there is anything to apply it to. `batch`: one of the run's own, to time a layer with, asked for if there
        is a choice to make. `timed`: false leaves the plan as it is, by the rates of the data sheet."""
        engine = engine_of(model)
        why = "the model does not use the fast layers"
        if engine is not None:
            why = next((why for layer in engine.layers if (why := layer.why_not_fused())), "")
        if engine is None or why:
            if self.explicit:
                raise RecipeError(
                    what="memory.budget cannot be planned for this run",
                    why=why,
                    fix="remove memory.budget, and lower train.capacity if memory is short",
                )
            return False
        if self.remark:
            say(self.remark)
        if self.plan.problem.job.host_embeddings and engine.embed.why_not_on_host():
            self.plan = make_plan(replace(self.plan.problem, embeddings=(False,)))
        self._limit()
        if timed and not self.keeps_everything:
            self._choose(engine, batch(), dtype, say)
        self._install(engine)
        return True

    def _limit(self) -> None:
        """A budget that was asked for is kept by the allocator itself: it fails before it takes more."""
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            share = (self.plan.problem.budget * HARD_LIMIT + SMALL_BLOCKS) / total if self.explicit else 1.0
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def release(self) -> None:
        """The run is over: what else this process does is not held to its budget."""
        if self.explicit and self.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def _choose(self, engine: Any, batch: PackedBatch, dtype: torch.dtype, say: Callable[[str], None]) -> None:
        """The plan by times measured here: of all tokens of a micro-batch or, where memory is too short, of a part of them."""
        problem, here = self.plan.problem, batch.to(self.device)
        if problem.job.host_embeddings:  # makes room for the layer that is timed
            engine.embed.move_to_host()
            problem = replace(problem, embeddings=(True,))

        costs = None
        for share in (1, 2, 4):
            try:
                part = here.cut(T=len(here.ids_T) // share, N=len(here.loss_rows) // share)
                part = replace(part, longest=min(part.longest, len(part.ids_T)))
                kinds, piece = problem.job.shape.kinds, max(kind.piece for kind in problem.costs.kinds) / share
                costs = calibrate(engine, kinds, part, dtype, self.device, piece=piece).times(share)
                break
            except torch.OutOfMemoryError:
                costs = None
            finally:
                self._empty_cache()
        if costs is None:
            say("memory: too little free memory to time a layer; the plan uses the GPU's data-sheet rates")
            return
        optimizer = problem.costs.optimizer if self.timed else 0.0
        self.plan, self.timed = make_plan(replace(problem, costs=replace(costs, optimizer=optimizer))), True

    def _empty_cache(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _install(self, engine: Any) -> None:
        plan = self.plan
        if plan.problem.job.host_embeddings:
            engine.embed.move_to_host()
            self._empty_cache()
        if plan.offloaded:
            self.pool = OffloadPool(len(plan.offloaded), plan.slot_bytes, self.device)
        engine.offload = self.pool
        engine.head.set_chunk_share(head_share(plan.pieces))
        for layer, choice in zip(engine.layers, plan.choices, strict=True):
            layer.level, layer.mlp_chunks, layer.offload = choice.level, plan.pieces, self.pool if choice.offload else None

    def lower(self, model: HFModel) -> None:
        """After an allocation failed and its step was given up: a plan that takes less. Results stay the same: to the bit, or,
        where the MLP is done in more pieces, to the rounding of sums in another order."""
        engine = engine_of(model)
        assert engine is not None
        self.plan = self.plan.one_notch_lower()  # or says that there is none
        self.pool = engine.offload = None
        for layer in engine.layers:
            layer.offload = None
        self._empty_cache()
        try:
            self._install(engine)
            return
        except torch.OutOfMemoryError:  # not even the pool's buffers
            pass  # outside of the handler, so that the failed attempt's frames are gone
        self.lower(model)

    # ---- what there is to say ------------------------------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """Predicted; None where nobody knows this device's speed."""
        return self.plan.step_ms(self.micro_batches) / 1000 if self.timed else None

    def event(self) -> dict[str, Any]:
        """For the run's log: the plan as data and as lines of text."""
        return {
            "plan": self.plan.as_dict(),
            "step_seconds": self.step_seconds,
            "text": self.text(),
            "pinned_bytes": self.pool.host_bytes if self.pool else 0,
        }

    def text(self) -> list[str]:
        plan, seconds = self.plan, self.step_seconds
        kind = "from times measured on this GPU" if plan.problem.costs.measured else "predicted"
        step = f"{seconds:.3f} s per step ({kind})" if seconds is not None else "step time not known before it is measured"
        if self.keeps_everything:
            return [
                f"memory: everything fits, nothing is recomputed; peak {plan.peak_bytes / 1e9:.2f} GB predicted, "
                f"{plan.needed_bytes / 1e9:.2f} of {plan.problem.budget / 1e9:.2f} GB for tensors, about "
                f"{plan.device_bytes / 1e9:.2f} GB with driver and fragmentation; {step}"
            ]
        lines = ["memory:", *picture(plan.choices), *memory_lines(plan)]
        if self.pool is not None:
            lines.append(f"pool        {self.pool.host_bytes / 1e9:.2f} GB of host RAM in {self.pool.slots - 1} slots")
        return [*lines, f"step        {step}", *(f"why         {reason}" for reason in plan.reasons)]

    def measured(self, step_seconds: float) -> dict[str, Any]:
        """What the run took, beside what was planned, as data and as a line of text."""
        plan, seconds = self.plan, self.step_seconds
        told = [f"{step_seconds:.3f} s per step" + (f" ({seconds:.3f} planned)" if seconds is not None else "")]
        facts: dict[str, Any] = {
            "step_seconds": step_seconds,
            "planned_step_seconds": seconds,
            "planned_peak_bytes": plan.peak_bytes,
            "planned_device_bytes": plan.device_bytes,
        }
        if self.device.type == "cuda":
            facts["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            facts["device_bytes"] = torch.cuda.max_memory_reserved(self.device) + CONTEXT_BYTES
            told = [
                f"peak {facts['peak_bytes'] / 1e9:.2f} GB ({plan.peak_bytes / 1e9:.2f} planned)",
                f"budget {plan.problem.budget / 1e9:.2f}",
                f"with driver and fragmentation about "
                f"{facts['device_bytes'] / 1e9:.2f} GB ({plan.device_bytes / 1e9:.2f} planned)",
                *told,
            ]
        return facts | {"text": [f"memory measured: {', '.join(told)}"]}


@contextmanager
def main_memory(recipe: Recipe, doing: Callable[[], str]) -> Iterator[None]:
    """Around everything that computes: where the host's memory ends, torch, numpy and Arrow each say it in their own way."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        text = str(error).split("DefaultCPUAllocator: ")[-1].split("\n")[0]
        if not (
            isinstance(error, MemoryError)
            or any(words in text for words in NO_MEMORY)
            or getattr(error, "errno", None) == errno.ENOMEM
        ):
            raise
        raise EnvironmentFault(
            what=f"{doing()}: out of host RAM",
            where=recipe.output,
            why=text or "no memory left",
            fix=f"free some RAM, or lower train.capacity (now {recipe.train.capacity:,}) and start with --fresh",
        ) from error


def out_of_memory(step: int, where: str, why: str, recipe: Recipe) -> EnvironmentFault:
    return EnvironmentFault(
        what=f"step {step}: out of GPU memory",
        where=where,
        why=why,
        fix=f"lower train.capacity (now {recipe.train.capacity:,}) and start with --fresh",
    )
