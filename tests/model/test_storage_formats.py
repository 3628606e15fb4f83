"""Every row of the table of storage formats: bytes, values, names on disk, and a linear in it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pronghorn.errors import ModelError
from pronghorn.kernels.moe.grouped_quantized import QuantizedStack
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import dequantize_, is_quantized, store_linears_
from pronghorn.model.formats.table import FORMATS, format_of, storage_of
from pronghorn.model.load import load_model
from pronghorn.model.lora import add_adapter
from pronghorn.recipe import Recipe
from pronghorn.recipe_parts import Lora
from samples import make_model, one_document
from tables import table

QUANTIZED = [name for name, row in FORMATS.items() if row.quantize]
LINEARS = [name for name, row in FORMATS.items() if row.save]
ERRORS = {"nf4": 0.11, "nvfp4": 0.11, "mxfp4": 0.15, "fp8": 0.04}  # of normal numbers
CPU = torch.device("cpu")


def quantized(name: str, weight: torch.Tensor) -> Any:
    quantize = FORMATS[name].quantize
    assert quantize
    return quantize(weight)


def linear_in(name: str, **options: Any) -> StoredLinear:
    torch.manual_seed(0)
    return StoredLinear.from_linear(nn.Linear(64, 48, **options), FORMATS[name])


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def test_recipes_choose_among_the_rows() -> None:
    choices = set(get_args(Recipe.model_fields["storage"].annotation)) - {"auto"}
    assert choices <= set(LINEARS)
    assert not any(FORMATS[name].in_fp8 for name in choices)


@table("name", QUANTIZED)
def test_bytes_are_known_on_meta(name: str) -> None:
    for shape in ((64, 128), (3, 32, 128)):
        found, planned = (quantized(name, torch.randn(shape, dtype=torch.bfloat16).to(device)) for device in ("cpu", "meta"))
        assert found.nbytes == planned.nbytes
        for one, other in zip(found.tensors().values(), planned.tensors().values(), strict=True):
            assert (one.shape, one.dtype, other.is_meta) == (other.shape, other.dtype, True)
        assert found.nbytes / torch.Size(shape).numel() == pytest.approx(FORMATS[name].bytes_each, rel=0.04)


@table("name", QUANTIZED)
def test_weights_and_stacks_keep_their_values(name: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(3, 32, 128)
    stack = QuantizedStack.of(quantized(name, weight), 3)
    assert format_of(stack.stored) is FORMATS[name]
    assert 0 < error(stack.dequantized(torch.float32), weight) < ERRORS[name]
    alone = quantized(name, weight[1])
    assert 0 < error(alone.dequantize(dtype=torch.float32), weight[1]) < ERRORS[name]


def test_rows_of_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="rows of 72 values") as caught:
        quantized("nvfp4", torch.randn(4, 72))
    assert "storage: nf4" in caught.value.fix


@table("name", LINEARS)
def test_a_linear_is_the_product_with_its_dequantized_weight(name: str) -> None:
    module = linear_in(name)
    plain = module.to_own(torch.float32)
    x = torch.randn(2, 7, 64, requires_grad=True)
    y, expected = module(x), plain(x)
    dy = torch.randn_like(y)
    (dx,), (truth,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    if module.storage.in_fp8:  # which rounds x and dy
        assert max(error(y.detach(), expected.detach()), error(dx, truth)) < 0.05
    else:
        assert torch.equal(y, expected)
        assert torch.equal(dx, truth)
    assert storage_of(module) is FORMATS[name]
    assert storage_of(plain) is None


@table("name", LINEARS)
def test_casts_and_copies_leave_the_values(name: str) -> None:
    module = linear_in(name)
    before = module.dequantize(torch.float32)
    for other in (copy.deepcopy(module), copy.deepcopy(module).to(torch.bfloat16), copy.deepcopy(module).half().float()):
        assert torch.equal(other.dequantize(torch.float32), before)
    assert copy.deepcopy(module).to(torch.bfloat16).bias.dtype == torch.bfloat16


@table("name", LINEARS)
def test_a_file_has_all_of_it(name: str, tmp_path: Path) -> None:
    module, other = linear_in(name), linear_in(name)
    other.weight.data.zero_()
    save_file(module.state_dict(), tmp_path / "one.safetensors")
    assert not torch.equal(other.dequantize(torch.float32), module.dequantize(torch.float32))
    other.load_state_dict(load_file(tmp_path / "one.safetensors"))
    assert torch.equal(other.dequantize(torch.float32), module.dequantize(torch.float32))
    with pytest.raises(ModelError, match="not"):
        other.load_state_dict({"weight": torch.zeros(48, 64), "bias": module.bias})
    wider = StoredLinear.from_linear(nn.Linear(128, 48), FORMATS[name])
    with pytest.raises(RuntimeError, match="instead of"):
        wider.load_state_dict(module.state_dict())


@table("storage", ["nf4", "nvfp4"])
def test_a_checkpoint_of_modelopt_is_read_as_it_is(storage: str, tmp_path: Path) -> None:
    model = make_model(hidden_size=64)
    store_linears_(model, FORMATS["nvfp4"], skip=("lm_head", "model.layers.0.mlp.up_proj"))
    model.config.quantization_config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    model.save_pretrained(tmp_path)
    again: Any = load_model(str(tmp_path), torch.float32, CPU, storage=storage)
    ids = torch.arange(12)[None]
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    assert sum(isinstance(module, StoredLinear) for module in again.modules()) == 13
    for other in ("bf16", "fp8"):
        with pytest.raises(ModelError, match="stored in 4 bits"):
            load_model(str(tmp_path), torch.float32, CPU, storage=other)


@table("name", LINEARS)
def test_a_model_loads_in_it_and_comes_back(name: str, tmp_path: Path) -> None:
    plain = make_model(hidden_size=64)
    plain.save_pretrained(tmp_path)
    model: Any = load_model(str(tmp_path), torch.float32, CPU, storage=name)
    assert is_quantized(model)
    assert all(storage_of(module) is FORMATS[name] for module in model.modules() if isinstance(module, StoredLinear))
    store_linears_(plain, FORMATS[name])
    stored = plain.state_dict()
    assert all(torch.equal(value.float(), stored[key].float()) for key, value in model.state_dict().items())
    assert dequantize_(model, torch.float32) == 14
    assert not is_quantized(model)


def test_where_a_product_in_fp8_is_not_possible_it_dequantizes() -> None:
    stored = linear_in("fp8")
    stored.storage = replace(stored.storage, product=None)
    x = torch.randn(7, 64, requires_grad=True)
    true = stored.to_own(torch.float32)
    assert torch.equal(stored(x), true(x))
    (dx,), (truth,) = (torch.autograd.grad(module(x).square().sum(), x) for module in (stored, true))
    torch.testing.assert_close(dx, truth)


def test_names_and_values_stay_while_fast_layers_use_the_bytes() -> None:
    model: Any = make_model(hidden_size=64)
    store_linears_(model, FORMATS["fp8"])
    model = add_adapter(model, Lora(r=4), seed=1)
    before = copy.deepcopy(model.state_dict())
    assert install(model) == ""
    engine = engine_of(model)
    engine.packed_loss(one_document(torch.arange(40) % 259))[0].backward()
    up = model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert up.weight.stride(0) > up.in_features  # part of the group's matrix
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[key].is_contiguous() and torch.equal(after[key].float(), before[key].float()) for key in before)
