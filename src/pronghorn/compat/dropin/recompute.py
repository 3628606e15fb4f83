"""Gradient checkpointing in scripts with a trainer of their own: which setting decides whether layers recompute in backward.

`use_gradient_checkpointing` True or False is the user's word: it stands, whatever a trainer does by default (TRL's turns
recomputing on). "unsloth", and saying nothing, leaves it to the memory that there is: at the first batch, and at every
larger one, the layers keep what fits. Either way it is said what is planned: the peak, and what it is made of. Results are the
same bits.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from pronghorn.compat.captured_layers import rounded
from pronghorn.compat.dropin.arguments import Recompute
from pronghorn.compat.outer_loop import loop_of
from pronghorn.errors import EnvironmentFault, ModelError, RecipeError
from pronghorn.generation.cache import free_bytes
from pronghorn.hf_types import HFModel
from pronghorn.kernels.runtime.dispatch import say_once
from pronghorn.memory.costs import predicted_costs
from pronghorn.memory.dry_run import evaluation_bytes, static_parts
from pronghorn.memory.gpus import local_gpu, reckoned_with
from pronghorn.memory.job import FP32, Job, Method, local_target, shape_of
from pronghorn.memory.levels import KEEP, Choice, Problem
from pronghorn.memory.plan import Plan, make_plan, plan_of
from pronghorn.model.causal_lm import FastCausalLM, base_of, engine_of
from pronghorn.model.formats.table import storage_of
from pronghorn.model.load import without_progress_bars

ASKED = "_pronghorn_recompute"  # attribute of the model instance: the user's word
PLANNED: Recompute = "unsloth"
ASIDE = 2**30  # bytes that are left for a trainer's own loss and metrics
MARGIN = 0.03  # of what is free, for fragments and what a prediction does not know


def set_recompute(model: HFModel, asked: Recompute | None) -> None:
    """What was asked for before stands where nothing definite is asked for now."""
    base, engine = base_of(model), engine_of(model)
    stands = asked if isinstance(asked, bool) else getattr(base, ASKED, PLANNED)
    setattr(base, ASKED, stands)
    if engine is None:
        _of_own_layers(base, bool(stands))
        return
    on_gpu = engine.embeddings.weight.is_cuda
    plans = stands == PLANNED and on_gpu
    loop_of(base).chooser = KeptByMemory(engine, stands) if on_gpu else None
    for layer in engine.layers:
        layer.recompute, layer.planned = None if plans else bool(stands), plans
    base.gradient_checkpointing_enable = types.MethodType(gradient_checkpointing_enable, base)
    base.enable_input_require_grads = types.MethodType(enable_input_require_grads, base)


def _of_own_layers(base: PreTrainedModel, recompute: bool) -> None:
    if recompute:
        with without_progress_bars():
            base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    elif base.is_gradient_checkpointing:
        base.gradient_checkpointing_disable()


# ---- what trainers call, on the instance: named as the methods whose place they take, which a pickle goes by -----------------


def gradient_checkpointing_enable(base: PreTrainedModel, *args: object, **kwargs: object) -> None:
    stands = getattr(base, ASKED, PLANNED)
    if stands is False:
        say_once("gradient checkpointing stays off: use_gradient_checkpointing=False overrides the trainer's default")
    elif stands == PLANNED:
        if next(base.parameters()).is_cuda:  # on a CPU all layers are recomputed, as the trainer wants
            say_once(
                "gradient checkpointing: free GPU memory decides which layers are recomputed, not the trainer's default; "
                "set use_gradient_checkpointing=True to recompute all layers, False to recompute none"
            )
    else:
        type(base).gradient_checkpointing_enable(base, *args, **kwargs)  # for calls that run on the model's own layers


def enable_input_require_grads(base: PreTrainedModel) -> None:
    """Reentrant checkpoints need embeddings with a gradient; ours do not, and the gradient would cost time."""


# ---- the memory's word -------------------------------------------------------------------------------------------------------


class KeptByMemory:
    def __init__(self, engine: FastCausalLM, asked: Recompute = PLANNED, *, free: Callable[[], int] | None = None) -> None:
        """`asked`: True and False are only told. `free`: bytes that tensors may still take."""
        self.engine, self.asked = engine, asked
        self._free = self._free_on_device if free is None else free
        self._planned_for = self._for_answers = 0  # tokens of a batch; bytes
        self._plan: Plan | None = None
        self._there = 0  # bytes, with what is taken

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptByMemory:
        """A copy of the model asks for itself."""
        return KeptByMemory(copy.deepcopy(self.engine, memo), self.asked)

    @property
    def planned_bytes(self) -> int:
        """The peak of tensors; 0: not planned."""
        return 0 if self._plan is None else self._peak(self._plan)

    def before(self, tokens: int) -> None:
        loop = loop_of(self.engine.model)
        if tokens <= self._planned_for and loop.generator.nbytes <= self._for_answers:
            return
        first, self._planned_for = not self._planned_for, max(self._planned_for, rounded(tokens))
        self._for_answers = loop.generator.nbytes
        if self.asked == PLANNED:
            loop.forget_graphs()  # whose memory counts as free
        try:
            job = job_of(self.engine, self._planned_for)
        except ModelError as error:  # nobody has written its sizes down
            if self.asked != PLANNED:
                return
            self._keep(None, f"all layers are recomputed in backward: {error.why}")
            return
        trained = sum(p.numel() for p in self.engine.model.parameters() if p.requires_grad)
        later = trained * 3 * FP32 if first else 0  # gradients and moments, which the first step makes
        free = self._free()
        self._there = free + (torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0)
        room = int((free - later - ASIDE) * (1 - MARGIN))
        problem = Problem(
            job,
            predicted_costs(job, reckoned_with(local_gpu(self._device), fp8=job.fp8)),
            room + sum(static_parts(job).values()),
        )
        least = plan_of(problem, (Choice("layer"),) * job.shape.layers, 1)
        if self.asked != PLANNED:
            plan = least if self.asked else plan_of(problem, (KEEP,) * job.shape.layers, 1)
            self._keep(plan, self._told(plan, least))
            return
        try:
            plan = make_plan(problem)
        except RecipeError:
            why = f"{room / 1e9:.1f} GB free, too little to save activations of a batch of {tokens:,} tokens"
            self._keep(least, f"{self._told(least, least)}: {why}")
            return
        self._keep(plan, self._told(plan, least))

    def lower(self) -> bool:
        if self._plan is None or self.asked != PLANNED:
            return False
        try:
            plan = self._plan.one_notch_lower()
        except EnvironmentFault:
            self._keep(None, "out of memory: all layers are recomputed in backward from now on")
        else:
            self._keep(plan, f"out of memory: {self._told(plan, plan)}")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def _keep(self, plan: Plan | None, text: str) -> None:
        """None: nothing but the layers' inputs."""
        self._plan = plan
        for number, layer in enumerate(self.engine.layers):
            layer.level = "layer" if plan is None else plan.choices[number].level
        say_once(f"memory: {text}")

    def _told(self, plan: Plan, least: Plan) -> str:
        """The planned peak and its parts; what is recomputed, and what recomputing all layers would leave of it."""
        job, total = plan.problem.job, self._peak(plan)
        parts = static_parts(job)
        tuned = next(name for name in parts if name.endswith("optimizer"))
        shown = {"weights": parts["weights"], tuned: parts[tuned]}
        if self._for_answers:
            shown["keys, values and logits of answers"] = self._for_answers
        shown[f"a batch of up to {job.capacity:,} tokens"] = total - sum(shown.values())
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in shown.items())
        fewer = self._peak(least)
        hint = f" (use_gradient_checkpointing=True: {fewer / 1e9:.1f} GB)" if fewer < total else ""
        return f"planned peak {total / 1e9:.1f} GB of {self._there / 1e9:.1f} GB ({listed}); {told(plan)}{hint}"

    def _peak(self, plan: Plan) -> int:
        """A step or the reading of prompts, whichever takes more, beside what answers keep."""
        job, reads = plan.problem.job, loop_of(self.engine.model).generator.reads
        reading = sum(static_parts(job).values()) + evaluation_bytes(job, rounded(reads)) if reads else 0
        return max(plan.peak_bytes, reading) + self._for_answers

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.engine.embeddings.weight.device
        return device

    def _free_on_device(self) -> int:
        return free_bytes(self._device)


