"""Exports, loaded as anybody would: by stock transformers and PEFT, for the comparison with what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import PeftModel

from pronghorn.model.config import read_config
from pronghorn.model.formats.store import dequantize_
from pronghorn.model.load import DTYPES, load_model, pick_device, resolve_precision, without_progress_bars
from pronghorn.model.text_stack import auto_class, keep_softcap
from pronghorn.recipe import Recipe


def stock_model(folder: Path) -> Any:
    """A whole model, in the precision of its files."""
    with without_progress_bars():
        model = auto_class(read_config(str(folder))).from_pretrained(
            str(folder), dtype="auto", use_safetensors=True, trust_remote_code=False
        )
    keep_softcap(model)
    return model.to(pick_device()).eval()


def stock_adapter(recipe: Recipe, folder: Path) -> Any:
    """The base as the run computed with it, dequantized where it was in few bits, and the adapter on it by PEFT."""
    device = pick_device()
    dtype = DTYPES[resolve_precision(recipe.precision, device)]
    base = load_model(recipe.model, dtype, device, storage=recipe.stored_as)
    dequantize_(base, dtype, device)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=False, use_safetensors=True).eval()
