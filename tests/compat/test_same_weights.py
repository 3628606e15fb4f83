"""A backward computes with the weights of its forward, or says that it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from pronghorn.compat.hf_forward import install
from pronghorn.model.causal_lm import base_of
from samples import make_model

IDS = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0))


def fast_model() -> Any:
    model = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "down_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    assert install(model) == ""
    return model.train()


def loss_of(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_another_forward_with_other_values_in_between() -> None:
    """Put in by copying, which torch does not count as a change, and taken out again."""
    model = fast_model()
    loss_of(model).backward()
    expected = [grad.clone() for grad in gradients(model)]
    model.zero_grad()
    waiting = loss_of(model)
    adapters = [p for p in model.parameters() if p.requires_grad]
    stored = [p.detach().clone() for p in adapters]
    for parameter in adapters:
        parameter.data.copy_(parameter.data * 3)
    assert loss_of(model).item() != waiting.item()
    for parameter, value in zip(adapters, stored, strict=True):
        parameter.data.copy_(value)
    waiting.backward()
    assert all(torch.equal(found, value) for found, value in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.1.mlp.down_proj.lora_A.default.weight",
        "base_model.model.model.layers.0.input_layernorm.weight",
        "base_model.model.model.layers.1.self_attn.o_proj.weight",
    ],
)
def test_a_weight_changed_in_place_is_refused_in_the_words_of_torch(name: str) -> None:
    model = fast_model()
    loss = loss_of(model)
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a weight of decoder layer \d"):
        loss.backward()


def test_a_weight_that_is_another_now_is_refused() -> None:
    model = fast_model()
    loss = loss_of(model)
    norm = base_of(model).model.layers[1].input_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach() * 2)
    with pytest.raises(RuntimeError, match="the weights of decoder layer 1 changed"):
        loss.backward()
