"""The run's adapter alone as a GGUF file, for llama.cpp's --lora beside a GGUF file of the base."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from pronghorn.errors import CommandError
from pronghorn.export import child, gguf_lora_child
from pronghorn.export.gguf_convert import Converter, Source, fault, staged
from pronghorn.model.lora import ADAPTER_WEIGHTS
from pronghorn.model_files import ADAPTER, read_json

FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<name>.+)\.lora_(?P<factor>[AB])\.weight")


def refuse(folder: Path) -> None:
    """llama.cpp adds B A to a weight, and knows nothing else."""
    config = read_json(folder / ADAPTER, str(folder))
    beyond = {
        "DoRA magnitudes": config.get("use_dora"),
        "whole modules (modules_to_save)": config.get("modules_to_save"),
        "biases": config.get("bias", "none") != "none",
        "adapters on experts": config.get("target_parameters"),
        "a transposed layer (fan_in_fan_out)": config.get("fan_in_fan_out"),
    }
    if found := [name for name, there in beyond.items() if there]:
        raise _merge_first(f"this adapter has {' and '.join(found)}", folder)


def _merge_first(what: str, where: Path) -> CommandError:
    why = "llama.cpp's adapters are plain LoRA of linear layers"
    return CommandError(what, where=str(where), why=why, fix="merge it: --to gguf:q8_0")


def write(checkpoint: Path, base: Path, target: Path, title: str, converter: Converter) -> None:
    refuse(checkpoint)
    target = target.resolve()  # the process works in its folder
    weights, alpha = plain_factors(checkpoint)
    with (
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".adapter-") as name,
        staged(Source(base, title), target.parent) as model,
    ):
        scratch = Path(name)
        save_file(weights, scratch / "factors.safetensors")
        root = converter.script.parent
        own = [str(root / "gguf-py")] if (root / "gguf-py").is_dir() else []
        job = {
            "paths": [*own, str(root)],
            "model": str(model),
            "weights": str(scratch / "factors.safetensors"),
            "names": sorted({key.rpartition(".")[0] for key in weights}),
            "alpha": alpha,
            "title": title,
            "target": str(target),
        }
        (scratch / "asked.json").write_text(json.dumps(job), encoding="utf-8")
        ended = child.run(["-P", str(Path(gguf_lora_child.__file__)), str(scratch / "asked.json")], target.parent)
    if ended.code or not target.is_file():
        raise fault(ended, converter)


def plain_factors(checkpoint: Path) -> tuple[dict[str, torch.Tensor], float]:
    """`name.A` and `name.B` in float32, and alpha. llama.cpp scales by alpha / rank; where that is not one number for all
    (patterns of ranks, rsLoRA), the scales are multiplied into B, and alpha is 0, which means: as they are."""
    config = read_json(checkpoint / ADAPTER, str(checkpoint))
    found: dict[str, torch.Tensor] = {}
    for key, value in load_file(checkpoint / ADAPTER_WEIGHTS).items():
        parts = FACTOR.fullmatch(key)
        if parts is None:
            raise _merge_first(f"{key} is not a LoRA matrix of a linear layer", checkpoint / ADAPTER_WEIGHTS)
        found[f"{parts['name']}.{parts['factor']}"] = value.float().contiguous()
    if not (config.get("rank_pattern") or config.get("alpha_pattern") or config.get("use_rslora")):
        return found, float(config["lora_alpha"])
    for key, value in found.items():
        if key.endswith(".B"):
            found[key] = value * scale_of(key.removesuffix(".B"), value.shape[1], config)
    return found, 0.0


def scale_of(name: str, rank: int, config: dict[str, Any]) -> float:
    """As PEFT: the first pattern that fits the end of the layer's name."""
    patterns = config.get("alpha_pattern") or {}
    alpha = next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), config["lora_alpha"])
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
