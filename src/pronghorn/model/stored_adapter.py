"""Loads a LoRA adapter from its folder onto a freshly loaded model, trainable.

PEFT imports modules named by some keys of adapter_config.json, and opens a pickle if there is no safetensors file. So the file
is read as JSON, by a list of known keys, and the weights only from adapter_model.safetensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file

from pronghorn import hub
from pronghorn.errors import ModelError
from pronghorn.folders import folder_of
from pronghorn.model.formats.store import is_quantized
from pronghorn.model.lora import ADAPTER_WEIGHTS, attach, pickled_instead
from pronghorn.model_files import ADAPTER, CONFIG, read_json

HONOURED = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "bias",
    "use_rslora",
    "use_dora",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "fan_in_fan_out",
)
# Origin and initialization.
SAYS_NOTHING = (
    "base_model_name_or_path",
    "task_type",
    "peft_type",
    "peft_version",
    "auto_mapping",
    "inference_mode",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "runtime_config",
    "eva_config",
    "ensure_weight_tying",
    "unsloth_fixed",
)
INIT = "init_lora_weights"
BEGAN_BESIDE = (None, True, False, "gaussian", "orthogonal", "eva")  # initializations that leave the weights unchanged
TAKEN_OUT = ("pissa", "olora")  # initialized from a part of the weights, which is subtracted from them


def adapter_folder(name: str, token: str | None = None) -> Path | None:
    """The local or cached folder of this name, if it holds an adapter and no model."""
    folder = folder_of(name)
    if folder is None:
        return hub.adapter_folder(name, token=token)
    return folder if (folder / ADAPTER).is_file() and not (folder / CONFIG).is_file() else None


def base_name(folder: Path) -> str:
    """The model that the adapter was trained on."""
    name = _config(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ModelError(
            what=f"{ADAPTER} names no base model",
            where=str(folder),
            why="base_model_name_or_path is not set",
            fix="set it to the model the adapter was trained on",
        )
    return name


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / ADAPTER, str(folder))
    if config.get("peft_type") != "LORA":
        raise _only_peft(f"describes {str(config.get('peft_type'))[:80]!r}", folder, "Pronghorn loads LoRA adapters only")
    return config


def _only_peft(says: str, folder: Path, why: str) -> ModelError:
    fix = "use peft.PeftModel.from_pretrained(model, folder)"
    return ModelError(f"{ADAPTER} {says}", where=str(folder), why=why, fix=fix)


def attach_adapter(model: torch.nn.Module, folder: Path) -> PeftModel:
    """PEFT's model around ours, with the adapter of the folder, in float32."""
    config = _config(folder)
    for key, value in config.items():
        if key not in (*HONOURED, *SAYS_NOTHING, INIT) and not (value is None or value is False):  # {} asks for defaults
            raise _only_peft(f"sets `{key}`", folder, "this adapter type is not supported")
    began = config.get(INIT)
    if not any(type(began) is type(one) and began == one for one in (*BEGAN_BESIDE, *TAKEN_OUT)) or (
        began in TAKEN_OUT and is_quantized(model)
    ):
        raise ModelError(
            what=f"{ADAPTER} sets `{INIT}` to {str(began)[:80]!r}",
            where=str(folder),
            why="this initialization changed the base model's weights, which cannot be repeated",
            fix="load_in_4bit=False" if began in TAKEN_OUT else "convert the adapter with PEFT, or merge it",
        )
    weights = read_weights(folder)
    kept = {key: config[key] for key in HONOURED if config.get(key) not in (None, {})}
    if began in TAKEN_OUT:
        kept[INIT] = began
    _require_ranks(kept, weights, folder)
    return _filled(lambda: attach(model, **kept), weights, folder)


def _filled(adapted: Callable[[], Any], weights: dict[str, torch.Tensor], folder: Path) -> Any:
    """The adapted model with these weights, or why they do not fit."""
    try:
        found = set_peft_model_state_dict(model := adapted(), weights)
    except (KeyError, RuntimeError, TypeError, ValueError, AttributeError, IndexError, re.error) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _does_not_fit(folder, " ".join(str(error).split())[:300]) from error
    if strange := next(_misfits(found), ""):
        raise _does_not_fit(folder, strange)
    return model


def _require_ranks(config: dict[str, Any], weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Before allocation: no rank exceeds what the file holds."""
    largest = max(
        (tensor.shape[0] for name, tensor in weights.items() if "lora_" in name and "_A" in name and tensor.ndim), default=0
    )
    pattern = config.get("rank_pattern", {})
    ranks = [config.get("r", 8), *(pattern.values() if isinstance(pattern, dict) else (pattern,))]
    if strange := [rank for rank in ranks if type(rank) is not int or not 1 <= rank <= largest]:
        raise _does_not_fit(folder, f"a rank of {str(strange[0])[:40]}, but the largest rank in its weights is {largest}")


def replace_weights(model: PeftModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Copies an adapter's weights, read from this folder, into the model's own adapter, which must match it."""
    _filled(lambda: model, weights, folder)


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        why = pickled_instead(folder)
        fix = "save the adapter as safetensors, if you trust its origin" if why else "check the folder"
        raise ModelError(what=f"{ADAPTER_WEIGHTS} is missing", where=str(folder), why=why, fix=fix)
    try:
        return load_file(file)  # type: ignore[no-any-return]
    except (SafetensorError, OSError) as error:
        raise ModelError(
            what=f"cannot read {ADAPTER_WEIGHTS}",
            where=str(folder),
            why=str(error)[:300],
            fix="download the adapter's files again",
        ) from error


def _misfits(found: Any) -> Iterator[str]:
    own = [name for name in found.missing_keys if ".default" in name]  # not those of an adapter beside it, such as TRL's "ref"
    yield from (f"{name} is not in the file" for name in own if "lora_" in name or ".modules_to_save." in name)
    yield from (f"{name} does not exist in the model" for name in found.unexpected_keys)
    yield from (f"{name[0]} has a different shape" for name in getattr(found, "mismatched_keys", None) or ())


def _does_not_fit(folder: Path, why: str) -> ModelError:
    return ModelError(
        what="the adapter does not belong to this model",
        where=str(folder),
        why=why,
        fix=f"use the base model named in {ADAPTER}, in the version the adapter was trained on",
    )
