"""Stops a run before broken numbers reach the weights, and says which rows broke them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from pronghorn.data.batches import StepBatch, TokenRows, build_batch
from pronghorn.errors import HealthStop, ModelError, RecipeError, counted
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
        more = f" and {counted(len(broken) - 1, 'more weight')}" if len(broken) > 1 else ""
        raise ModelError(what=f"{broken[0]}{more}: not every number is finite", where=name,
                         why="the model's files hold NaN or infinity, and everything computed from them does, too",
                         fix="get the model's files again; if they are meant so, set precision: fp32 (fp16 ends at 65,504)")


class Offenders(NamedTuple):
    rows: list[str]  # whose own loss or gradient is not finite
    of: list[str]  # the step's rows


def require_sound(loss: float, grad_norm: float, step: int, offenders: Callable[[], Offenders], folder: str,
                  precision: str) -> None:
    """Called before the optimizer steps. `offenders` is asked only when something is wrong: it computes."""
    if grad_norm == 0.0 and math.isfinite(loss):
        raise HealthStop(
            what=f"step {step}: all gradients are zero", where=folder,
            why="the loss does not depend on anything that is trained",
            fix="check lora.targets, and that precision: fp16 does not underflow (bf16 or fp32 do not)",
        )
    broken = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(grad_norm) else ""
    if broken:
        why, fix = _cause(offenders(), "lower train.lr" + " or set precision: fp32" * (precision != "fp32"))
        raise HealthStop(what=f"step {step}: the {broken} is not finite; the weights were not touched", where=folder, why=why,
                         fix=fix)


def _cause(found: Offenders, otherwise: str) -> tuple[str, str]:
    """(why, fix): rows are to blame only if others are not."""
    if not found.rows:
        return f"none of the step's rows is bad alone, only together: {_listed(found.of)}", otherwise
    if len(found.rows) == len(found.of) > 1:
        return f"seen with each of the step's {len(found.of)} rows, so it is the weights and not the data", otherwise
    return f"seen with {_listed(found.rows)}", f"look at those rows (`pronghorn data show`); if they are fine, {otherwise}"


def _listed(rows: Iterable[str]) -> str:
    rows = list(rows)
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return ", ".join(rows[:NAMED]) + more


def offending_rows(model: Any, step_batch: StepBatch, table: TokenRows, where: Callable[[int], str],
                   device: torch.device, autocast: Callable[[], Any]) -> Offenders:
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
    return Offenders(guilty, [where(row) for row in documents])
