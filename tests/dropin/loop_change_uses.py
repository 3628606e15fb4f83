"""Kinds of training loop in which what trains, or its weights, change between or within steps (see loop_uses.py)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dropin.loop_uses import LOOPS, batch, evaluate, loss_of, sgd, train, trained, use

__all__ = ["LOOPS"]  # these and those of loop_uses.py
from dropin.same_numbers import gradients

# ---- what trains, and how fast ---------------------------------------------------------------------------------------


@use
def frozen_and_then_unfrozen(model: Any) -> Any:
    parts = trained(model)
    seen = []
    for kept in ("layers.1", "layers.0", ""):
        for name, parameter in parts.items():
            parameter.requires_grad_(kept in name)
            parameter.grad = None
        seen.append(train(model, sgd(model), 1))
    return seen


@use
def another_part_unfrozen(model: Any) -> Any:
    """Norms, and a linear beside its adapter, begin to train after the first step."""
    seen = [train(model, sgd(model), 1)]
    for name, parameter in model.named_parameters():
        if "norm" in name or "layers.0.self_attn.o_proj" in name or "embed_tokens" in name:
            parameter.requires_grad_(True)
    return [*seen, train(model, sgd(model, 0.05), 2)]


@use
def rates_changed_and_groups_added(model: Any) -> Any:
    parameters = list(trained(model).values())
    optimizer = torch.optim.AdamW([{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2], "lr": 1e-3}], eps=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    seen = []
    for step in range(3):
        seen.append(train(model, optimizer, 1, first=step))
        schedule.step()
        if step == 1:
            for group in optimizer.param_groups:
                group["lr"] = 3e-2
    return seen


@use
def an_average_of_the_weights(model: Any) -> Any:
    """A deep copy that follows; it is evaluated between the steps, and trained itself at the end."""
    average = copy.deepcopy(model)
    optimizer, seen = sgd(model), []
    for step in range(2):
        seen.append(train(model, optimizer, 1, first=step))
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
        seen.append(evaluate(average))
    return [*seen, train(average, sgd(average), 1), dict(average.named_parameters()), evaluate(model)]


@contextlib.contextmanager
def other_weights(model: Any) -> Iterator[None]:
    """Of an average, say, put into their places and taken out again."""
    stored = {p: p.data for p in model.parameters()}
    for parameter in stored:
        parameter.data = parameter.data * 0.9
    yield
    for parameter, data in stored.items():
        parameter.data = data


@use
def weights_swapped_for_an_evaluation(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        seen.append(train(model, optimizer, 1, first=step))
        with other_weights(model):
            seen.append(evaluate(model))
    return [*seen, train(model, optimizer, 1)]


@use
def weights_swapped_between_forward_and_backward(model: Any) -> Any:
    loss = loss_of(model)
    with other_weights(model):
        seen = [evaluate(model), loss_of(model, 1).detach()]
    loss.backward()
    return [seen, gradients(model)]


@use
def other_weights_for_one_call(model: Any) -> Any:
    """torch.func.functional_call: their gradients, and those of the model's own in the same backward."""
    own = loss_of(model)
    given = {name: (p.detach() * 0.9).requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
    out = torch.func.functional_call(model, given, kwargs=batch(1))
    (out.loss + own).backward()
    return [out.loss.detach(), {name: p.grad for name, p in given.items() if p.grad is not None}, gradients(model)]


@use
def frozen_between_forward_and_backward(model: Any) -> Any:
    """As loops do that train two parts in turn."""
    parts = trained(model)
    first = loss_of(model)
    for name, parameter in parts.items():
        parameter.requires_grad_("layers.1" in name)
    second = loss_of(model, 1)
    for name, parameter in parts.items():
        parameter.requires_grad_("layers.0" in name)
    first.backward()
    seen = gradients(model)
    second.backward()
    for parameter in parts.values():
        parameter.requires_grad_(True)
    return [seen, gradients(model)]


@use
def embeddings_changed_between_forward_and_backward(model: Any) -> Any:
    given = batch()
    embedded = model.get_input_embeddings()(given.pop("input_ids")).detach()
    loss = model(inputs_embeds=embedded, **given).loss
    embedded.mul_(2)
    loss.backward()
    return gradients(model)


def refused(loss: Tensor) -> str:
    try:
        loss.backward()
    except RuntimeError as error:
        return "refused" if "modified by an inplace operation" in str(error) else str(error)
    return "not refused"


@use
def a_step_between_forward_and_backward(model: Any) -> Any:
    """torch refuses a backward through weights that have changed since."""
    optimizer = sgd(model)
    first, second = loss_of(model, 0), loss_of(model, 1)
    first.backward()
    optimizer.step()
    found = refused(second)
    model.zero_grad()  # some may have arrived
    return found
