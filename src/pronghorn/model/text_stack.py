"""The text model of a checkpoint: all of it, or one part of a multimodal model (families.WRAPPERS).

A multimodal checkpoint is loaded by its own class, so all names stay Hugging Face's: the text model under
`model.language_model`, the head beside it, the vision tower and its projector under `model`. Only the text model is trained;
the rest is frozen, has no adapter, stays in 16 bits, and is exported unchanged.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from pronghorn.hf_types import HFModel
from pronghorn.model.families import text_config

INNER = "language_model"
# Image processor files; they do not depend on weights.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)


def backbone(model: HFModel) -> Any:
    """The module with the embeddings, the decoder layers and the last norm."""
    return getattr(model.model, INNER, model.model)


def decoder_layers(model: HFModel) -> dict[str, Any]:
    """By name, in their order."""
    layers = backbone(model).layers
    prefix = next(name for name, module in model.named_modules() if module is layers)
    return {f"{prefix}.{number}": layer for number, layer in enumerate(layers)}


def head_of(model: HFModel) -> Any:
    """The LM head, or PEFT's trained copy if modules_to_save names it."""
    return in_use(model.get_output_embeddings())


def in_use(module: nn.Module) -> Any:
    """The module, or PEFT's trained copy if its wrapper runs that."""
    if not isinstance(module, ModulesToSaveWrapper):
        return module
    active = module.active_adapters
    trained = active and not module.disable_adapters and all(name in module.modules_to_save for name in active)
    return module.modules_to_save[active[0]] if trained else module.original_module


def inner_of(module: nn.Module) -> Any:
    """The model's own module, inside PEFT's wrappers."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.base_layer if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def beside_text(model: HFModel) -> list[str]:
    """Names of modules outside the text model. Empty for a text-only model."""
    inner = getattr(model, "model", None)
    if inner is None or not hasattr(inner, INNER):
        return []
    return [f"model.{name}" for name, _ in inner.named_children() if name != INNER]


def is_beside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter of this name is one of `beside_text`'s, or inside it."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def not_adapted(model: HFModel) -> str | None:
    """PEFT's `exclude_modules`: vision towers have linears of the same names."""
    found = beside_text(model)
    return f"({'|'.join(map(re.escape, found))})(\\..*)?" if found else None


def freeze_beside_text(model: HFModel) -> int:
    """Freezes everything outside the text model. Returns the number of parameters."""
    modules = beside_text(model)
    found = [parameter for name, parameter in model.named_parameters() if is_beside(name, modules)]
    for parameter in found:
        parameter.requires_grad_(False)
    return sum(parameter.numel() for parameter in found)


def set_cache(model: HFModel, keeps: bool) -> None:
    """Switches the KV cache, for generation. The text model reads its own config."""
    model.config.use_cache = text_config(model.config).use_cache = keeps


@contextmanager
def in_mode(model: HFModel, *, training: bool) -> Iterator[None]:
    """The model trains or evaluates; then it is as before."""
    before = model.training
    model.train(training)
    try:
        yield
    finally:
        model.train(before)


def keep_softcap(model: HFModel) -> None:
    """transformers 5.17 runs Gemma 2 on SDPA, which leaves `attn_logit_softcapping` out without a word; eager attention has it.
    For whatever runs on the model's own layers: generation, logits, the check against them."""
    if getattr(text_config(model.config), "attn_logit_softcapping", None) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def stored_names(model: HFModel, keys: Iterable[str]) -> dict[str, str]:
    """The files' name of each weight of the model, where it is another: Gemma 3's files say `language_model.model`, as
    transformers named it when they were made, and Hunyuan 3's `shared_mlp`. A model with more than text saves itself under the
    files' names afterwards; the others do so anyway."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    names: dict[str, str] = {}
    for key in keys:
        name, _ = rename_source_key(key, renamings, [], model.base_model_prefix, state)
        if name != key:
            names[name] = key
    if beside_text(model):
        model._weight_conversions = [rule for rule in rules if isinstance(rule, WeightConverter) or rule.was_used()]
    return names


def conversions(model: HFModel, keys: Iterable[str]) -> list[Any]:
    """transformers' rules that make weights of this model out of several of the files, or change them. Like transformers, the
    model remembers the rules that were used, and saves itself as its files are."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = {pattern: rule for rule in rules if isinstance(rule, WeightConverter) for pattern in rule.source_patterns}
    state, every = model.state_dict(), list(dict.fromkeys(converters.values()))
    patterns = {rename_source_key(key, renamings, every, model.base_model_prefix, state)[1] for key in keys}
    model._weight_conversions = [rule for rule in rules if rule.was_used()]
    return [rule for rule in every if patterns & set(rule.source_patterns)]


def copy_processor_files(source: Path, folder: Path) -> None:
    """Copies the image processor's files of a model's folder beside exported weights."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copy2(source / name, folder / name)
