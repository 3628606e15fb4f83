"""generation_config.json goes from a base model to what is written of it as it is, or as it was changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from api_parts import load
from pronghorn.model.carried import write_generation
from pronghorn.model.config import generation_config
from pronghorn.model.load import load_model

SETTINGS = b'{"temperature": 0.6,\n "eos_token_id": [2, 4]}'
FILE = "generation_config.json"


def test_bytes_unless_they_were_changed(tiny_model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / FILE).write_bytes(SETTINGS)
    for storage in ("bf16", "nf4"):
        model = load_model(str(base), torch.float32, torch.device("cpu"), storage=storage)
        write_generation(model, tmp_path)
        assert (tmp_path / FILE).read_bytes() == SETTINGS
    model.generation_config.top_k = 7
    write_generation(model, tmp_path)
    assert json.loads((tmp_path / FILE).read_text()).items() >= {"top_k": 7, "temperature": 0.6, "eos_token_id": [2, 4]}.items()


def test_a_model_in_memory_is_saved_with_them(tiny_model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / FILE).write_bytes(SETTINGS)
    model, tokenizer = load(base)
    model.save_pretrained_merged(str(tmp_path / "merged"), tokenizer)
    assert (tmp_path / "merged" / FILE).read_bytes() == SETTINGS
    assert model.generation_config.temperature == 0.6


def test_an_older_model_has_them_in_its_config(tiny_model: Path, tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / FILE).unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"temperature": 0.6, "do_sample": True}))
    stock: GenerationConfig = AutoModelForCausalLM.from_pretrained(base).generation_config
    assert stock.temperature == 0.6
    assert generation_config("base", base) == stock
