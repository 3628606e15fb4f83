"""The interface people know: what its arguments do, what it refuses, and that trainers train as with stock libraries."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, GPT2Config, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from pronghorn import FastLanguageModel, get_chat_template, train_on_responses_only
from pronghorn.errors import CommandError, DataError, ModelError
from pronghorn.kernels.nf4 import nf4_dequantize
from pronghorn.model.causal_lm import base_of, engine_of
from pronghorn.model.fp8_layer import Fp8DecoderLayer
from pronghorn.model.fp8_linear import Fp8Linear, dequantize_fp8_
from pronghorn.model.quantized import NF4Linear, dequantize_model_, quantize_model_, save_nf4
from samples import chat_rows, make_model, make_tokenizer
from trl_on_a_cpu import TorchLogProbs

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(autouse=True)
def _quiet_datasets() -> None:
    datasets.disable_progress_bars()


@pytest.fixture
def _trl_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For stock and fast models alike; the script below runs whole on a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("trl.trainer.utils._ChunkedLogProbFunction", TorchLogProbs)


def load(folder: Path, **options: Any) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=512, **({"load_in_4bit": False} | options))


def adapted(folder: Path, *, four_bit: bool = False, fp8: bool = False, **options: Any) -> tuple[Any, Any]:
    model, tokenizer = load(folder, load_in_4bit=four_bit, load_in_fp8=fp8)
    return FastLanguageModel.get_peft_model(model, **({"r": 4} | options)), tokenizer


def stock(folder: Path, like: Any) -> Any:
    """transformers + PEFT alone, with the same adapter weights, and the same base: dequantized, where it is in 4 or 8 bits."""
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=LINEARS)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    like = copy.deepcopy(like)
    dequantize_model_(like, torch.float32)
    dequantize_fp8_(like, torch.float32)
    model.load_state_dict(like.state_dict())
    return model.train()


# ---- from_pretrained -------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_interface() -> None:
    import inspect

    signature = inspect.signature(FastLanguageModel.from_pretrained).parameters
    assert {name: p.default for name, p in signature.items() if p.default is not p.empty} == {
        "max_seq_length": 2048, "dtype": None, "load_in_4bit": True, "load_in_8bit": False, "load_in_16bit": False,
        "load_in_fp8": False, "full_finetuning": False, "token": None, "device_map": "auto", "trust_remote_code": False,
        "use_gradient_checkpointing": "unsloth", "random_state": 3407, "verify": False,
    }  # fmt: skip
    signature = inspect.signature(FastLanguageModel.get_peft_model).parameters
    assert {name: p.default for name, p in signature.items() if p.default is not p.empty} == {
        "r": 16, "target_modules": tuple(LINEARS), "lora_alpha": 16, "lora_dropout": 0, "bias": "none",
        "use_gradient_checkpointing": "unsloth", "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "init_lora_weights": True, "loftq_config": None, "layers_to_transform": None, "finetune_last_n_layers": None,
        "random_state": 3407, "max_seq_length": None,
    }  # fmt: skip


@pytest.mark.parametrize(("options", "words"), [
    ({"load_in_8bit": True}, "load_in_8bit=True is not in this version"),
    ({"load_in_fp8": True, "load_in_16bit": True}, "load_in_fp8=True with load_in_16bit=True"),
    ({"load_in_fp8": True, "full_finetuning": True}, "load_in_fp8=True with full_finetuning=True"),
    ({"trust_remote_code": True}, "run code"),
    ({"dtype": torch.float64}, "torch.bfloat16"),
    ({"dtype": torch.float32, "load_in_16bit": True}, "drop one of them"),
    ({"device_map": "balanced"}, "one device"),
    ({"device_map": {"model": 0, "lm_head": 1}}, "one device"),
    ({"use_gradient_checkpointing": "sometimes"}, "unsloth"),
    ({"max_seq_length": 100_000}, "512 positions"), ({"max_seq_length": 0}, "in tokens"), ({"max_seq_length": -1}, "in tokens"),
])  # fmt: skip
def test_what_from_pretrained_does_not_honour_is_an_error(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((CommandError, ModelError)) as caught:
        FastLanguageModel.from_pretrained(str(tiny_model), **({"load_in_4bit": False} | options))
    assert words in str(caught.value)


def test_weights_in_fp8_are_frozen_and_multiplied_as_they_are(tiny_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model), load_in_fp8=True, verify=True)
    assert isinstance(model.model.layers[0].mlp.up_proj, Fp8Linear)
    assert type(model.lm_head) is torch.nn.Linear
    engine = engine_of(model)
    assert engine
    assert all(isinstance(layer, Fp8DecoderLayer) for layer in engine.layers)
    assert not any(p.requires_grad for p in model.parameters())
    model = FastLanguageModel.get_peft_model(model, r=4)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(ModelError, match="stored in 8 bits"):
        FastLanguageModel.get_peft_model(load(tiny_model, load_in_fp8=True)[0], modules_to_save=["up_proj"])


def test_the_default_call_gives_weights_in_4_bits(tiny_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model), verify=True)
    assert isinstance(model.model.layers[0].mlp.up_proj, NF4Linear)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.dtype == torch.float32
    assert engine_of(model)
    assert not any(p.requires_grad for p in model.parameters())
    for options in ({"load_in_16bit": True}, {"full_finetuning": True}, {"load_in_4bit": False}):
        model, _ = FastLanguageModel.from_pretrained(str(tiny_model), **options)
        assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_4_bit_checkpoints_are_loaded_as_they_are(tmp_path: Path) -> None:
    model = make_model(hidden_size=64, intermediate_size=128)
    quantize_model_(model)
    save_nf4(model, tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    loaded, _ = FastLanguageModel.from_pretrained(str(tmp_path))
    ids = torch.arange(3, 40)[None]
    assert torch.allclose(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=1e-6)
    with pytest.raises(ModelError, match="stored in 4 bits") as caught:
        FastLanguageModel.from_pretrained(str(tmp_path), load_in_4bit=False)
    assert "load_in_4bit=True" in caught.value.fix


def test_unknown_arguments_are_told_with_the_nearest_known_one(tiny_model: Path) -> None:
    with pytest.raises(TypeError, match="did you mean `max_seq_length`"):
        FastLanguageModel.from_pretrained(str(tiny_model), max_seq_len=512)
    with pytest.raises(TypeError, match=r"fast_inference.*leave it out"):
        FastLanguageModel.from_pretrained(str(tiny_model), fast_inference=True)
    with pytest.raises(TypeError, match="did you mean `lora_dropout`"):
        FastLanguageModel.get_peft_model(make_model(), lora_drop=0.1)
    with pytest.raises(TypeError, match="did you mean `save_method`"):
        FastLanguageModel.save_pretrained_merged(make_model(), "x", save_methode="lora")


def test_a_loaded_model_is_frozen_or_trains_whole(tiny_model: Path) -> None:
    model, tokenizer = load(tiny_model)
    assert model.dtype == torch.float32
    assert tokenizer.model_max_length == model.max_seq_length == 512
    assert not any(p.requires_grad for p in model.parameters())
    assert engine_of(model)
    assert all(layer.recompute for layer in engine_of(model).layers)
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model), full_finetuning=True, dtype=torch.bfloat16,
                                                 use_gradient_checkpointing=False)
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    assert not any(layer.recompute for layer in engine_of(model).layers)
    ids = torch.randint(3, 259, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(CommandError, match="full_finetuning"):
        FastLanguageModel.get_peft_model(model)
    with pytest.raises(CommandError, match="adapter already"):
        FastLanguageModel.get_peft_model(adapted(tiny_model)[0])


@pytest.mark.parametrize("full", [True, False])
def test_verify_on_load(tiny_model: Path, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.model import decoder_layer

    model, _ = load(tiny_model, verify=True, full_finetuning=full)
    assert all(p.requires_grad == full and p.grad is None for p in model.parameters())
    own = decoder_layer.gated_activation_backward

    def broken(da: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(0.9 * da, *args, **kwargs)

    monkeypatch.setattr(decoder_layer, "gated_activation_backward", broken)
    with pytest.raises(ModelError, match="do not compute what this model computes"):
        load(tiny_model, verify=True, full_finetuning=full)


def test_a_family_without_a_row_trains_on_its_own_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path), load_in_4bit=False)
    assert "gpt2 trains on transformers' own layers" in capsys.readouterr().err
    assert model.is_gradient_checkpointing
    model = FastLanguageModel.get_peft_model(model, target_modules="all-linear")
    ids = torch.randint(3, 259, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None for p in model.parameters())


# ---- get_peft_model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "words"), [
    ({"loftq_config": {"loftq_bits": 4}}, "LoftQ"),
    ({"bias": "some"}, "lora_only"),
    ({"init_lora_weights": "eva"}, "not honoured"),
    ({"target_modules": ["q_porj"]}, "did you mean `q_proj`"),
    ({"target_modules": "q_proj"}, "a list of names"),
    ({"modules_to_save": ["classifier"]}, "no module `classifier`"),
    ({"layers_to_transform": [0], "finetune_last_n_layers": 1}, "drop one"),
    ({"finetune_last_n_layers": 3}, "of a model with 2"),
    ({"layers_to_transform": []}, "nothing to train"),
    ({"max_seq_length": 77}, "from_pretrained alone"),
    ({"lora_dropout": 1.0}, "lora_dropout=1.0"), ({"lora_dropout": -0.1}, "lora_dropout=-0.1"),
])  # fmt: skip
def test_what_get_peft_model_does_not_honour_is_an_error(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    model, _ = load(tiny_model)
    with pytest.raises((CommandError, ModelError)) as caught:
        FastLanguageModel.get_peft_model(model, **options)
    assert words in str(caught.value)


def test_what_from_pretrained_returned_as_a_whole_is_no_model(tiny_model: Path) -> None:
    with pytest.raises(CommandError, match="no model but a tuple") as caught:
        FastLanguageModel.get_peft_model(load(tiny_model))
    assert "model, tokenizer = " in caught.value.fix


def test_a_folder_may_be_a_path(tiny_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(tiny_model, load_in_4bit=False)
    assert model.name_or_path == str(tiny_model)


@pytest.mark.parametrize(("options", "words"), [
    ({"init_lora_weights": "pissa"}, "weights in 4 or 8 bits"), ({"init_lora_weights": "olora"}, "weights in 4 or 8 bits"),
    ({"modules_to_save": ["down_proj"]}, "stored in 4 bits"), ({"modules_to_save": ["mlp"]}, "stored in 4 bits"),
])  # fmt: skip
def test_what_weights_in_4_bits_do_not_allow(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model))
    with pytest.raises((CommandError, ModelError), match=words):
        FastLanguageModel.get_peft_model(model, **options)


ADAPTER_OPTIONS: list[dict[str, Any]] = [
    {"bias": "all"}, {"bias": "lora_only"}, {"lora_dropout": 0.2}, {"use_rslora": True}, {"init_lora_weights": "gaussian"},
    {"use_dora": True},
    {"layers_to_transform": [1]}, {"target_modules": "all-linear", "finetune_last_n_layers": 1},
    {"modules_to_save": ["norm"]}, {"target_modules": ["q_proj", "down_proj", "lm_head", "embed_tokens"]},
]  # fmt: skip


@pytest.mark.parametrize(("options", "four_bit"), [
    *((options, four_bit) for options in ADAPTER_OPTIONS for four_bit in (False, True)),
    ({"init_lora_weights": "pissa"}, False),
], ids=str)  # fmt: skip
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
        engine_of(fast).paused = paused
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
    config = Phi3Config(vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                        num_key_value_heads=2, pad_token_id=0)
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
    FastLanguageModel.for_training(model)
    assert all(layer.recompute for layer in engine_of(model).layers)


def step(model: Any) -> torch.Tensor:
    """One step that moves the adapter far enough to see it in bf16."""
    ids = torch.randint(3, 259, (2, 20), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=3.0)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return ids


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
    in_4_bits = isinstance(base, NF4Linear)
    wide = nf4_dequantize(base.nf4, dtype=torch.float32) if in_4_bits else base.q_OD.float() * base.weight_scale
    expected = (wide + wrapper.get_delta_weight("default")).bfloat16()
    model.save_pretrained_merged(tmp_path / "merged", tokenizer)
    model.save_pretrained(tmp_path / "adapter")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged.model.layers[1].self_attn.q_proj.weight, expected)
    with torch.no_grad():
        trained = FastLanguageModel.for_inference(model)(input_ids=ids).logits
        assert (merged.float().eval()(input_ids=ids).logits - trained).abs().max() < 0.03 * trained.abs().max()
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model)
    again, _ = load(tiny_model, **{stored: True})
    with torch.no_grad():
        again = FastLanguageModel.for_inference(PeftModel.from_pretrained(again, tmp_path / "adapter"))
        assert torch.allclose(again(input_ids=ids).logits, trained, atol=1e-5)


@pytest.mark.parametrize("stored", [{}, {"four_bit": True}, {"fp8": True}], ids=["fp32", "4 bits", "FP8"])
def test_dora_trains_saves_and_merges(tiny_model: Path, tmp_path: Path, stored: dict[str, bool]) -> None:
    model, _ = adapted(tiny_model, use_dora=True, **stored)
    base = base_of(model).model.layers[0].mlp.up_proj
    before = base.lora_magnitude_vector["default"].weight.detach().clone()
    ids = step(model)
    assert not torch.equal(base.lora_magnitude_vector["default"].weight, before)
    model.save_pretrained_merged(tmp_path / "merged")
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["use_dora"] is True
    with torch.no_grad():
        expected = FastLanguageModel.for_inference(model)(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
        assert (merged(input_ids=ids).logits - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("option", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=str)
def test_dora_and_dropout_do_not_go_with_experts(option: dict[str, Any]) -> None:
    from transformers import Qwen3MoeConfig

    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
    ))  # fmt: skip
    with pytest.raises(CommandError, match="does not go with an adapter on experts") as caught:
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


@pytest.mark.parametrize(("method", "words"), [
    ("merged_4bit", "not in this version"), ("merged_16bits", "did you mean 'merged_16bit'"),
])  # fmt: skip
def test_ways_to_save_that_are_not_there(method: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        FastLanguageModel.save_pretrained_merged(make_model(), tmp_path, save_method=method)
    assert words in str(caught.value)
    with pytest.raises(CommandError, match="no adapter"):
        FastLanguageModel.save_pretrained_merged(make_model(), tmp_path, save_method="lora")


# ---- trainers --------------------------------------------------------------------------------------------------------

STEPS = 20  # more than an epoch: 60 rows are 10 to 15 steps
LONG = {"max_steps": 100, "learning_rate": 5e-3}  # for packing: what drifts apart slowly would have (by itself, at 2e-2)
COMMON: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 2e-2, "use_cpu": True,
                          "report_to": "none", "save_strategy": "no", "seed": 3407, "disable_tqdm": True, "bf16": False}


@pytest.fixture(scope="session")
def lively_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights large enough that an adapter alone can lower the loss of a model that never learned anything."""
    folder = tmp_path_factory.mktemp("lively-llama")
    make_model(tie_word_embeddings=False, initializer_range=0.2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def curve(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def texts(tokenizer: Any, count: int = 60) -> datasets.Dataset:
    rows = [tokenizer.apply_chat_template(row["messages"], tokenize=False) for row in chat_rows(count)]
    return datasets.Dataset.from_list([{"text": row} for row in rows])


def assert_same_curve(expected: list[float], found: list[float], steps: int = STEPS) -> None:
    assert len(expected) == len(found) == steps
    assert expected[-1] < 0.7 * expected[0], "it learns"
    for one, other in zip(expected, found, strict=True):
        assert abs(one - other) <= 1e-4 * one  # Trainer logs four digits and more of a loss between 1 and 6


@pytest.mark.usefixtures("_trl_on_the_cpu")
@pytest.mark.parametrize("mode", ["padded", "packed", "padding-free", "packed, 4 bit"])
def test_sft_trainer_trains_as_on_stock_libraries(lively_model: Path, tmp_path: Path, mode: str) -> None:
    options = {"padded": {"max_length": 96, "per_device_train_batch_size": 4},
               "packed": {"max_length": 128, "packing": True, "per_device_train_batch_size": 2},
               "padding-free": {"max_length": None, "padding_free": True, "per_device_train_batch_size": 4}}
    kind, _, four_bit = mode.partition(", ")
    fast, tokenizer = adapted(lively_model, four_bit=bool(four_bit))
    plain = stock(lively_model, fast)
    ran = []
    own = engine_of(fast).hidden
    engine_of(fast).hidden = lambda *args: ran.append(True) or own(*args)
    curves: list[list[float]] = []
    changes = options[kind] | COMMON | (LONG if mode == "packed" else {})
    for model in (plain, fast):
        args = SFTConfig(output_dir=str(tmp_path), gradient_checkpointing=model is fast, **changes)
        curves.append(curve(SFTTrainer(model=model, args=args, train_dataset=texts(tokenizer), processing_class=tokenizer)))
    assert_same_curve(*curves, changes["max_steps"])
    assert len(ran) >= changes["max_steps"]


def test_trainer_with_accumulation_answers_only_and_evaluation(lively_model: Path, tmp_path: Path) -> None:
    fast, tokenizer = adapted(lively_model)
    plain = stock(lively_model, fast)
    rows = [{"input_ids": tokenizer(row["text"])["input_ids"]} for row in texts(tokenizer)]
    results = []
    for model in (plain, fast):
        args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=3, gradient_accumulation_steps=2,
                                 remove_unused_columns=False, label_names=["labels"],
                                 eval_strategy="steps", eval_steps=STEPS // 2, **COMMON)
        data = datasets.Dataset.from_list(rows)
        trainer = Trainer(model=model, args=args, train_dataset=data, eval_dataset=data.select(range(8)),
                          processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer))
        train_on_responses_only(trainer, "<|im_start|>user\n", "<|im_start|>assistant\n")
        losses = curve(trainer)
        held_out = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        results.append((losses, held_out, trainer.predict(trainer.eval_dataset)))
    assert_same_curve(results[0][0], results[1][0])
    assert len(results[0][1]) == 2
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    logits = [result[2].predictions for result in results]
    real = results[0][2].label_ids != -100
    assert real.sum() > 100
    assert abs(logits[0][real] - logits[1][real]).max() < 1e-3


def test_mixed_precision_keeps_the_logits_late(tiny_model: Path, tmp_path: Path) -> None:
    """accelerate rebuilds the outputs then."""
    fast, tokenizer = adapted(tiny_model)
    coded = [tokenizer(row["text"])["input_ids"] for row in texts(tokenizer, 8)]
    rows = [{"input_ids": ids, "labels": ids} for ids in coded]
    options = COMMON | {"max_steps": 3, "bf16": True}
    args = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=2, **options)
    trainer = Trainer(model=fast, args=args, train_dataset=rows, processing_class=tokenizer,
                      data_collator=DataCollatorForSeq2Seq(tokenizer))
    losses = curve(trainer)
    assert len(losses) == 3
    assert all(3 < loss < 7 for loss in losses)


