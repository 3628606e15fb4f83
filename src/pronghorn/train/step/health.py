"""Stops a run before broken numbers reach the weights, and says which rows broke them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from pronghorn.data.pack.batches import Shapes, build_batch
from pronghorn.data.pack.loader import StepBatch
from pronghorn.data.preference.pair_packing import split_groups
from pronghorn.errors import HealthStop, ModelError, RecipeError, counted
from pronghorn.hf_types import HFModel
from pronghorn.model.causal_lm import running
from pronghorn.train.dist.expert_shards import trained_shards_of
from pronghorn.train.dist.shards import in_turns, shards_of
from pronghorn.train.objectives import Objective, Supervised

NAMED = 5  # rows named in a message; more would not be read
EMPTY = Shapes({"N": (64,)}, longest=64, typical=64)  # of a pack without rows


def require_trainable(model: torch.nn.Module) -> int:
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if not count:
        raise RecipeError(
            what="nothing is trainable",
            why="no parameter of the model requires a gradient",
            fix="check method and lora.targets",
        )
    return count


def refuse_broken_weights(model: torch.nn.Module, name: str) -> None:
    """Asked once something else failed: it reads every weight, and a model that is sound need not wait for that."""
    broken = [key for key, p in model.named_parameters() if p.is_floating_point() and not _is_finite(p)]
    if broken:
        more = f" and {counted(len(broken) - 1, 'more weight')}" if len(broken) > 1 else ""
        raise ModelError(
            what=f"{broken[0]}{more}: NaN or infinity in the weights",
            where=name,
            why="the model files contain values that are not finite in this precision",
            fix="download the model again; if the files are correct, set precision: fp32 (fp16 overflows above 65,504)",
        )


class BrokenWeights(HealthStop):
    """The last update spoilt the weights: what it left is worth no checkpoint, and the run goes on from one before it."""


def lower_lr(precision: str = "fp32") -> str:
    """The end of a fix, in words that work: the run goes on with them."""
    other = "" if precision == "fp32" else " (or precision=fp32 --allow-change precision)"
    return f"lower train.lr and resume: run the same command with train.lr=... --allow-change train.lr{other}"


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of those that hold NaN or infinity."""
    return [name for name, tensor in tensors.items() if tensor.is_floating_point() and not _is_finite(tensor)]


def _is_finite(tensor: torch.Tensor) -> bool:
    """By the extremes, among which NaN would be: `isfinite` takes 1.75 times the tensor's memory for its own tensors."""
    return not tensor.numel() or all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(tensor))


def refused_checkpoint(step: int, broken: Sequence[str], folder: str) -> BrokenWeights:
    more = f" and {counted(len(broken) - 1, 'more tensor')}" if len(broken) > 1 else ""
    return BrokenWeights(
        what=f"checkpoint-{step} is not written: its weights are not finite",
        where=folder,
        why=f"an update overflowed: {broken[0]}{more}",
        fix=lower_lr(),
    )


class Offenders(NamedTuple):
    rows: list[str]  # whose own loss or gradient is not finite
    of: list[str]  # the step's rows


def require_sound(
    loss: float, grad_norm: float, step: int, offenders: Callable[[], Offenders], folder: str, precision: str
) -> None:
    """Called before the optimizer steps. `offenders` is asked only when something is wrong: it computes."""
    if grad_norm == 0.0 and math.isfinite(loss):
        raise HealthStop(
            what=f"step {step}: all gradients are zero",
            where=folder,
            why="the loss does not depend on any trained parameter",
            fix="check lora.targets; with precision: fp16, gradients can underflow (use bf16 or fp32)",
        )
    broken = "loss" if not math.isfinite(loss) else "gradient" if not math.isfinite(grad_norm) else ""
    if broken:
        what = f"step {step}: the {broken} is not finite; the weights are unchanged"
        raise _cause(offenders(), what, folder, lower_lr(precision))


def _cause(found: Offenders, what: str, folder: str, otherwise: str) -> HealthStop:
    """Rows are to blame only if others are not."""
    if not found.rows:
        why = f"no single row of the step causes it, but its rows together do: {listed(found.of)}"
        if not found.of:  # nobody has looked
            why = "the row was not searched for: no rank need have room for a whole one (world.context)"
        return HealthStop(what=what, where=folder, why=why, fix=otherwise)
    if len(found.rows) == len(found.of) > 1:
        why = f"each of the step's {len(found.of)} rows causes it, so the weights are broken, not the data"
        return BrokenWeights(what=what, where=folder, why=why, fix=otherwise)
    return HealthStop(
        what=what,
        where=folder,
        why=f"caused by {listed(found.rows)}",
        fix=f"inspect these rows (`pronghorn data show`); if they are fine, {otherwise}",
    )


def listed(rows: Iterable[str]) -> str:
    rows = list(rows)
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return ", ".join(rows[:NAMED]) + more


def offending_rows(
    model: HFModel, step_batch: StepBatch, device: torch.device, autocast: Callable[[], Any], objective: Objective | None = None
) -> Offenders:
    """Each row of the step alone, or each group of rows that the objective keeps together. Where weights are sharded, all ranks
    run the model: those whose row it is not have an empty pack."""
    objective, table, documents = objective or Supervised(), step_batch.rows, step_batch.documents
    shards, spread = shards_of(model), trained_shards_of(model)
    groups = list(split_groups(table, documents, objective.together)) if len(documents) else []
    guilty: list[str] = []
    drop_gradients = model.zero_grad if spread is None else spread.drop_gradients
    for rows in groups if shards is None else in_turns(groups, shards.world):
        drop_gradients()
        if rows is None:
            pack = build_batch(table, np.zeros(0, np.int64), EMPTY.longest, shapes=EMPTY)
        else:
            pack = build_batch(table, rows, int(table.lengths[rows].sum()))
        batch = objective.complete(pack, table).to(device)
        with autocast():
            loss = running(model, lambda batch=batch: objective.loss_sum(model, batch).sum())  # type: ignore[misc]
        loss.backward()
        found = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
        if spread is not None:
            found = [loss, spread.sum_up([torch.zeros_like(loss)])]
        if rows is not None and not all(bool(torch.isfinite(one).all()) for one in found):
            guilty += step_batch.names(rows)
    drop_gradients()
    return Offenders(guilty, step_batch.names(documents))
