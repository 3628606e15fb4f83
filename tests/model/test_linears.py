"""Linears in 4 bits under the fast layers: the same numbers as the same weights in nn.Linear, in every order of calls, with
one buffer for all layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen3Config

from pronghorn.data.pack.batches import build_batch
from pronghorn.kernels.lora.stored_lora import StoredLoraGroup
from pronghorn.kernels.quant.nf4 import nf4_quantize
from pronghorn.model.causal_lm import base_of, engine_of, install
from pronghorn.model.formats.store import dequantize_, store_linears_
from pronghorn.model.formats.table import FORMATS, Format
from pronghorn.model.lora import add_adapter
from pronghorn.model.verify import verify
from pronghorn.packs import PackedBatch
from pronghorn.recipe_parts import Lora
from samples import random_table, small
from tables import first_of


def configs(layers: int) -> dict[str, Any]:
    sizes = small(hidden_size=64, intermediate_size=128, num_hidden_layers=layers)
    return {
        "llama": LlamaConfig(**sizes),
        "llama, every bias": LlamaConfig(**sizes, attention_bias=True, mlp_bias=True),
        "llama, tied": LlamaConfig(**sizes, tie_word_embeddings=True),
        "llama, rows of no whole blocks": LlamaConfig(**(sizes | {"hidden_size": 48, "intermediate_size": 80})),
        "qwen2": Qwen2Config(**sizes),
        "qwen3": Qwen3Config(**sizes, head_dim=32),
        "phi3": Phi3Config(**sizes),
        "gemma2": Gemma2Config(**sizes, head_dim=16, sliding_window=16, query_pre_attn_scalar=16),
        "olmo2": Olmo2Config(**sizes),
    }


FAMILIES, IN_TWO_LAYERS = configs(3), configs(2)  # three where layers take turns, two where a layer's numbers are the point
LORAS: dict[str, Lora | None] = {
    "all": Lora(r=4),
    "some": Lora(r=4, targets=("q_proj", "up_proj", "down_proj")),
    "dora": Lora(r=4, dora=True),
    "norms": None,  # no adapter at all: the norms train
}


def model_of(
    family: str = "llama",
    lora: Lora | None = LORAS["all"],
    storage: Format = FORMATS["nf4"],
    families: dict[str, Any] = FAMILIES,
) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(families[family])
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter, std=0.3)
    store_linears_(model, storage)
    if lora is None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        return model.train()
    if family == "phi3" and lora.targets != "all-linear":
        lora = lora.model_copy(update={"targets": ("qkv_proj", "down_proj")})
    model = add_adapter(model, lora, seed=1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def twin_of(model: Any) -> Any:
    """The same weights in nn.Linear, on fast layers of its own."""
    twin = copy.deepcopy(model)
    assert dequantize_(twin, torch.float32) > 0
    assert not install(twin)
    return twin


def batch_of(seed: int = 0, documents: int = 6) -> PackedBatch:
    return build_batch(random_table(documents, seed=seed), np.arange(documents), 256)


def loss_of(model: Any, batch: PackedBatch) -> torch.Tensor:
    engine = engine_of(model)
    return engine.packed_loss(batch)[0]


def step_of(model: Any, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of(model, batch)
    loss.backward()
    return loss.detach(), taken(model)


def taken(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], allowed: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys() != set()
    for name, expected in theirs.items():
        assert float((ours[name] - expected).norm()) <= allowed * float(expected.norm()) + 1e-9, name


def scratches(model: Any) -> list[Any]:
    engine = engine_of(model)
    groups = [group.gemms.matrix for layer in engine.layers for group in layer.groups]
    assert all(isinstance(group, StoredLoraGroup) for group in groups)
    return list({id(group.scratch): group.scratch for group in groups if isinstance(group, StoredLoraGroup)}.values())


# ---- the same numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "lora", "storage"),
    first_of(
        [
            *((family, "all", "nf4") for family in ("llama", "llama, tied", "qwen2", "qwen3", "olmo2")),
            *((family, "some", "nf4") for family in ("llama, every bias", "llama, rows of no whole blocks", "phi3", "gemma2")),
            ("llama", "all", "nvfp4"),
            *((family, "all", "nf4") for family in ("llama, every bias", "llama, rows of no whole blocks", "phi3", "gemma2")),
            ("llama", "some", "nf4"),
            ("llama, every bias", "some", "nvfp4"),
            ("phi3", "all", "nvfp4"),
        ],
        10,
    ),
)
def test_loss_and_every_gradient_are_those_of_the_dequantized_weights(family: str, lora: str, storage: str) -> None:
    model, batch = model_of(family, LORAS[lora], FORMATS[storage], IN_TWO_LAYERS), batch_of()
    twin = twin_of(model)
    assert not install(model)
    loss, gradients = step_of(model, batch)
    expected, theirs = step_of(twin, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same(gradients, theirs)
    assert len(scratches(model)) == 4
    verify(model)  # PEFT's own forward through StoredLinear says the same


@pytest.mark.parametrize("nested", [True, False])
def test_half_precision_is_that_of_the_dequantized_weights(nested: bool) -> None:
    model, batch = model_of(storage=replace(FORMATS["nf4"], quantize=partial(nf4_quantize, nested=nested))), batch_of()
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    twin = copy.deepcopy(model)
    dequantize_(twin, torch.bfloat16)
    assert not install(model)
    assert not install(twin)
    loss, gradients = step_of(model, batch)
    expected, theirs = step_of(twin, batch)
    assert torch.equal(loss, expected)
    assert_same(gradients, theirs, 1e-2)
    assert {scratch.dtype for scratch in scratches(model)} == {torch.bfloat16}


def test_some_linears_of_a_group_in_16_bits() -> None:
    """As in checkpoints that leave out what suffers most."""
    model = model_of()
    for layer, name in ((0, "up_proj"), (2, "gate_proj")):
        wrapper = getattr(base_of(model).model.layers[layer].mlp, name)
        wrapper.base_layer = wrapper.base_layer.to_own(torch.float32)
    twin = twin_of(model)
    assert not install(model)
    batch = batch_of()
    loss, gradients = step_of(model, batch)
    expected, theirs = step_of(twin, batch)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same(gradients, theirs)


def test_layers_with_and_without_adapters_share_the_buffer() -> None:
    from peft import LoraConfig, get_peft_model

    plain = model_of(lora=None).requires_grad_(False)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        target_modules=["q_proj", "v_proj", "up_proj"],
        layers_to_transform=[1],
        init_lora_weights=False,
        rank_pattern={"up_proj": 40},
    )
    model = get_peft_model(plain, config).train()
    twin = twin_of(model)
    assert not install(model)
    for seed in range(2):
        loss, gradients = step_of(model, batch_of(seed))
        expected, theirs = step_of(twin, batch_of(seed))
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert_same(gradients, theirs)
    assert len(scratches(model)) == 4


# ---- in any order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_micro_batches_looks_in_between_and_updates(recompute: bool) -> None:
    model = model_of()
    twin = twin_of(model)
    assert not install(model)
    found = []
    for each in (model, twin):
        engine = engine_of(each)
        for layer in engine.layers:
            layer.recompute = recompute
        optimizer = torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2, fused=True)
        losses = []
        for seed in range(3):
            first, second = loss_of(each, batch_of(seed)), loss_of(each, batch_of(seed + 10))
            with torch.no_grad():
                losses.append(float(loss_of(each, batch_of(seed + 20))))
            second.backward()
            first.backward()
            losses += [float(first.detach()), float(second.detach())]
            optimizer.step()
            if seed < 2:
                optimizer.zero_grad()
        found.append((losses, taken(each)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert_same(found[0][1], found[1][1], 1e-5)


def test_what_stands_in_the_buffer_before_a_step_does_not_matter() -> None:
    """So a captured step can be replayed after anything else."""
    model, batch = model_of(), batch_of()
    assert not install(model)
    loss, gradients = step_of(model, batch)
    for scratch in scratches(model):
        scratch._buffer.fill_(float("nan"))
    again, others = step_of(model, batch)
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert torch.equal(others[name], gradient), name


def with_adapter_off(model: Any, batch: PackedBatch) -> float:
    with torch.no_grad(), model.disable_adapter():
        return float(loss_of(model, batch))


def moved_to_other_values(model: Any, batch: PackedBatch) -> float:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = parameter.data * 2
    with torch.no_grad():
        return float(loss_of(model, batch))


@pytest.mark.parametrize("change", [with_adapter_off, moved_to_other_values])
def test_adapters_that_are_switched_off_or_replaced(change: Callable[[Any, PackedBatch], float]) -> None:
    model, batch = model_of(), batch_of()
    twin = twin_of(model)
    assert not install(model)
    step_of(model, batch)
    assert change(model, batch) == pytest.approx(change(twin, batch), rel=1e-6)
    assert_same(step_of(model, batch)[1], step_of(twin, batch)[1])
