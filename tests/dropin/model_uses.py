"""Kinds of loop that change what the model is, or what it is given: adapters, modes, batches of every shape."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import DataCollatorWithFlattening

from dropin.loop_uses import Use, batch, evaluate, ids, loss_of, sgd, train, trained
from dropin.same_numbers import gradients

ADAPTERS: dict[str, Use] = {}
MODELS: dict[str, Use] = {}


def of_an_adapter(function: Use) -> Use:
    ADAPTERS[function.__name__.replace("_", " ")] = function
    return function


def use(function: Use) -> Use:
    MODELS[function.__name__.replace("_", " ")] = function
    return function


# ---- adapters --------------------------------------------------------------------------------------------------------


def with_second(model: Any) -> Any:
    model.add_adapter("second", LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=8, target_modules=["q_proj", "o_proj"]))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if ".second." in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data.copy_(0.1 * values)
    return model


@of_an_adapter
def adapters_switched_between_steps(model: Any) -> Any:
    with_second(model)
    seen = []
    for step, name in enumerate(("second", "default", "second")):
        model.set_adapter(name)
        seen.append(train(model, sgd(model), 1, first=step))
    return seen


@of_an_adapter
def an_adapter_off_for_a_reference(model: Any) -> Any:
    """As DPO does it: without gradients, before and after the forward that trains."""
    seen, optimizer = [], sgd(model, 0.02)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        with torch.no_grad(), model.disable_adapter():
            out = model(**batch(step))
        (loss - 0.5 * out.loss).square().backward()
        seen += [loss.detach(), out.loss, out.logits, gradients(model)]
        optimizer.step()
    return seen


@of_an_adapter
def two_adapters_in_one_backward(model: Any) -> Any:
    with_second(model)
    first = loss_of(model)
    model.set_adapter("second")
    second = loss_of(model, 1)
    model.set_adapter("default")
    (first + second).backward()
    return [first.detach(), second.detach(), gradients(model)]


@of_an_adapter
def merged_for_an_evaluation(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        seen.append(train(model, optimizer, 1, first=step))
        model.merge_adapter()
        seen.append(evaluate(model))
        model.unmerge_adapter()
    return [*seen, train(model, optimizer, 1)]


@of_an_adapter
def merged_for_good_and_a_new_adapter(model: Any) -> Any:
    seen = [train(model, sgd(model))]
    base = model.merge_and_unload()
    return [*seen, evaluate(base), [p for name, p in base.named_parameters() if "layers" in name]]


@of_an_adapter
def an_adapter_read_into_the_model(model: Any) -> Any:
    start = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    seen = [train(model, sgd(model))]
    set_peft_model_state_dict(model, start)
    return [*seen, train(model, sgd(model)), get_peft_model_state_dict(model)]


@of_an_adapter
def the_scale_of_an_adapter_changed(model: Any) -> Any:
    seen = [train(model, sgd(model), 1)]
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.3)
    return [*seen, train(model, sgd(model), 1)]


@of_an_adapter
def dropout_off_in_evaluation_mode(model: Any) -> Any:
    """Some train in evaluation mode."""
    model.eval()
    return train(model, sgd(model))


# ---- modes and copies ------------------------------------------------------------------------------------------------


@use
def evaluation_and_generation_between_steps(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step in range(2):
        seen += [train(model, optimizer, 1, first=step), evaluate(model)]
        model.eval()
        prompt = ids(7, rows=2, length=5)
        for cached in (True, False):
            seen.append(
                model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=4,
                    do_sample=False,
                    use_cache=cached,
                )
            )
        model.train()
    return seen


@use
def an_evaluation_between_forward_and_backward(model: Any) -> Any:
    loss = loss_of(model)
    seen = evaluate(model)
    model.eval()
    model.generate(input_ids=ids(7, rows=1, length=4), max_new_tokens=2, do_sample=False)
    model.train()
    loss.backward()
    return [seen, gradients(model)]


@use
def an_evaluation_in_inference_mode_before_and_between(model: Any) -> Any:
    seen: list[Any] = []
    optimizer = sgd(model)
    for step in range(2):
        model.eval()
        with torch.inference_mode():
            out = model(**batch(50))
            seen.append([out.loss.clone(), out.logits.clone()])
            prompt = ids(7, rows=1, length=4)
            seen.append(
                model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
            )
        model.train()
        loss = loss_of(model, step)
        with torch.inference_mode():
            seen.append(model(**batch(51)).loss.clone())
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


@use
def two_models_in_turn(model: Any) -> Any:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in trained(other).values():
            parameter.mul_(0.7)
    both = [(model, sgd(model)), (other, sgd(other, 0.2))]
    seen = [train(one, optimizer, 1, first=step) for step in range(2) for one, optimizer in both]
    (loss_of(model) * loss_of(other)).backward()
    return [*seen, gradients(model), gradients(other), dict(trained(other))]


@use
def a_student_beside_its_teacher(model: Any) -> Any:
    teacher = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in trained(teacher).values():
            parameter.mul_(0.5)
    optimizer, seen = sgd(model, 0.02), []
    for step in range(2):
        optimizer.zero_grad()
        given = batch(step)
        with torch.no_grad():
            goal = teacher(**given).logits.log_softmax(-1)
        out = model(**given)
        apart = nn.functional.kl_div(out.logits.log_softmax(-1), goal, log_target=True, reduction="batchmean")
        (0.5 * out.loss + apart).backward()
        seen += [apart.detach(), gradients(model)]
        optimizer.step()
    return seen


@use
def a_state_dict_taken_and_read_again(model: Any) -> Any:
    optimizer = sgd(model)
    seen = [train(model, optimizer, 1)]
    taken = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, taken)
    seen.append(train(model, optimizer, 1))
    taken.seek(0)
    read = torch.load(taken)
    model.load_state_dict(read["model"])
    return [*seen, train(model, optimizer, 1), model.state_dict()]


@use
def a_state_dict_taken_between_forward_and_backward(model: Any) -> Any:
    loss = loss_of(model)
    taken = model.state_dict()
    loss.backward()
    return [taken, gradients(model)]


@use
def gradient_checkpointing_switched(model: Any) -> Any:
    optimizer, seen = sgd(model), []
    for step, options in enumerate(({"use_reentrant": False}, {"use_reentrant": True}, None)):
        if options is None:
            model.gradient_checkpointing_disable()
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            model.enable_input_require_grads()
        seen.append(train(model, optimizer, 1, first=step))
    return seen


@use
def a_compiled_model(model: Any) -> Any:
    """The backend that only traces: what matters is who runs."""
    compiled = torch.compile(model, backend="eager")
    optimizer, seen = sgd(model), []
    for step in range(2):
        optimizer.zero_grad()
        loss = compiled(**batch(step)).loss
        loss.backward()
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


# ---- batches ---------------------------------------------------------------------------------------------------------


def padded(side: str, seed: int = 0) -> dict[str, Any]:
    given = batch(seed)
    mask = torch.ones_like(given["input_ids"])
    mask[1, slice(7, None) if side == "right" else slice(0, 4)] = 0
    labels = given["labels"].masked_fill(mask == 0, -100)
    if side == "left":
        labels[1, 4] = -100
    return {"input_ids": given["input_ids"] * mask, "attention_mask": mask, "labels": labels}


def over(model: Any, batches: list[dict[str, Any]], rate: float = 0.05) -> list[Any]:
    optimizer, seen = sgd(model, rate), []
    for given in batches:
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        seen += [loss.detach(), gradients(model)]
        optimizer.step()
    return seen


@use
def padded_on_either_side(model: Any) -> Any:
    return over(model, [padded("right"), padded("left", 1), batch(2), padded("right", 3)])


@use
def labels_on_padding(model: Any) -> Any:
    """Of who forgot to mask them."""
    given = padded("right")
    given["labels"] = given["input_ids"].clone()
    return over(model, [given, padded("left")])


@use
def without_any_label(model: Any) -> Any:
    nothing = batch()
    nothing["labels"] = torch.full_like(nothing["labels"], -100)
    out = model(**nothing, num_items_in_batch=5)
    out.loss.backward()
    return [out.loss.detach(), gradients(model), over(model, [batch(1)])]


@use
def flattened_without_padding(model: Any) -> Any:
    rows = [{"input_ids": ids(seed, rows=1, length=5 + 2 * seed)[0].tolist()} for seed in range(4)]
    seen = []
    for cumulative in (False, True):
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=cumulative)
        given = [dict(collate(copy.deepcopy(part))) for part in (rows[:2], rows[2:])]
        for one in given:  # stock attention that reads no kernel's arguments takes documents from positions
            one["use_cache"] = False
        seen.append(over(model, given))
    return seen


@use
def positions_given(model: Any) -> Any:
    rows = torch.arange(11)
    packed = torch.cat([torch.arange(4), torch.arange(7)])
    return over(
        model,
        [
            batch(0, position_ids=rows[None].expand(2, -1), use_cache=False),
            batch(1, position_ids=(rows + 5)[None].expand(2, -1), use_cache=False),
            batch(2, position_ids=packed[None].expand(2, -1), use_cache=False),
            padded("left", 3) | {"position_ids": torch.tensor([[*range(11)], [*[1] * 4, *range(7)]])},
        ],
    )


@use
def labels_shifted_already(model: Any) -> Any:
    given = batch()
    shifted = nn.functional.pad(given["labels"][:, 1:], (0, 1), value=-100)
    return over(
        model,
        [
            given | {"shift_labels": shifted},
            {"input_ids": given["input_ids"], "shift_labels": shifted, "labels": given["labels"]},
        ],
    )


@use
def masks_of_four_dimensions_and_with_holes(model: Any) -> Any:
    given = batch()
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    causal[6:, 2] = False
    holes = torch.ones(2, 11, dtype=torch.long)
    holes[0, 3:5] = 0
    added = torch.where(causal, 0.0, torch.finfo().min)[None, None].expand(2, 1, -1, -1)
    return over(model, [given | {"attention_mask": added}, given | {"attention_mask": holes}])


@use
def hidden_states_asked_for(model: Any) -> Any:
    out = model(**batch(), output_hidden_states=True)
    (out.loss + out.hidden_states[1].square().mean()).backward()
    some = model(input_ids=ids(1), logits_to_keep=3).logits
    return [gradients(model), [h.detach() for h in out.hidden_states], some.detach(), over(model, [batch()])]


@use
def rows_of_one_token_and_of_one_length(model: Any) -> Any:
    one: dict[str, Tensor] = {"input_ids": ids(0, rows=1, length=3), "labels": ids(0, rows=1, length=3)}
    return over(model, [one, batch(), {"input_ids": ids(3, rows=5, length=3), "labels": ids(3, rows=5, length=3)}])
