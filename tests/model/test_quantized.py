"""4-bit linears: PEFT takes them for what they are, checkpoints go in and out as bitsandbytes writes them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file, save_file
from torch import nn

from nf4_checkpoints import save_nf4
from pronghorn.compat.hf_forward import install
from pronghorn.errors import ModelError
from pronghorn.kernels.quant.nf4 import nf4_dequantize, nf4_quantize
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.formats.bitsandbytes import nf4_of_state, nf4_state
from pronghorn.model.formats.checkpoint import load_stored
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import count_parameters, dequantize_, store_linears_
from pronghorn.model.formats.table import FORMATS
from pronghorn.model.layers import wide_gemms
from pronghorn.model.layers.types import Documents
from samples import one_document
from tables import table
from tests.samples import make_model

CPU = torch.device("cpu")
NF4 = FORMATS["nf4"]
IDS = torch.arange(24).view(2, 12) % 259


def small_model(**changes: Any) -> Any:
    return make_model(hidden_size=64, intermediate_size=128, **changes)


def bf16_model(**changes: Any) -> Any:
    """As transformers loads one: parameters in bf16, RoPE's frequencies in fp32."""
    model = small_model(**changes)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def with_adapter(model: nn.Module) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def plain_twin(model: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    twin = copy.deepcopy(model)
    dequantize_(twin, dtype)
    return twin


def gradients(model: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# ---- the linear ------------------------------------------------------------------------------------------------------------


def test_backward_keeps_no_weight() -> None:
    """Only x may be kept by autograd, and the bytes, which are there anyway."""
    module, kept = StoredLinear.from_linear(nn.Linear(256, 256, bias=False), NF4), []
    x = torch.randn(1, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
        module(x).sum().backward()
    assert all(count <= x.numel() for count in kept)


# ---- PEFT ------------------------------------------------------------------------------------------------------------------


def test_an_ordinary_peft_model_with_the_same_numbers() -> None:
    model = small_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = {f"base_model.model.{key}" for key, _ in with_adapter(copy.deepcopy(model)).base_model.model.named_parameters()}
    assert store_linears_(model, NF4) == 14
    assert count_parameters(model) == parameters
    assert type(model.lm_head) is nn.Linear
    twin = with_adapter(plain_twin(model))
    model = with_adapter(model)
    assert {f"base_model.model.{key}" for key, _ in model.base_model.model.named_parameters()} == names
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert type(layer) is LoraLinear
    assert layer.lora_A["default"].weight.dtype == torch.float32
    ours, theirs = gradients(model), gradients(twin)
    assert ours.keys() == theirs.keys()
    assert all("lora_" in name for name in ours)
    assert len(ours) == 28
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(model(input_ids=IDS).logits, twin(input_ids=IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_dequantize_then_add(dtype: torch.dtype) -> None:
    model = small_model() if dtype == torch.float32 else bf16_model()
    store_linears_(model, NF4)
    model = with_adapter(model)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    base, delta = layer.base_layer.dequantize(dtype), layer.get_delta_weight("default")
    assert dequantize_(model, dtype) == 14
    merged = model.merge_and_unload(safe_merge=True)
    weight = merged.model.layers[1].self_attn.q_proj.weight
    assert weight.dtype == dtype
    assert torch.equal(weight, base + delta.to(dtype))


# ---- checkpoints -----------------------------------------------------------------------------------------------------------


def test_quantizing_while_loading_is_quantizing_after_it(tmp_path: Path) -> None:
    source = small_model(attention_bias=True)
    for parameter in source.parameters():
        parameter.data.normal_(0, 0.02)
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = bf16_model(attention_bias=True)
    for parameter, value in zip(expected.parameters(), source.parameters(), strict=True):
        parameter.data.copy_(value)
    store_linears_(expected, NF4)
    seen: list[tuple[str, int, int]] = []
    sizes: list[int] = []

    def counted(weight: torch.Tensor) -> Any:
        sizes.append(weight.numel())
        return nf4_quantize(weight)

    model = load_stored(tmp_path, replace(NF4, quantize=counted), torch.bfloat16, CPU, progress=lambda *told: seen.append(told))
    assert len(sizes) == 14  # one weight at a time
    assert seen[-1][1] == seen[-1][2]
    assert torch.equal(model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(parameter.requires_grad for parameter in model.parameters())


@table("nested", [True, False])
@table("tied", [True, False])
def test_a_4_bit_checkpoint_goes_out_and_in(tmp_path: Path, nested: bool, tied: bool) -> None:
    model = bf16_model(tie_word_embeddings=tied)
    store_linears_(model, NF4 if nested else replace(NF4, quantize=partial(nf4_quantize, nested=False)))
    save_nf4(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    key = "model.layers.0.mlp.gate_proj.weight"
    parts = {"absmax", "quant_map", "quant_state.bitsandbytes__nf4"}
    parts |= {"nested_absmax", "nested_quant_map"} if nested else set()
    assert {name.removeprefix(f"{key}.") for name in stored if name.startswith(f"{key}.")} == parts
    assert stored[key].shape == (128 * 64 // 2, 1)
    facts = json.loads(bytes(stored[f"{key}.quant_state.bitsandbytes__nf4"].tolist()))
    assert facts["shape"] == [128, 64]
    assert facts["dtype"] == "bfloat16"
    again = load_stored(tmp_path, NF4, torch.bfloat16, CPU)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
    assert again.model.layers[0].mlp.gate_proj.stored.nested == nested
    empty = bf16_model(tie_word_embeddings=tied)
    store_linears_(empty, NF4)
    for parameter in empty.parameters():
        parameter.data.zero_()
    empty.load_state_dict(model.state_dict())  # strict
    assert torch.equal(empty(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_bytes_stored_as_another_dtype_are_read() -> None:
    q = nf4_quantize(torch.randn(64, 64))
    parts = nf4_state(q)
    again = nf4_of_state(parts | {"weight": q.packed.view(-1).view(torch.bfloat16)[:, None]}, "here")
    assert torch.equal(nf4_dequantize(again), nf4_dequantize(q))


def _facts(parts: dict[str, torch.Tensor], **changes: Any) -> dict[str, torch.Tensor]:
    key = "weight.quant_state.bitsandbytes__nf4"
    facts = json.loads(bytes(parts[key].tolist())) | changes
    return parts | {key: torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)}


def test_other_formats_are_refused() -> None:
    q = nf4_quantize(torch.randn(64, 64))
    parts = nf4_state(q)
    renamed = {name.replace("nf4", "fp4"): part for name, part in parts.items()}
    for wrong, words in (
        (renamed, "stored as fp4"),
        ({"weight": q.packed, "SCB": torch.ones(64)}, "not as nf4"),
        (_facts(parts, blocksize=128), "blocks of 128"),
        (_facts(parts, shape=[64, 128]), "do not match"),
        (parts | {"weight.quant_map": parts["weight.quant_map"] * 2}, "code table"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            nf4_of_state(wrong, "model.layers.0")
        assert caught.value.where == "model.layers.0"


@table(
    ("facts", "words"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"load_in_8bit": True}, "int8"),
        ({"quant_method": "gptq"}, "gptq"),
    ],
)
def test_quantized_checkpoints_we_cannot_read_are_named(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    small_model().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"} | facts}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        load_stored(tmp_path, NF4, torch.bfloat16, CPU)


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model.norm.weight is not in its files"):
        load_stored(tmp_path, NF4, torch.bfloat16, CPU)
    save_file(tensors | {"model.norm.weight": torch.ones(3)}, file)
    with pytest.raises(ModelError, match="shape"):
        load_stored(tmp_path, NF4, torch.bfloat16, CPU)
    file.write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot read"):
        load_stored(tmp_path, NF4, torch.bfloat16, CPU)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_checkpoints_to_and_from_transformers_with_bitsandbytes(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bf16_model().save_pretrained(tmp_path / "plain")
    asked = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=asked, dtype=torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_stored(tmp_path / "theirs", NF4, torch.bfloat16, CPU)
    stored = theirs.state_dict()
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor.cpu(), stored[key].cpu()), key
    save_nf4(ours, tmp_path / "ours")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16)
    for key, tensor in back.state_dict().items():
        assert torch.equal(tensor.cpu(), stored[key].cpu()), key


def test_the_first_forward_takes_the_path_of_all_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first load there is no matrix to look at, and products with an epilogue were left out once: other bits on a
    Hopper GPU, so that every QLoRA run of a Llama was refused there."""
    asked: list[bool] = []

    def covered(*operands: torch.Tensor) -> bool:
        asked.append(all(operand.ndim == 2 and operand.dtype == operands[0].dtype for operand in operands))
        return False

    monkeypatch.setattr(wide_gemms, "covered", covered)
    monkeypatch.setattr(wide_gemms, "FEW_ROWS", 0)
    base = small_model(num_hidden_layers=2)
    store_linears_(base, NF4)
    model = with_adapter(base)
    assert not install(model)
    engine = engine_of(model)
    documents = Documents.of(one_document(IDS[0]), engine.positions)
    counts = []
    for _ in range(2):
        asked.clear()
        engine.hidden(engine.embed(IDS[0]), documents)
        counts.append((len(asked), all(asked)))
    assert counts == [(4, True), (4, True)]  # q, k and v, gate and up of two layers