SCRIPT = '''
from unsloth import FastLanguageModel
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

max_seq_length = 512
dataset = Dataset.from_list(ROWS)

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = MODEL,
    max_seq_length = max_seq_length,
    load_in_4bit = False,
    load_in_8bit = False,
    load_in_16bit = False,
    full_finetuning = False,
)

model = FastLanguageModel.get_peft_model(
    model,
    r = 16,
    target_modules = ["q_proj", "k_proj", "v_proj", "o_proj",
                      "gate_proj", "up_proj", "down_proj",],
    lora_alpha = 16,
    lora_dropout = 0,
    bias = "none",
    use_gradient_checkpointing = "unsloth",
    random_state = 3407,
    max_seq_length = max_seq_length,
    use_rslora = False,
    loftq_config = None,
)

trainer = SFTTrainer(
    model = model,
    train_dataset = dataset,
    processing_class = tokenizer,
    args = SFTConfig(
        max_length = max_seq_length,
        packing = True,
        per_device_train_batch_size = 2,
        gradient_accumulation_steps = 2,
        warmup_steps = 2,
        max_steps = 6,
        learning_rate = 1e-2,
        logging_steps = 1,
        output_dir = OUTPUT,
        optim = "adamw_torch",
        seed = 3407,
        report_to = "none",
        use_cpu = not torch.cuda.is_available(),
        bf16 = torch.cuda.is_available(),
    ),
)
trainer.train()
FastLanguageModel.for_inference(model)
inputs = tokenizer(["add 1 and 2"], return_tensors = "pt")
outputs = model.generate(**inputs, max_new_tokens = 4, use_cache = True)
model.save_pretrained(OUTPUT + "/lora_model")
tokenizer.save_pretrained(OUTPUT + "/lora_model")
model.save_pretrained_merged(OUTPUT + "/model", tokenizer, save_method = "merged_16bit",)
'''


