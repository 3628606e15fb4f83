"""Checkpoints in 4 bits, as transformers with bitsandbytes writes them."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pronghorn.model.formats.linear import StoredLinear
from pronghorn.model.formats.store import linears_of


def bitsandbytes_config(dtype: torch.dtype, *, nested: bool = True, skip: Collection[str] = ("lm_head",)) -> dict[str, Any]:
    """`quantization_config` of a config.json, so that transformers with bitsandbytes reads what is saved."""
    name = str(dtype).removeprefix("torch.")
    return {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_compute_dtype": name, "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(skip)}  # fmt: skip


def save_nf4(model: PreTrainedModel, folder: Path) -> None:
    """A 4-bit checkpoint that `load_stored`, and transformers with bitsandbytes, read."""
    inside = [module for _, _, _, module in linears_of(model, StoredLinear)]
    skipped = sorted({name for _, name, _, _ in linears_of(model, nn.Linear)})
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    nested = all(module.stored.nested for module in inside)
    config["quantization_config"] = bitsandbytes_config(model.dtype, nested=nested, skip=skipped)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
