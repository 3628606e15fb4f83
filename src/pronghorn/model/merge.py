"""Weights with their adapter merged in, as stock transformers loads them: the one way of merging, for runs and for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFModel
from pronghorn.model.carried import base_folder, generation_apart
from pronghorn.model.causal_lm import base_of
from pronghorn.model.config import stays_wide
from pronghorn.model.families import ties_embeddings
from pronghorn.model.formats.store import stored_modules
from pronghorn.model.load import without_progress_bars
from pronghorn.model.text_stack import beside_text, copy_processor_files

HALVES = (torch.bfloat16, torch.float16)


def save_merged(model: HFModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """One Hugging Face folder in `dtype`, by default in 16 bits. The model itself stays as it is: weights are merged one by
    one, onto the CPU."""
    base = base_of(model)
    dtype = dtype or (base.dtype if base.dtype in HALVES else torch.bfloat16)
    weights = merged_weights(model, dtype)
    with without_progress_bars(), generation_apart(base, folder):
        base.save_pretrained(str(folder), state_dict=weights)
    finish_folder(base, folder, dtype, untied=ties_embeddings(base.config) and not _still_tied(base, weights))


def finish_folder(base: HFModel, folder: Path, dtype: torch.dtype, *, untied: bool) -> None:
    """Says in config.json what the merged weights are, and adds the files of an image processor."""
    file = folder / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["dtype"] = str(dtype).removeprefix("torch.")
    if untied:
        values["tie_word_embeddings"] = False  # they were trained apart
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if beside_text(base):
        copy_processor_files(base_folder(base), folder)


def merged_weights(model: HFModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Names as the model was loaded with. Adapters are added in float32 and rounded once; to weights in 4 or 8 bits as they
    are trained on, dequantized in the model's dtype."""
    base = base_of(model)
    stored = {
        f"{_unwrapped(path)}.{name}": (module, name) for path, module in stored_modules(base) for name in module.quantized
    }
    adapted = {name: module for name, module in base.named_modules() if hasattr(module, "get_delta_weight")}
    adapted |= {
        f"{_unwrapped(name)}.{module.parameter_name}": module
        for name, module in adapted.items()
        if isinstance(module, ParamWrapper)
    }
    found: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}  # tied weights stay tied
    for name, value in _plain_names(base.state_dict(keep_vars=True).items()):
        module = adapted.get(name.removesuffix(".weight"))
        if id(value) in seen and module is None:  # a tied head with an adapter is one of its own
            found[name] = seen[id(value)]
            continue
        if name in stored:
            quantized, leaf = stored[name]
            weight = quantized.dequantized(leaf, base.dtype)
        elif f"{name.partition('.weight')[0]}.weight" in stored:
            continue  # scales
        else:
            weight = value.detach()
        if module is not None:
            weight = _with_deltas(weight, module)
        kind = dtype if weight.is_floating_point() and not stays_wide(base, name) else weight.dtype
        found[name] = weight.to("cpu", kind, copy=True)
        seen.setdefault(id(value), found[name])
    return found


def _plain_names(state: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Without PEFT's additions: what it added is left out, what it wrapped has its old name back."""
    for name, value in state:
        if ".lora_" in name or ".original_module." in name:
            continue
        parts = name.split(".")
        if "modules_to_save" in parts:
            at = parts.index("modules_to_save")
            parts = parts[:at] + parts[at + 2 :]  # and the adapter's name behind it
        yield _unwrapped(".".join(parts)), value


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _with_deltas(weight: Tensor, module: Any) -> Tensor:
    if module.merged or module.disable_adapters:
        return weight
    total = weight.float()
    active = [adapter for adapter in module.active_adapters if adapter in module.lora_A]
    for adapter in active:
        dora = module.use_dora.get(adapter, False)
        if (dora and len(active) > 1) or (adapter in module.lora_variant and not dora):
            raise ModelError(
                what="this adapter is a LoRA variant that is not a plain sum",
                why="it needs its own merge",
                fix="model.merge_and_unload().save_pretrained(folder)",
            )
        total = total + module.get_delta_weight(adapter).float()
        if dora:  # the sum gives each row's direction, the magnitude its length
            magnitude = module.lora_magnitude_vector[adapter].weight.detach().float()
            total = total * (magnitude / total.norm(dim=1))[:, None]
    if not total.isfinite().all():
        raise ModelError(
            what="the merged weights are not finite",
            why="the adapter has NaN or infinite values",
            fix="use an earlier checkpoint",
        )
    return total


def _still_tied(base: HFModel, weights: dict[str, Tensor]) -> bool:
    if base.get_output_embeddings() is None:
        return True  # a classifier
    names = {id(module): name for name, module in base.named_modules()}
    head = weights.get(f"{names[id(base.get_output_embeddings())]}.weight")
    embeddings = weights.get(f"{names[id(base.get_input_embeddings())]}.weight")
    return head is None or embeddings is None or head is embeddings or torch.equal(head, embeddings)
