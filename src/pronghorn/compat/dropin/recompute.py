"""Gradient checkpointing in scripts with a trainer of their own: which setting decides whether layers recompute in backward.

`use_gradient_checkpointing` True or False is the user's word: it stands, whatever a trainer does by default (TRL's turns
recomputing on). "unsloth", and saying nothing, leaves it to the memory that there is: at the first batch, and at every
larger one, the layers keep what fits, and it is said what that is. Results are the same bits either way.
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
from pronghorn.memory.dry_run import static_parts
from pronghorn.memory.gpus import local_gpu, reckoned_with
from pronghorn.memory.job import FP32, Job, Method, local_target, shape_of
from pronghorn.memory.levels import KEEP, Problem
from pronghorn.memory.plan import Plan, make_plan
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
    plans = stands == PLANNED and engine.embeddings.weight.is_cuda
    loop_of(base).chooser = KeptByMemory(engine) if plans else None
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
    def __init__(self, engine: FastCausalLM, *, free: Callable[[], int] | None = None) -> None:
        """`free`: bytes that tensors may still take."""
        self.engine = engine
        self._free = self._free_on_device if free is None else free
        self._planned_for = 0  # tokens
        self._plan: Plan | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptByMemory:
        """A copy of the model asks for itself."""
        return KeptByMemory(copy.deepcopy(self.engine, memo))

    def before(self, tokens: int) -> None:
        if tokens <= self._planned_for:
            return
        first, self._planned_for = not self._planned_for, rounded(tokens)
        loop_of(self.engine.model).forget_graphs()  # whose memory counts as free
        try:
            job = job_of(self.engine, self._planned_for)
        except ModelError as error:  # nobody has written its sizes down
            self._keep(None, f"all layers are recomputed in backward: {error.why}")
            return
        trained = sum(p.numel() for p in self.engine.model.parameters() if p.requires_grad)
        later = trained * 3 * FP32 if first else 0  # gradients and moments, which the first step makes
        room = int((self._free() - later - ASIDE) * (1 - MARGIN))
        problem = Problem(
            job,
            predicted_costs(job, reckoned_with(local_gpu(self._device), fp8=job.fp8)),
            room + sum(static_parts(job).values()),
        )
        try:
            plan = make_plan(problem)
        except RecipeError:
            self._keep(
                None,
                f"all layers are recomputed in backward: {room / 1e9:.1f} GB free, too little to save activations of "
                f"a batch of {tokens:,} tokens",
            )
            return
        self._keep(plan, told(plan, tokens))

    def lower(self) -> bool:
        if self._plan is None:
            return False
        try:
            plan = self._plan.one_notch_lower()
        except EnvironmentFault:
            self._keep(None, "out of memory: all layers are recomputed in backward from now on")
        else:
            self._keep(plan, f"out of memory: {told(plan, self._planned_for)}")
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return True

    def _keep(self, plan: Plan | None, text: str) -> None:
        """None: nothing but the layers' inputs."""
        self._plan = plan
        for number, layer in enumerate(self.engine.layers):
            layer.level = "layer" if plan is None else plan.choices[number].level
        say_once(f"memory: {text}")

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.engine.embeddings.weight.device
        return device

    def _free_on_device(self) -> int:
        return free_bytes(self._device)


def told(plan: Plan, tokens: int) -> str:
    again = [choice.level for choice in plan.choices if choice != KEEP]
    if not again:
        return f"activations of all layers are saved for batches of up to {tokens:,} tokens; nothing is recomputed in backward"
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
