"""Adapters through the interface: every option trains as in PEFT, modes, and what is saved opens in stock libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from api_parts import adapted, load, step, stock
from pronghorn import FastLanguageModel
from pronghorn.compat.outer_loop import loop_of
from pronghorn.errors import CommandError
from pronghorn.model.causal_lm import base_of, engine_of
from samples import make_model, make_tokenizer
from tables import first_of

ADAPTER_OPTIONS: list[dict[str, Any]] = [
    {"bias": "all"}, {"bias": "lora_only"}, {"lora_dropout": 0.2}, {"use_rslora": True}, {"init_lora_weights": "gaussian"},
    {"use_dora": True},
    {"layers_to_transform": [1]}, {"target_modules": "all-linear", "finetune_last_n_layers": 1},
    {"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]},
]  # fmt: skip


FOUR_BITS = [bool(number % 2) for number in range(len(ADAPTER_OPTIONS))]  # in turn; the other of the two with --every-case


@pytest.mark.parametrize(("options", "four_bit"), first_of([
    *zip(ADAPTER_OPTIONS, FOUR_BITS, strict=True), ({"init_lora_weights": "pissa"}, False),
    *((options, not four_bit) for options, four_bit in zip(ADAPTER_OPTIONS, FOUR_BITS, strict=True)),
], len(ADAPTER_OPTIONS) + 1), ids=str)  # fmt: skip
def test_options_of_the_adapter_train_as_in_peft(tmp_path: Path, options: dict[str, Any], four_bit: bool) -> None:
    """Same call on a model whose layers are its own afterwards: loss and every gradient."""
    make_model(attention_bias=True, mlp_bias=True, tie_word_embeddings=False).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    fast, _ = adapted(tmp_path, four_bit=four_bit, **options)
    for name, parameter in fast.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(3, 259, (2, 11))
    found = []
    for paused in (False, True):
        loop_of(fast).paused = paused
        torch.manual_seed(5)
        loss = fast(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append((loss.detach(), {n: p.grad for n, p in fast.named_parameters() if p.requires_grad}))
        fast.zero_grad()
    if "lora_dropout" not in options:  # drawn in another order
        assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)
        for name, gradient in found[1][1].items():
            assert (found[0][1][name] - gradient).norm() <= 2e-5 * gradient.norm() + 1e-7, name
    assert all(gradient is not None for gradient in found[0][1].values())
    trained = [name for name, p in fast.named_parameters() if p.requires_grad]
    if "layers_to_transform" in options or "finetune_last_n_layers" in options:
        assert trained
        assert all(".layers.1." in name for name in trained)
    if options.get("bias") == "all":
        assert any(name.endswith("bias") for name in trained)


def test_the_seven_names_on_a_model_that_stores_them_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import Phi3Config

    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, _ = adapted(tmp_path)
    assert "stores q_proj inside qkv_proj" in capsys.readouterr().err
    layer = base_of(model).model.layers[0]
    assert hasattr(layer.self_attn.qkv_proj, "lora_A")
    assert hasattr(layer.mlp.gate_up_proj, "lora_A")


def test_the_random_state_decides_the_adapter(tiny_model: Path) -> None:
    def first(seed: int) -> torch.Tensor:
        model, _ = adapted(tiny_model, random_state=seed)
        return next(p for name, p in model.named_parameters() if "lora_A" in name).detach()

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))


# ---- modes and saving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [{}, {"four_bit": True}, {"fp8": True}], ids=["16 bit", "4 bit", "fp8"])
def test_inference_and_training_modes(tiny_model: Path, stored: dict[str, bool]) -> None:
    model, tokenizer = adapted(tiny_model, **stored)
    assert FastLanguageModel.for_inference(model) is model
    assert not model.training
    assert base_of(model).config.use_cache
    prompt = tokenizer("add 1 and 2", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    plain = stock(tiny_model, model).eval().generate(**prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(answer, plain)
    FastLanguageModel.for_training(model, use_gradient_checkpointing=False)
    assert model.training
    assert not base_of(model).config.use_cache
    assert not any(layer.recompute for layer in engine_of(model).layers)
    FastLanguageModel.for_training(model)  # as asked for before
    assert not any(layer.recompute for layer in engine_of(model).layers)
    FastLanguageModel.for_training(model, use_gradient_checkpointing=True)
    assert all(layer.recompute for layer in engine_of(model).layers)


def test_saved_adapters_load_in_stock_peft_and_merged_folders_in_transformers(tiny_model: Path, tmp_path: Path) -> None:
    model, tokenizer = adapted(tiny_model)
    ids = step(model)
    weight = base_of(model).model.layers[0].mlp.up_proj.base_layer.weight
    before = weight.clone()
    model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained_merged(tmp_path / "lora", tokenizer, save_method="lora")
    FastLanguageModel.save_pretrained_merged(model, tmp_path / "merged", tokenizer)
    assert torch.equal(weight, before)
    with torch.no_grad():
        expected = FastLanguageModel.for_inference(model)(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(tiny_model)(input_ids=ids).logits
        assert (expected - base).abs().max() > 0.05
        for name in ("adapter", "lora"):
            loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / name).eval()
            assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert merged.dtype == torch.bfloat16
        error = (merged.float()(input_ids=ids).logits - expected).abs().max()
        assert error < 0.03 * expected.abs().max()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template


@pytest.mark.parametrize("stored", ["load_in_4bit", "load_in_fp8"])
def test_merging_into_weights_in_4_or_8_bits_is_dequantize_then_add(tiny_model: Path, tmp_path: Path, stored: str) -> None:
    model, tokenizer = adapted(tiny_model, four_bit=stored == "load_in_4bit", fp8=stored == "load_in_fp8")
    ids = step(model)
    wrapper = base_of(model).model.layers[1].self_attn.q_proj
    base = wrapper.base_layer
    wide = base.dequantize(torch.float32)
    expected = (wide + wrapper.get_delta_weight("default")).bfloat16()
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    model.save_pretrained(tmp_path / "adapter")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.model.layers[1].self_attn.q_proj.weight, expected)
    with torch.no_grad():
        trained = FastLanguageModel.for_inference(model)(input_ids=ids).logits
        error = (merged.float().eval()(input_ids=ids).logits - trained).abs().max()
        # FP8 rounds activations, too: 4 % were seen
        assert error < (0.03 if stored == "load_in_4bit" else 0.06) * trained.abs().max()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model)
    again, _ = load(tiny_model, **{stored: True})
    with torch.no_grad():
        again = FastLanguageModel.for_inference(PeftModel.from_pretrained(again, tmp_path / "adapter"))
        assert torch.allclose(again(input_ids=ids).logits, trained, atol=1e-5)


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=str)
def test_dora_and_dropout_do_not_go_with_experts(option: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig

    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    ))  # fmt: skip
    with pytest.raises(CommandError, match="cannot be combined with an adapter on experts") as caught:
        FastLanguageModel.get_peft_model(model, target_modules=["q_proj", "experts"], **option)
    assert next(iter(option)) in caught.value.fix


def test_merging_a_head_that_was_trained_apart_from_the_embeddings(tiny_model: Path, tmp_path: Path) -> None:
    model, _ = adapted(tiny_model, target_modules=["q_proj", "lm_head"])
    ids = step(model)
    FastLanguageModel.save_pretrained_merged(model, tmp_path)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()(input_ids=ids).logits
    assert (found - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize(
    ("method", "words"), [("merged_4bit", "not supported"), ("merged_16bits", "did you mean 'merged_16bit'")]
)
def test_ways_to_save_that_are_not_there(method: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        FastLanguageModel.save_pretrained_merged(make_model(), tmp_path, save_method=method)
    assert words in str(caught.value)
    with pytest.raises(CommandError, match="no adapter"):
        FastLanguageModel.save_pretrained_merged(make_model(), tmp_path, save_method="lora")