def told(plan: Plan) -> str:
    again = [choice.level for choice in plan.choices if choice != KEEP]
    if not again:
        return "activations of all layers are saved, nothing is recomputed in backward"
    if {*again} == {"layer"} and len(again) == len(plan.choices):
        return "all layers are recomputed in backward"
    whole = sum(level != "gate_up" for level in again)
    parts = [f"{whole} fully"] * bool(whole) + [f"{len(again) - whole} partly"] * (len(again) > whole)
    return (
        f"{len(again)} of {len(plan.choices)} layers are recomputed in backward ({', '.join(parts)}); the others save "
        "their activations"
    )


def job_of(engine: FastCausalLM, tokens: int) -> Job:
    """The model as the planner knows it, for a batch of so many tokens."""
    groups = [group for layer in engine.layers for group in layer.groups]
    adapters = [
        (name, module)
        for group in groups
        for name, module in zip(group_names(group), group.modules(), strict=True)
        if hasattr(module, "lora_A")
    ]
    linears = [getattr(module, "base_layer", module) for group in groups for module in group.modules()]
    stored = next((row for linear in linears if (row := storage_of(linear))), None)
    method: Method = "lora" if adapters else "full"
    if stored:
        method = "fp8" if stored.in_fp8 else "qlora"
    rank = max((rank for _, module in adapters for rank in module.r.values()), default=16)
    return Job(
        shape_of(engine.model.config),
        tokens,
        method,
        rank,
        tuple(sorted({name for name, _ in adapters})),
        engine.embeddings.weight.element_size(),
        graphed=loop_of(engine.model).captured.on,
        storage=stored.name if stored and stored.read else "auto",
        head=engine.head.name,
        target=local_target(engine.embeddings.weight.device),
    )


def group_names(group: Any) -> tuple[str, ...]:
    return tuple(group.names) if hasattr(group, "names") else ("experts",) * len(group.modules())
