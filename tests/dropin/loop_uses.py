"""Kinds of training loop, as people write them by hand: each takes a model and gives back the numbers it saw.

`test_trainer_uses.py` runs each with a model of stock transformers and PEFT and with a fast one. A use knows the model's public
interface only, and makes its own batches, so that both see the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dropin.same_numbers import gradients

Use = Callable[[Any], Any]
LOOPS: dict[str, Use] = {}


def use(function: Use) -> Use:
    LOOPS[function.__name__.replace("_", " ")] = function
    return function


def ids(seed: int = 0, rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(3, 259, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(seed: int = 0, **more: Any) -> dict[str, Any]:
    """Some labels are left out, more in some batches than in others."""
    tokens = ids(seed)
    kept = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed + 100)) < 0.3 + 0.2 * (seed % 4)
    kept[0, 1] = True
    return {"input_ids": tokens, "labels": torch.where(kept, tokens, -100)} | more


def trained(model: Any) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def sgd(model: Any, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=rate)


def loss_of(model: Any, seed: int = 0, **more: Any) -> Tensor:
    loss: Tensor = model(**batch(seed, **more)).loss
    return loss


def train(model: Any, optimizer: torch.optim.Optimizer, count: int = 2, first: int = 0) -> list[Any]:
    """The loop that everybody writes: losses and gradients of each step."""
    seen: list[Any] = []
    for number in range(first, first + count):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


def evaluate(model: Any, seed: int = 50) -> list[Tensor]:
    was = model.training
    model.eval()
    with torch.no_grad():
        out = model(**batch(seed))
        seen = [out.loss, out.logits]
    model.train(was)
    return seen


# ---- accumulation and clipping ---------------------------------------------------------------------------------------


@use
def a_mean_of_means(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        for part in range(3):
            loss = loss_of(model, 3 * step + part) / 3
            loss.backward()
            seen.append(loss.detach())
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@use
def accumulation_over_all_tokens(model: Any) -> Any:
    """`num_items_in_batch`: a number, then a tensor."""
    optimizer, seen = sgd(model), []
    for as_given in (int, torch.tensor):
        parts = [batch(seed) for seed in range(3)]
        count = as_given(sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts))
        for part in parts:
            loss = model(**part, num_items_in_batch=count).loss
            loss.backward()
            seen.append(loss.detach())
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


@use
def clipped_by_norm_and_by_value(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step:
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
        else:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        seen.append(gradients(model))
        optimizer.step()
    return seen


@use
def gradients_of_zeros_instead_of_none(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        model.zero_grad(set_to_none=False)
        places = {name: p.grad.data_ptr() for name, p in trained(model).items() if p.grad is not None}
        loss_of(model, step).backward()
        assert all(p.grad.data_ptr() == places[name] for name, p in trained(model).items() if name in places)
        seen.append(gradients(model))
        optimizer.step()
    return seen


@use
def gradients_in_one_flat_buffer(model: Any) -> Any:
    parameters = trained(model)
    flat = torch.zeros(sum(p.numel() for p in parameters.values()))
    for parameter, part in zip(parameters.values(), flat.split([p.numel() for p in parameters.values()]), strict=True):
        parameter.grad = part.view_as(parameter)
    optimizer, seen = sgd(model), []
    for step in range(2):
        flat.zero_()
        loss_of(model, step).backward()
        seen.append(flat.clone())
        optimizer.step()
    return seen


# ---- what is done with the loss --------------------------------------------------------------------------------------


@use
def two_losses_added(model: Any) -> Any:
    return [(loss_of(model, 0) + 0.3 * loss_of(model, 1)).backward(), gradients(model), train(model, sgd(model))]


@use
def two_forwards_and_the_first_backward_last(model: Any) -> Any:
    first, second = loss_of(model, 0), loss_of(model, 1)
    second.backward()
    seen = [gradients(model)]
    first.backward()
    return [*seen, first.detach(), second.detach(), gradients(model), train(model, sgd(model))]


@use
def two_backwards_of_one_forward(model: Any) -> Any:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    once = gradients(model)
    (2 * loss).backward()
    return [once, gradients(model), train(model, sgd(model))]


@use
def one_forward_beside_another_that_is_kept(model: Any) -> Any:
    """retain_graph of the first, a second forward and backward, and then the first again."""
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss_of(model, 1).backward()
    loss.backward()
    return gradients(model)


@use
def the_loss_times_a_factor(model: Any) -> Any:
    seen = []
    for act in (
        lambda loss: (1024.0 * loss).backward(),
        lambda loss: (-loss).backward(),
        lambda loss: loss.backward(gradient=torch.tensor(0.25)),
        lambda loss: loss.exp().backward(),
        lambda loss: torch.where(loss > 0, loss, 0 * loss).backward(),
        lambda loss: (0 * loss).backward(),
        lambda loss: torch.autograd.backward([loss, loss * 2]),
    ):
        act(loss_of(model))
        seen.append(gradients(model))
        model.zero_grad()
    return seen


@use
def the_loss_changed_in_place(model: Any) -> Any:
    loss = loss_of(model)
    loss *= 3
    loss.backward()
    return [loss.detach(), gradients(model)]


@use
def autograd_grad_instead_of_backward(model: Any) -> Any:
    parameters = list(trained(model).values())
    some = torch.autograd.grad(loss_of(model), parameters[1:3])
    assert all(p.grad is None for p in parameters)
    return [some, torch.autograd.grad(loss_of(model, 1), parameters)]


@use
def backward_into_some_parameters_only(model: Any) -> Any:
    loss_of(model).backward(inputs=list(trained(model).values())[::2])
    return gradients(model)


@use
def gradients_of_the_embeddings_that_come_in(model: Any) -> Any:
    given = batch()
    embedded = model.get_input_embeddings()(given.pop("input_ids")).detach().requires_grad_()
    out = model(inputs_embeds=embedded, **given)
    out.loss.backward()
    return [out.loss.detach(), embedded.grad, gradients(model)]


# ---- logits ----------------------------------------------------------------------------------------------------------


@use
def a_loss_of_ones_own_on_the_logits(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        optimizer.zero_grad()
        given = batch(step)
        labels = given.pop("labels")
        logits = model(**given).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


@use
def a_loss_on_the_logits_beside_the_models(model: Any) -> Any:
    out = model(**batch())
    spread = out.logits.logsumexp(-1).square().mean()
    (out.loss + 0.1 * spread).backward()
    return [spread.detach(), gradients(model)]


@use
def gradients_of_the_logits(model: Any) -> Any:
    out = model(**batch())
    out.logits.retain_grad()
    out.logits.softmax(-1)[..., 7].sum().backward()
    return [out.logits.grad, gradients(model)]


@use
def logits_changed_in_place(model: Any) -> Any:
    out = model(**batch())
    with torch.no_grad():
        out.logits[:, 0] = 0
    seen = [out.logits.detach().clone(), out["logits"].detach().clone(), out[1].detach().clone()]
    out.loss.backward()
    return [seen, gradients(model)]


@use
def outputs_taken_apart(model: Any) -> Any:
    loss, logits = model(**batch()).to_tuple()[:2]
    as_tuple = model(**batch(), return_dict=False)
    detached = {name: value for name, value in model(**batch()).items() if name in ("loss", "logits")}
    return [loss, logits, as_tuple[0], as_tuple[1], detached["loss"], model(**batch())[:2]]


# ---- hooks -----------------------------------------------------------------------------------------------------------


@use
def hooks_on_parameters(model: Any) -> Any:
    """They read and change gradients: as each arrives, and as it has been added."""
    seen: list[Any] = []

    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    for name, parameter in list(trained(model).items())[:3]:
        parameter.register_hook(lambda grad, name=name: seen.append((name, grad.clone())) or grad * 2)
        parameter.register_post_accumulate_grad_hook(halve)
    return [train(model, sgd(model)), sorted(seen, key=lambda pair: pair[0])]


@use
def an_optimizer_inside_backward(model: Any) -> Any:
    """Each weight is changed as soon as its gradient is there, and the gradient is gone."""
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in trained(model).values()}

    def act(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(act)
    seen = []
    for step in range(2):
        loss = loss_of(model, step)
        loss.backward()
        seen.append(loss.detach())
    return seen


@use
def hooks_on_modules(model: Any) -> Any:
    seen: list[Any] = []
    layer = next(module for name, module in model.named_modules() if name.endswith("layers.1.self_attn.v_proj"))
    handles = [
        layer.register_forward_hook(lambda _, args, out: seen.append(out.detach().clone())),
        layer.register_full_backward_hook(lambda _, grads, outs: seen.append(outs[0].clone())),
    ]
    found = train(model, sgd(model), 1)
    for handle in handles:
        handle.remove()
    return [found, seen, train(model, sgd(model), 1, first=1)]


@use
def hooks_on_the_model(model: Any) -> Any:
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["labels"]), with_kwargs=True)
    model.register_forward_hook(lambda _, args, out: seen.append(out.loss.detach()))
    return [train(model, sgd(model)), seen]


@use
def saved_tensors_elsewhere(model: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(force=True), torch.from_numpy):
        loss = loss_of(model)
    loss.backward()
    return gradients(model)


@use
def a_checkpoint_around_the_model(model: Any) -> Any:
    seen = []
    for reentrant in (False, True):
        scale = torch.ones((), requires_grad=True)
        loss = torch.utils.checkpoint.checkpoint(lambda s: s * loss_of(model), scale, use_reentrant=reentrant)
        loss.backward()
        seen += [loss.detach(), gradients(model), scale.grad]
        model.zero_grad()
    return seen


# ---- precision and scaling -------------------------------------------------------------------------------------------


@use
def a_grad_scaler(model: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    optimizer, seen = sgd(model), []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * (torch.inf if step == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        if step != 1:
            seen += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 0.1), gradients(model)]
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@use
def in_double_precision(model: Any) -> Any:
    model.double()
    return train(model, sgd(model))


# ---- accelerate and closures -----------------------------------------------------------------------------------------


@use
def accelerate_accumulates(model: Any) -> Any:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(model, sgd(model))
    seen = []
    for step in range(4):
        with accelerator.accumulate(model):
            loss = loss_of(model, step)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            seen += [loss.detach(), gradients(model)]
            optimizer.step()
            optimizer.zero_grad()
    with accelerator.no_sync(model):
        accelerator.backward(loss_of(model, 9))
    return [seen, gradients(accelerator.unwrap_model(model))]


@use
def a_closure_as_lightning_gives_it(model: Any) -> Any:
    optimizer, seen = sgd(model), []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, len(seen))
        loss.backward()
        seen.append(loss.detach())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    line = torch.optim.LBFGS(trained(model).values(), lr=0.1, max_iter=2)
    line.step(closure)
    return seen


@use
def sharpness_aware_steps(model: Any) -> Any:
    """Weights are moved up, a second gradient is taken there, and they are moved back."""
    optimizer, seen = sgd(model), []
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        moves = {p: 0.05 * p.grad / (p.grad.norm() + 1e-6) for p in trained(model).values() if p.grad is not None}
        with torch.no_grad():
            for parameter, move in moves.items():
                parameter.add_(move)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        with torch.no_grad():
            for parameter, move in moves.items():
                parameter.sub_(move)
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen
