"""Which linears the switches of FastModel leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_mamba_mixer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from api_parts import LINEARS, adapted
from image_text_models import save_image_text_model
from pronghorn import FastModel, FastVisionModel
from pronghorn.compat.dropin.targets import chosen_targets
from pronghorn.errors import CommandError, ModelError
from pronghorn.kernels.runtime import dispatch
from pronghorn.model.hf_adapter import with_adapter
from samples import make_model
from tables import table

TEXT_ONLY = {"finetune_vision_layers": False, "finetune_language_layers": True}


@table(("asked", "switches", "found"), [
    (None, {}, "all-linear"), (LINEARS, TEXT_ONLY, LINEARS), ("all-linear", TEXT_ONLY, "all-linear"),
    (None, {"finetune_mlp_modules": False}, LINEARS[:4]), (None, {"finetune_attention_modules": False}, LINEARS[4:]),
    ("all-linear", {"finetune_mlp_modules": False}, LINEARS[:4]),
    (["q_proj", "up_proj"], {"finetune_mlp_modules": False}, ["q_proj"]),
    (["q_proj", "experts"], {"finetune_attention_modules": False}, ["experts"]),
])  # fmt: skip
def test_switches_choose_among_the_targets(asked: Any, switches: dict[str, bool], found: Any) -> None:
    chosen = chosen_targets(make_model(), asked, switches)
    assert chosen == found or sorted(chosen) == sorted(found)


def test_mamba_is_attention_and_peft_refuses_a_part_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    config = test_mamba_mixer.CONFIGS["nemotron_h"]
    attention = ["in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"]
    chosen = chosen_targets(AutoModelForCausalLM.from_config(config), None, {"finetune_mlp_modules": False})
    assert sorted(chosen) == sorted(attention)
    for targets, mlp in ((chosen, set()), ("all-linear", {"up_proj", "down_proj"})):
        options: dict[str, Any] = {"target_modules": targets, "modules_to_save": None, "layers": None, "seed": 0}
        model = with_adapter(AutoModelForCausalLM.from_config(config), **options)
        found = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_" in name}
        assert found == {*attention, *mlp} - {"out_proj"}
    assert "out_proj is left out: PEFT refuses" in capsys.readouterr().err


@table(("asked", "switches", "words"), [
    (None, {"finetune_language_layers": False}, "nothing would"),
    (None, {"finetune_attention_modules": False, "finetune_mlp_modules": False}, "nothing would be trained"),
    (["q_proj"], {"finetune_attention_modules": False}, "none of q_proj remain"),
])  # fmt: skip
def test_switches_that_leave_nothing(asked: Any, switches: dict[str, bool], words: str) -> None:
    with pytest.raises(CommandError) as caught:
        chosen_targets(make_model(), asked, switches)
    assert words in str(caught.value)


def test_the_adapter_that_is_there_is_trained_on(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = adapted(tiny_model, target_modules=[*LINEARS, "lm_head"], use_rslora=True)
    again = {"r": 4, "use_rslora": True, "target_modules": [*LINEARS, "lm_head"]}
    assert FastModel.get_peft_model(model.eval(), **again) is model
    assert model.training
    assert "already has this adapter" in capsys.readouterr().err
    plain, _ = adapted(tiny_model)
    for options in ({}, {"target_modules": "all-linear"}, {"target_modules": None}):
        assert FastModel.get_peft_model(plain, r=4, **options) is plain
    for changes, words in (
        ({"r": 8}, "r=4, not 8"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules="),
        ({"target_modules": LINEARS}, "modules_to_save="),
        ({"bias": "all"}, "bias='none'"),
        ({"layers_to_transform": [0]}, "layers_to_transform="),
    ):
        with pytest.raises(CommandError, match="already has a different adapter") as caught:
            FastModel.get_peft_model(model, **again | changes)
        assert words in caught.value.what
    partly, _ = adapted(tiny_model, target_modules=LINEARS[:4])
    with pytest.raises(CommandError, match="target_modules="):
        FastModel.get_peft_model(partly, r=4, target_modules="all-linear")


def test_targets_mean_what_they_mean_to_peft(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names for several families in one list, as public scripts have it, and ends of paths: the same adapters as PEFT's."""
    monkeypatch.setattr(dispatch, "_said", set())
    asked = ["self_attn.q_proj", "mlp.down_proj", "layers.1.self_attn.o_proj", "shared_mlp.input_linear", "Wqkv", "v_porj"]
    model, _ = adapted(tiny_model, target_modules=asked)
    stock = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=asked))
    paths = [{name for name, p in one.named_parameters() if p.requires_grad} for one in (model, stock)]
    assert paths[0] == paths[1]
    assert len(paths[0]) == 2 * (2 + 2 + 1)
    said = capsys.readouterr().err
    for name in ("shared_mlp.input_linear", "Wqkv", "v_porj"):
        assert f"target_modules: {name} is left out: the model has no such linear layer" in said
    assert "did you mean `v_proj`?" in said
    assert FastModel.get_peft_model(model, r=4, target_modules=asked) is model
    pattern = r".*layers\.1\..*(q_proj|up_proj)"
    model, _ = adapted(tiny_model, target_modules=pattern)
    stock = get_peft_model(make_model(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=pattern))
    paths = [{name for name, p in one.named_parameters() if p.requires_grad} for one in (model, stock)]
    assert paths[0] == paths[1]
    assert FastModel.get_peft_model(model, r=4, target_modules=pattern) is model
    for options, words in (
        ({}, "whole paths"),
        ({"finetune_mlp_modules": False}, "switches"),
        ({"target_modules": "("}, "regular"),
    ):
        with pytest.raises(CommandError) as caught:
            adapted(tiny_model, **{"target_modules": "q_proj"} | options)
        assert words in str(caught.value)
    with pytest.raises(CommandError, match="layers are chosen"):
        adapted(tiny_model, target_modules=pattern, layers_to_transform=[1])
    small = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    first = with_adapter(small, target_modules=["c_attn", "q_proj"], modules_to_save=None, layers=None, seed=0, r=2)
    assert {name.split(".")[-4] for name, p in first.named_parameters() if p.requires_grad} == {"c_attn"}
    with pytest.raises(ModelError, match="`Wqkv` matches no linear layer"):
        adapted(tiny_model, target_modules=["Wqkv", "out_proj"])


def test_a_vision_tower_is_never_adapted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = FastModel.from_pretrained(save_image_text_model("gemma3", tmp_path), max_seq_length=128, load_in_4bit=False)
    with pytest.raises(CommandError, match="finetune_vision_layers=True"):
        FastVisionModel.get_peft_model(model, finetune_vision_layers=True)
    with pytest.raises(CommandError, match="finetune_audio_layers=True"):
        FastModel.get_peft_model(model, finetune_audio_layers=True)
    assert "FastVisionModel" not in capsys.readouterr().err
    with pytest.raises(CommandError, match="lora_dropout"):
        FastVisionModel.get_peft_model(model, lora_dropout=2)
    assert "FastVisionModel: only the text model gets an adapter" in capsys.readouterr().err
    adapted = FastVisionModel.get_peft_model(
        model, r=4, target_modules=None, finetune_attention_modules=True, finetune_mlp_modules=False, **TEXT_ONLY
    )
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained
    assert all("self_attn" in name and "vision" not in name for name in trained)
    chosen_targets(make_model(), None, {"finetune_vision_layers": True})
    assert "no layers that read images" in capsys.readouterr().err
