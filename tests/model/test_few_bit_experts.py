"""Experts kept in 4 bits: gpt-oss checkpoints in MXFP4 and Qwen's in NF4 load, train as their dequantized copies, generate,
and merge."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_decoder_layer import apart, fast_loss, gradients, packed_batch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from pronghorn.api import SEVEN_LINEARS
from pronghorn.kernels.mxfp4 import MXFP4Tensor, mxfp4_dequantize_reference, mxfp4_quantize
from pronghorn.model.causal_lm import engine_of, install
from pronghorn.model.export import merged_model, save_model
from pronghorn.model.few_bit_experts import FewBitExperts, dequantize_experts_
from pronghorn.model.hf_adapter import save_merged, with_adapter
from pronghorn.model.load import load_model
from pronghorn.model.lora import add_adapter
from pronghorn.model.quantized import dequantize_model_
from pronghorn.recipe import Lora, Recipe

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
                         "eos_token_id": 2}
GPT_OSS = GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)
QWEN = Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)
LORA = Lora(r=4, targets=("all-linear", "experts"))


@pytest.fixture(scope="module")
def mxfp4_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As gpt-oss is published: experts as blocks and scales, all else in bf16."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(copy.deepcopy(GPT_OSS)).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        q = mxfp4_quantize(tensors.pop(key).transpose(1, 2).contiguous())
        tensors |= {f"{key}_blocks": q.blocks, f"{key}_scales": q.scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(copy.deepcopy(QWEN)).save_pretrained(folder)
    assert any(".experts.0.gate_proj." in key for key in load_file(folder / "model.safetensors"))
    return folder


def few_bits(model: Any) -> list[FewBitExperts]:
    return [module for module in model.modules() if isinstance(module, FewBitExperts)]


def drawn(model: Any) -> Any:
    """LoRA's B is zero at the start."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def test_a_checkpoint_in_mxfp4_loads_in_16_bits(mxfp4_folder: Path, tmp_path: Path) -> None:
    model = load_model(str(mxfp4_folder), torch.float32, CPU)
    tensors = load_file(mxfp4_folder / "model.safetensors")
    key = "model.layers.1.mlp.experts.down_proj"
    truth = mxfp4_dequantize_reference(MXFP4Tensor(tensors[f"{key}_blocks"], tensors[f"{key}_scales"]), torch.float32)
    assert torch.equal(model.get_parameter(key).float(), truth.transpose(1, 2))
    assert not few_bits(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    save_model(model, tmp_path / "again")  # under names that can be read
    again = load_model(str(tmp_path / "again"), torch.float32, CPU).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())
    fast = add_adapter(model, LORA, seed=1).train()
    assert not install(fast)
    assert all(gradient.isfinite().all() for gradient in gradients(fast, fast_loss(fast, packed_batch())).values())


@pytest.mark.parametrize("which", ["mxfp4_folder", "qwen_folder"])
def test_experts_in_4_bits_train_as_their_dequantized_copy(which: str, request: pytest.FixtureRequest) -> None:
    folder, batch = request.getfixturevalue(which), packed_batch()
    model = load_model(str(folder), torch.float32, CPU, four_bit=True)
    assert len(few_bits(model)) == 2
    whole = load_model(str(folder), torch.float32, CPU, four_bit=True)
    dequantize_model_(whole, torch.float32)
    assert dequantize_experts_(whole, torch.float32) == 2
    found = []
    for one in (model, whole):
        adapted = drawn(add_adapter(one, LORA, seed=1)).train()
        assert not install(adapted)
        loss = fast_loss(adapted, batch)
        engine = engine_of(adapted)
        assert engine is not None
        assert all(layer.fused for layer in engine.layers)
        ids = torch.arange(1, 9)[None]
        grads = gradients(adapted, loss)
        answer = adapted.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        found.append((loss.detach(), grads, answer))
    assert apart(found[0][0], found[1][0]) < 1e-6
    assert found[0][1].keys() == found[1][1].keys()
    for name, gradient in found[0][1].items():
        assert apart(gradient, found[1][1][name]) < 2e-5, name
    assert torch.equal(found[0][2], found[1][2])


def test_they_take_an_eighth_of_float32(qwen_folder: Path) -> None:
    (experts, _) = few_bits(load_model(str(qwen_folder), torch.float32, CPU, four_bit=True))
    values = 4 * (128 * 64 + 64 * 64)
    assert sum(stack.nbytes for stack in experts.stacks.values()) < 0.6 * values
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in experts.parameters()}
    assert sum(held.values()) <= 8  # a zero each
    moved = experts.to(torch.bfloat16).to("cpu")
    assert moved.stacks["down_proj"].values.dtype == torch.uint8


def test_gradients_pass_through_them_where_layers_are_not_one_node(mxfp4_folder: Path) -> None:
    batch = packed_batch()
    found = []
    for whole in (False, True):
        model = load_model(str(mxfp4_folder), torch.float32, CPU, four_bit=True)
        if whole:
            dequantize_experts_(model, torch.float32)
        adapted = drawn(add_adapter(model, Lora(r=4, dora=True), seed=1)).train()
        assert not install(adapted)
        found.append(gradients(adapted, fast_loss(adapted, batch)))
    for name, gradient in found[1].items():
        assert apart(found[0][name], gradient) < 2e-5, name


def test_merging_adds_to_what_was_trained_on(mxfp4_folder: Path, tmp_path: Path) -> None:
    base = load_model(str(mxfp4_folder), torch.float32, CPU, four_bit=True)
    model = drawn(add_adapter(base, LORA, seed=1))
    ids = torch.arange(1, 21)[None]
    with torch.no_grad():
        truth = model.eval()(input_ids=ids, use_cache=False).logits
    save_model(model, tmp_path / "adapter")
    recipe = Recipe.model_validate({"model": str(mxfp4_folder), "method": "qlora", "precision": "fp32",
                                    "lora": LORA.model_dump(), "data": {"train": ["x.jsonl"]}})
    merged = merged_model(tmp_path / "adapter", recipe)
    with torch.no_grad():
        assert apart(merged(input_ids=ids, use_cache=False).logits, truth) < 1e-5
    save_model(merged, tmp_path / "merged")
    again = load_model(str(tmp_path / "merged"), torch.float32, CPU)
    with torch.no_grad():
        assert apart(again(input_ids=ids, use_cache=False).logits, truth) < 1e-5


@pytest.mark.parametrize("four_bit", [False, True])
@pytest.mark.parametrize("which", ["mxfp4_folder", "qwen_folder"])
def test_the_drop_in_interface_adapts_experts_by_the_names_people_use(
    which: str, four_bit: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = load_model(str(request.getfixturevalue(which)), torch.bfloat16, CPU, four_bit=four_bit)
    model = drawn(with_adapter(base, target_modules=SEVEN_LINEARS, modules_to_save=None, layers=None, seed=1, r=4))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any("q_proj" in name for name in trained)
    assert any("experts.lora_A" in name for name in trained)
    assert any("experts.base_layer.lora_A" in name for name in trained)
    ids = torch.arange(1, 21)[None]
    save_merged(model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    with torch.no_grad():
        truth = model.float().eval()(input_ids=ids, use_cache=False).logits
        found = merged.float()(input_ids=ids, use_cache=False).logits
        with model.disable_adapter():
            plain = model(input_ids=ids, use_cache=False).logits
    assert apart(found, truth) < 2e-2  # the sums are rounded to bf16
    assert apart(plain, truth) > 5e-2
