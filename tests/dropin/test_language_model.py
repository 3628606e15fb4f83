"""The interface people know: what its arguments do, and what it refuses."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from api_parts import adapted, load, step
from nf4_checkpoints import save_nf4
from pronghorn import FastLanguageModel
from pronghorn.errors import CommandError, ModelError
from pronghorn.model.causal_lm import engine_of
from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import store_linears_
from pronghorn.model.formats.table import FORMATS
from samples import make_model, make_tokenizer
from tables import table

# ---- from_pretrained -------------------------------------------------------------------------------------------------


@table(("options", "words"), [
    ({"load_in_8bit": True}, "load_in_8bit=True is not supported"),
    ({"load_in_fp8": True, "load_in_16bit": True}, "load_in_fp8=True contradicts load_in_16bit=True"),
    ({"load_in_fp8": True, "full_finetuning": True}, "load_in_fp8=True contradicts full_finetuning=True"),
    ({"trust_remote_code": True}, "run code"),
    ({"dtype": torch.float64}, "torch.bfloat16"),
    ({"dtype": torch.float32, "load_in_16bit": True}, "keep one of them"),
    ({"device_map": "balanced"}, "one device"),
    ({"device_map": {"model": 0, "lm_head": 1}}, "one device"),
    ({"use_gradient_checkpointing": "sometimes"}, "unsloth"),
    ({"max_seq_length": 0}, "in tokens"), ({"max_seq_length": -1}, "in tokens"),
])  # fmt: skip
def test_what_from_pretrained_does_not_honour_is_an_error(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises((CommandError, ModelError)) as caught:
        FastLanguageModel.from_pretrained(str(tiny_model), **({"load_in_4bit": False} | options))
    assert words in str(caught.value)


def test_weights_in_fp8_are_frozen_and_multiplied_as_they_are(tiny_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model), load_in_fp8=True, verify=True)
    assert isinstance(model.model.layers[0].mlp.up_proj, StoredLinear)
    assert type(model.lm_head) is torch.nn.Linear
    engine = engine_of(model)
    assert engine
    assert all(layer.fp8 for layer in engine.layers)
    assert not any(p.requires_grad for p in model.parameters())
    model = FastLanguageModel.get_peft_model(model, r=4)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    step(model)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(ModelError, match="stored in FP8"):
        FastLanguageModel.get_peft_model(load(tiny_model, load_in_fp8=True)[0], modules_to_save=["up_proj"])


def test_the_default_call_gives_weights_in_4_bits(tiny_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model), verify=True)
    assert isinstance(model.model.layers[0].mlp.up_proj, StoredLinear)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.dtype == torch.float32
    assert engine_of(model)
    assert not any(p.requires_grad for p in model.parameters())
    for options in ({"load_in_16bit": True}, {"full_finetuning": True}, {"load_in_4bit": False}):
        model, _ = FastLanguageModel.from_pretrained(str(tiny_model), **options)
        assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_4_bit_checkpoints_are_loaded_as_they_are(tmp_path: Path) -> None:
    model = make_model(hidden_size=64, intermediate_size=128)
    store_linears_(model, FORMATS["nf4"])
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
    with pytest.raises(TypeError, match=r"nonsense.*remove it"):
        FastLanguageModel.from_pretrained(str(tiny_model), nonsense=True)
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
    model, _ = FastLanguageModel.from_pretrained(
        str(tiny_model), full_finetuning=True, dtype=torch.bfloat16, use_gradient_checkpointing=False
    )
    assert all(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    assert not any(layer.recompute for layer in engine_of(model).layers)
    ids = torch.randint(3, 259, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(CommandError, match="full_finetuning"):
        FastLanguageModel.get_peft_model(model)
    with pytest.raises(CommandError, match="already has a different adapter"):
        FastLanguageModel.get_peft_model(adapted(tiny_model)[0])


@pytest.mark.parametrize("full", [True, False])
def test_verify_on_load(tiny_model: Path, full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronghorn.model.layers import wide_gemms as gated

    model, _ = load(tiny_model, verify=True, full_finetuning=full)
    assert all(p.requires_grad == full and p.grad is None for p in model.parameters())
    own = gated.gated_activation_backward

    def broken(da: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(0.9 * da, *args, **kwargs)

    monkeypatch.setattr(gated, "gated_activation_backward", broken)
    with pytest.raises(ModelError, match="the fast layers differ from the transformers layers"):
        load(tiny_model, verify=True, full_finetuning=full)


def test_a_family_without_a_row_trains_on_its_own_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    model, _ = FastLanguageModel.from_pretrained(str(tmp_path), load_in_4bit=False)
    assert "gpt2 uses the transformers layers" in capsys.readouterr().err
    assert model.is_gradient_checkpointing
    model = FastLanguageModel.get_peft_model(model, target_modules="all-linear")
    ids = torch.randint(3, 259, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    assert any(p.grad is not None for p in model.parameters())


# ---- get_peft_model --------------------------------------------------------------------------------------------------


@table(("options", "words"), [
    ({"loftq_config": {"loftq_bits": 4}}, "LoftQ"),
    ({"bias": "some"}, "lora_only"),
    ({"init_lora_weights": "eva"}, "not supported"),
    ({"target_modules": ["q_porj"]}, "did you mean `q_proj`"),
    ({"target_modules": "q_proj"}, "a list of names"),
    ({"modules_to_save": ["classifier"]}, "no module `classifier`"),
    ({"layers_to_transform": [0], "finetune_last_n_layers": 1}, "keep one"),
    ({"finetune_last_n_layers": 3}, "a model with 2 layers"),
    ({"layers_to_transform": []}, "no such layers"),
    ({"max_seq_length": 77}, "from_pretrained only"),
    ({"lora_dropout": 1.0}, "lora_dropout=1.0"), ({"lora_dropout": -0.1}, "lora_dropout=-0.1"),
])  # fmt: skip
def test_what_get_peft_model_does_not_honour_is_an_error(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    model, _ = load(tiny_model)
    with pytest.raises((CommandError, ModelError)) as caught:
        FastLanguageModel.get_peft_model(model, **options)
    assert words in str(caught.value)


def test_what_from_pretrained_returned_as_a_whole_is_no_model(tiny_model: Path) -> None:
    with pytest.raises(CommandError, match="expected a model, got tuple") as caught:
        FastLanguageModel.get_peft_model(load(tiny_model))
    assert "model, tokenizer = " in caught.value.fix


def test_a_folder_may_be_a_path(tiny_model: Path) -> None:
    model, _ = FastLanguageModel.from_pretrained(tiny_model, load_in_4bit=False)
    assert model.name_or_path == str(tiny_model)


@table(("options", "words"), [
    ({"init_lora_weights": "pissa"}, "needs 16-bit base weights"),
    ({"init_lora_weights": "olora"}, "needs 16-bit base weights"),
    ({"modules_to_save": ["down_proj"]}, "stored in 4 bits"), ({"modules_to_save": ["mlp"]}, "stored in 4 bits"),
])  # fmt: skip
def test_what_weights_in_4_bits_do_not_allow(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    model, _ = FastLanguageModel.from_pretrained(str(tiny_model))
    with pytest.raises((CommandError, ModelError), match=words):
        FastLanguageModel.get_peft_model(model, **options)


# ---- the package -----------------------------------------------------------------------------------------------------


def test_importing_is_light_and_names_are_found() -> None:
    code = (
        "import sys, pronghorn; heavy = {'torch', 'transformers', 'peft', 'numpy', 'pydantic'} & set(sys.modules); "
        "assert not heavy, heavy; assert 'FastLanguageModel' in dir(pronghorn); assert pronghorn.Recipe; "
        "assert not hasattr(pronghorn, 'nothing')"
    )
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