@pytest.mark.usefixtures("_trl_on_the_cpu")
@pytest.mark.parametrize("four_bit", [False, True], ids=["16 bit", "4 bit"])
def test_a_script_runs_with_only_its_import_changed(tiny_model: Path, tmp_path: Path, four_bit: bool) -> None:
    rows = [{"messages": row["messages"]} for row in chat_rows(60)]
    names: dict[str, Any] = {"MODEL": str(tiny_model), "ROWS": rows, "OUTPUT": str(tmp_path)}
    script = SCRIPT.replace("load_in_4bit = False", f"load_in_4bit = {four_bit}")
    exec(script.replace("from unsloth import", "from pronghorn import"), names)
    assert isinstance(base_of(names["model"]).model.layers[0].mlp.up_proj.base_layer, NF4Linear) == four_bit
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert (tmp_path / "lora_model" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "model" / "model.safetensors").is_file()


# ---- chat helpers ----------------------------------------------------------------------------------------------------


def test_named_chat_templates() -> None:
    tokenizer = make_tokenizer(chat_template=None)
    tokenizer.eos_token = "<|endoftext|>"
    changed = get_chat_template(tokenizer, "chatml")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert changed.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )
    asked = changed.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n")
    assert changed.eos_token == "<|im_end|>"
    assert tokenizer.chat_template is None
    assert get_chat_template(tokenizer, "chatml", map_eos_token=False).eos_token == "<|endoftext|>"
    alpaca = get_chat_template(tokenizer, "alpaca").apply_chat_template(chat, tokenize=False)
    assert alpaca == "### Instruction:\nhi\n\n### Response:\nho<|endoftext|>\n\n"
    with pytest.raises(CommandError, match="no token") as caught:
        get_chat_template(tokenizer, "llama-3.1")
    assert "one of: chatml, mistral, alpaca" in caught.value.fix
    with pytest.raises(CommandError) as caught:
        get_chat_template(tokenizer, "chatlm")
    assert "did you mean 'chatml'" in caught.value.fix


