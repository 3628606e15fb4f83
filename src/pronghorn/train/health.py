"""Stops a run before broken numbers reach the weights, and says which rows broke them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from pronghorn.data.batches import StepBatch, TokenRows, build_batch
from pronghorn.errors import HealthStop, ModelError, RecipeError
from pronghorn.train.objectives import loss_sum

NAMED = 5  # rows named in a message; more would not be read


def require_trainable(model: torch.nn.Module) -> int:
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not count:
        raise RecipeError(what="nothing is trainable", why="no parameter of this model asks for a gradient",
                          fix="check method and lora.targets")
    return count


def refuse_broken_weights(model: torch.nn.Module, name: str) -> None:
    """Asked once something else failed: it reads every weight, and a model that is sound need not wait for that."""
    broken = [key for key, p in model.named_parameters() if p.is_floating_point() and not bool(torch.isfinite(p).all())]
    if broken:
        more = f" and {len(broken) - 1} more weights" if len(broken) > 1 else ""
        raise ModelError(what=f"{broken[0]}{more}: not every number is finite", where=name,
                         why="the model's files hold NaN or infinity, and everything computed from them does, too",
                         fix="get the model's files again; if they are meant so, set precision: fp32 (fp16 ends at 65,504)")


def require_sound(loss: float, grad_norm: float, step: int, offenders: Callable[[], list[str]], folder: str) -> None:
    """Called before the optimizer steps. `offenders` is asked only when something is wrong: it computes."""
    if grad_norm == 0.0 and math.isfinite(loss):
        raise HealthStop(
            what=f"step {step}: all gradients are zero", where=folder,
            why="the loss does not depend on anything that is trained",
            fix="check lora.targets, and that precision: fp16 does not underflow (bf16 or fp32 do not)",
        )
    broken = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(grad_norm) else ""
    if broken:
        raise HealthStop(
            what=f"step {step}: the {broken} is not finite; the weights were not touched", where=folder,
            why=f"seen with {_listed(offenders())}",
            fix="look at those rows (`pronghorn data show`); if they are fine, lower train.lr or set precision: fp32",
        )


def _listed(rows: Iterable[str]) -> str:
    rows = list(rows)
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return ", ".join(rows[:NAMED]) + more


def offending_rows(model: Any, step_batch: StepBatch, table: TokenRows, where: Callable[[int], str],
                   device: torch.device, autocast: Callable[[], Any]) -> list[str]:
    """The documents whose own loss or gradient is not finite; all of the step's if none is bad alone."""
    documents = [row for batch in step_batch.batches for row in batch.documents]
    guilty = []
    for row in documents:
        model.zero_grad(set_to_none=True)
        batch = build_batch(table, np.array([row]), int(table.lengths[row])).to(device)
        with autocast():
            loss = loss_sum(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        if not torch.isfinite(loss) or not all(bool(torch.isfinite(grad).all()) for grad in grads):
            guilty.append(where(row))
    model.zero_grad(set_to_none=True)
    return guilty or [where(row) for row in documents]
