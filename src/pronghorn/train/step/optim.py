"""AdamW, its parameter groups, the learning rate of each step, and its state as plain named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from pronghorn.errors import CheckpointError
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Train
from pronghorn.train.dist.expert_shards import trained_shards_of
from pronghorn.train.step.fused_adamw import FusedAdamW


def make_optimizer(model: torch.nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Ours on a GPU, torch's on a CPU: the same groups and the same state, so either goes on with the other's checkpoint.
    Moments in 8 bits are ours everywhere; on a CPU all memory is the host's, and paged changes nothing.

    Groups: matrices decay, vectors (norms, biases, DoRA magnitudes) do not; LoRA's B may learn faster (LoRA+).
    """
    spec = recipe.train
    groups: dict[tuple[float, float], list[torch.nn.Parameter]] = {}
    for name, parameter in trainable(model).items():
        decay = spec.weight_decay if parameter.ndim >= 2 else 0.0
        ratio = recipe.lora.plus_ratio if ".lora_B." in name or ".lora_embedding_B." in name else 1.0
        groups.setdefault((decay, ratio), []).append(parameter)
    settings = [
        {"params": parameters, "weight_decay": decay, "lr": spec.lr * ratio, "base_lr": spec.lr * ratio, "lr_ratio": ratio}
        for (decay, ratio), parameters in groups.items()
    ]
    eight_bit, paged = spec.optimizer.endswith("8bit"), spec.optimizer.startswith("paged")
    on_gpu = any(parameter.is_cuda for parameter in trainable(model).values())
    if on_gpu or eight_bit:
        return FusedAdamW(settings, betas=spec.betas, eps=spec.eps, eight_bit=eight_bit, paged=paged and on_gpu)
    return torch.optim.AdamW(settings, betas=spec.betas, eps=spec.eps, fused=True)


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Trained parameters by name; of sharded ones, this rank's part."""
    if (spread := trained_shards_of(model)) is not None:
        return spread.trained
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def lr_scale(step: int, total: int, spec: Train, early: int | None = None) -> float:
    """The share of the base learning rate that step `step` (from 0) of `total` uses. `early`: where the decay of wsd begins
    before its time. Its shape is 1 - sqrt, which ends lower than a line of as many steps (2405.18392)."""
    warmup = spec.warmup_steps(total)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if spec.schedule == "constant":
        return 1.0
    if spec.schedule == "wsd":
        decays = spec.decays(total, early)
        return 1.0 - math.sqrt((step - decays.start) / len(decays)) if step in decays else 1.0
    progress = (step - warmup) / max(1, total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress)) if spec.schedule == "cosine" else 1.0 - progress


def set_lr(optimizer: torch.optim.Optimizer, scale: float) -> float:
    """Returns the learning rate of the first group, for the log."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * scale
    return float(optimizer.param_groups[0]["lr"])


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`optimizer/exp_avg/<parameter>` and so on: by name, so that it does not depend on the order of parameters."""
    if isinstance(optimizer, FusedAdamW):
        optimizer.wait_for_paged()
    return {
        f"optimizer/{key}/{name}": optimizer.state[parameter][key].detach()
        for name, parameter in trainable(model).items()
        if parameter in optimizer.state
        for key in optimizer.state[parameter]
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
    """A checkpoint from before the first update (no answer was better than another) has no state, and needs none."""
    if not any(name.startswith("optimizer/") for name in tensors):
        zero_state(optimizer)
        return
    for name, parameter in trainable(model).items():
        state = optimizer.state.get(parameter)  # in place: a CUDA graph has its addresses
        if not state:
            state = optimizer.fresh_state(parameter) if isinstance(optimizer, FusedAdamW) else _fresh_state(parameter)
        for key, place in state.items():
            stored = tensors.get(f"optimizer/{key}/{name}")
            if stored is None or stored.shape != place.shape or stored.dtype != place.dtype:
                raise CheckpointError(
                    what=f"the checkpoint's optimizer state does not fit parameter {name}",
                    why="it comes from a run with a different adapter or model",
                    fix="start over with --fresh (the old folder is renamed, not deleted)",
                )
            place.copy_(stored[...])
        optimizer.state[parameter] = state


def reset_optimizer(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """As it was before the first step, with this rate; in place, as above."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] = lr * group["lr_ratio"]
    zero_state(optimizer)


def zero_state(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()


def _fresh_state(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """State of torch's fused AdamW, which keeps its step counter on the parameter's device."""
    return {
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
    }
