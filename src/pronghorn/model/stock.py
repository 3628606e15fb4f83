"""Exports, loaded as anybody would: by stock transformers and PEFT, for the comparison with what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from pronghorn.errors import CheckpointError
from pronghorn.hf_types import HFConfig
from pronghorn.model.config import empty_model, read_config
from pronghorn.model.formats.store import dequantize_
from pronghorn.model.heads import auto_class
from pronghorn.model.load import DTYPES, load_base, pick_device, resolve_precision, without_progress_bars
from pronghorn.model.text_stack import keep_softcap
from pronghorn.model.weight_files import files_to_load
from pronghorn.model_files import ADAPTER, read_json
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
    _refuse_named_modules(folder)
    device = pick_device()
    dtype = DTYPES[resolve_precision(recipe.precision, device)]
    base = load_base(recipe, dtype, device)
    dequantize_(base, dtype, device)
    return PeftModel.from_pretrained(base, str(folder), is_trainable=False, use_safetensors=True).eval()


def _refuse_named_modules(folder: Path) -> None:
    """PEFT imports the module that this key names."""
    if read_json(folder / ADAPTER, str(folder)).get("auto_mapping"):
        raise CheckpointError(
            what=f"{ADAPTER} sets `auto_mapping`",
            where=str(folder),
            why="it names a Python module to import, and Pronghorn runs no code that a file names",
            fix="use a checkpoint written by Pronghorn; --checkpoint selects another one",
        )


class CompressedWeights(NamedTuple):
    """Weights of a compressed-tensors checkpoint, by the names in its files."""

    config: HFConfig  # without what it says of the format
    plain: dict[str, Tensor]  # as they are
    read: dict[str, Tensor]  # in few bits, read by that library


def read_compressed(folder: Path) -> CompressedWeights:
    """Its config and every weight are read by that library. (transformers' own way, 5.22, leaves out the scales of NVFP4
    experts.)"""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = read_config(str(folder))
    facts = QuantizationConfig.model_validate(_as_dict(config.quantization_config))
    (scheme,) = facts.config_groups.values()
    reader = BaseCompressor.get_value_from_registry(facts.format)
    parts = reader.compression_param_names(scheme)
    stored = {name: tensor for file in files_to_load(folder) for name, tensor in load_file(file).items()}
    read: dict[str, Tensor] = {}
    for owner in sorted(name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")):
        local = {part: stored.pop(f"{owner}.{part}") for part in parts if f"{owner}.{part}" in stored}
        read[f"{owner}.weight"] = reader.decompress(local, scheme)["weight"]
    del config.quantization_config
    return CompressedWeights(config, stored, read)


def stock_of(config: HFConfig, weights: dict[str, Tensor], adapter: Path | None = None) -> Any:
    """A model by transformers, of weights by the files' names, in float32."""
    with without_progress_bars():
        kind: Any = type(empty_model("", config))
        model = kind.from_pretrained(None, config=config, state_dict=weights, dtype=torch.float32)
    keep_softcap(model)
    model = model.to(pick_device())
    return (PeftModel.from_pretrained(model, str(adapter)) if adapter else model).eval()


def _as_dict(config: HFConfig) -> dict[str, Any]:
    return config if isinstance(config, dict) else config.to_dict()  # type: ignore[no-any-return]
