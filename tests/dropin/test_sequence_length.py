"""max_seq_length beyond the model's positions: the RoPE that stock transformers computes from such a config, or a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, GPT2Config

from pronghorn import FastLanguageModel
from pronghorn.errors import ModelError
from pronghorn.kernels.runtime import dispatch
from samples import make_model, make_tokenizer
from tables import table

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip


@pytest.fixture(autouse=True)
def _said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_said", set())


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path, length: int) -> tuple[Any, Any]:
    dispatch._said.clear()
    return FastLanguageModel.from_pretrained(str(folder), max_seq_length=length, load_in_4bit=False)


@table(("rope", "scaled", "words"), [
    ({"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "linearly by 2;"),
    ({"rope_type": "linear", "rope_theta": 1e4, "factor": 1.5}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
     "linearly by 2;"),
    (LLAMA3, LLAMA3, "its llama3 RoPE is used beyond them as it is"),
])  # fmt: skip
def test_positions_are_those_of_stock_with_scaled_rope(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rope: dict[str, Any], scaled: dict[str, Any], words: str
) -> None:
    folder = save(make_model(rope_parameters=rope), tmp_path / words[:5])
    model, tokenizer = load(folder, 1024)
    assert (model.max_seq_length, tokenizer.model_max_length) == (1024, 1024)
    said = [line for line in capsys.readouterr().err.splitlines() if "positions" in line]
    assert len(said) == 1
    assert words in said[0]
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings, config.rope_parameters = 1024, scaled
    stock = AutoModelForCausalLM.from_pretrained(folder, config=config)
    ids = torch.randint(3, 259, (1, 600), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-5)
    model = FastLanguageModel.get_peft_model(model, r=4, max_seq_length=1024)
    model.save_pretrained_merged(str(tmp_path / words[:5] / "merged"), tokenizer)
    saved = json.loads((tmp_path / words[:5] / "merged" / "config.json").read_text(encoding="utf-8"))
    assert saved["max_position_embeddings"] == 1024
    assert {key: saved["rope_parameters"][key] for key in scaled} == scaled


def test_positions_that_cannot_be_scaled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gemma = Gemma3TextConfig(vocab_size=259, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                             num_key_value_heads=1, head_dim=8, max_position_embeddings=64)  # fmt: skip
    for config in (GPT2Config(vocab_size=259, n_embd=16, n_layer=1, n_head=2, n_positions=64), gemma):
        folder = save(AutoModelForCausalLM.from_config(config), tmp_path / config.model_type)
        with pytest.raises(ModelError, match="exceeds the model's 64 positions") as caught:
            load(folder, 65)
        assert "cannot be scaled linearly" in str(caught.value)
        assert caught.value.fix == "max_seq_length=64"
        capsys.readouterr()
        model, _ = load(folder, 2048)  # the default, which nobody may have asked for
        assert model.max_seq_length == 64
        assert "max_seq_length: 64, the model's positions" in capsys.readouterr().err