@pytest.mark.parametrize("name", ["llama-3", "gemma", "phi-3", "mistral"])
def test_every_named_template_renders(name: str) -> None:
    from pronghorn.data.named_templates import TEMPLATES

    tokenizer = make_tokenizer(chat_template=None)
    row = TEMPLATES[name]
    extra = [token for token in (*row.tokens, row.end_of_turn) if token]
    tokenizer.add_special_tokens({"additional_special_tokens": extra, "bos_token": "<s>"})
    text = get_chat_template(tokenizer, name).apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], tokenize=False)
    assert text.index("hi") < text.index("ho")
    assert text.rstrip().endswith(row.end_of_turn or tokenizer.eos_token)


class FakeTrainer:
    """What `train_on_responses_only` reads of a trainer."""

    def __init__(self, data: Any, tokenizer: Any, collator: Any = None) -> None:
        self.train_dataset, self.eval_dataset, self.processing_class, self.data_collator = data, None, tokenizer, collator


def spoken(tokenizer: Any, row: dict[str, Any]) -> str:
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_only_answers_carry_labels() -> None:
    tokenizer = make_tokenizer()
    first = "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
    second = "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na2<|im_end|>\n"
    ids = tokenizer(first + second)["input_ids"]
    half = len(tokenizer(first)["input_ids"])
    masked = [-100 if i < half else token for i, token in enumerate(ids)]
    system = tokenizer("<|im_start|>system\ns<|im_end|>\n")["input_ids"]
    packed = tokenizer(first)["input_ids"] + system + tokenizer(second)["input_ids"]
    data = datasets.Dataset.from_list([
        {"input_ids": ids, "labels": ids, "seq_lengths": [len(ids)]},
        {"input_ids": ids, "labels": masked, "seq_lengths": [len(ids)]},
        {"input_ids": packed, "labels": packed, "seq_lengths": [half, len(packed) - half]},
    ])
    trainer = train_on_responses_only(FakeTrainer(data, tokenizer), "<|im_start|>user\n", "<|im_start|>assistant\n")
    rows = list(trainer.train_dataset)
    assert spoken(tokenizer, rows[0]) == "a1<|im_end|>\na2<|im_end|>\n"
    assert spoken(tokenizer, rows[1]) == "a2<|im_end|>\n"
    assert spoken(tokenizer, rows[2]) == "a1<|im_end|>\na2<|im_end|>\n"
    assert rows[0]["labels"][-2:] == ids[-2:]


def test_a_marker_is_found_however_it_is_cut_into_tokens() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merged = {"ĊĊ": 256, "ĊĊ#": 257}  # the newlines before a marker swallow its beginning
    core = Tokenizer(models.BPE(vocab=alphabet | merged, merges=[("Ċ", "Ċ"), ("ĊĊ", "#")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    ids = tokenizer("#Q:hi\n\n#A:ho\n\n#Q:x\n\n#A:y")["input_ids"]
    assert 257 in ids
    trainer = FakeTrainer(datasets.Dataset.from_list([{"input_ids": ids}]), tokenizer)
    rows = list(train_on_responses_only(trainer, "#Q:", "#A:").train_dataset)
    assert spoken(tokenizer, rows[0]) == "hoy"


def test_markers_that_match_nothing_and_collators_that_ignore_labels() -> None:
    from transformers import DataCollatorForLanguageModeling

    tokenizer = make_tokenizer()
    data = datasets.Dataset.from_list([{"input_ids": tokenizer("hello")["input_ids"]}])
    with pytest.raises(DataError, match=r"no answer in any of 1 row\n"):
        train_on_responses_only(FakeTrainer(data, tokenizer), "### Q", "### A")
    with pytest.raises(DataError, match="not tokenized"):
        train_on_responses_only(FakeTrainer(datasets.Dataset.from_list([{"text": "x"}]), tokenizer), "Q", "A")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    with pytest.raises(CommandError, match="labels of its own"):
        train_on_responses_only(FakeTrainer(data, tokenizer, collator), "Q", "A")
    with pytest.raises(CommandError, match="no tokenizer"):
        train_on_responses_only(FakeTrainer(data, None), "Q", "A")


# ---- the package -----------------------------------------------------------------------------------------------------


def test_importing_is_light_and_names_are_found() -> None:
    code = ("import sys, pronghorn; heavy = {'torch', 'transformers', 'peft', 'numpy', 'pydantic'} & set(sys.modules); "
            "assert not heavy, heavy; assert 'FastLanguageModel' in dir(pronghorn); assert pronghorn.Recipe; "
            "assert not hasattr(pronghorn, 'nothing')")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_copy_of_a_fast_model_saves_itself(tiny_model: Path, tmp_path: Path) -> None:
    model, _ = adapted(tiny_model)
    twin = copy.deepcopy(model)
    for name, parameter in twin.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained_merged(tmp_path / "one")
    twin.save_pretrained_merged(tmp_path / "two")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one != two
