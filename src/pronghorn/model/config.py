"""A model's config by name or folder. A plan needs nothing else, neither weights nor what loads them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pronghorn.errors import ModelError
from pronghorn.folders import folder_of
from pronghorn.hf_types import HFConfig, HFModel
from pronghorn.hub import model_folder
from pronghorn.model.config_check import (
    require_architectures,
    require_consistent,
    require_generation_numbers,
    require_sane_numbers,
    require_token_ids,
)
from pronghorn.model.heads import auto_class, head_in
from pronghorn.model_files import CONFIG, GENERATION, MALFORMED, read_json, require_safe_files

T = TypeVar("T")
UNBUILDABLE = "config.json does not describe a valid model"

UNREADABLE = (*MALFORMED, SafetensorError, StrictDataclassError)


def read_config(name: str) -> Any:
    """Hugging Face's config object. No code from the model's folder is ever run."""
    folder = model_folder(name)
    content = require_safe_files(folder, name)
    if not content:
        raise no_config(name)
    require_sane_numbers(content, name)
    require_token_ids(content, CONFIG, name)
    require_architectures(content, name)
    config = constructed(name, UNBUILDABLE, lambda: AutoConfig.from_pretrained(str(folder), trust_remote_code=False))
    config = _as_loaded(config)
    config._name_or_path = place(name)  # not where the hub's cache is
    constructed(name, UNBUILDABLE, lambda: require_consistent(config, name))
    return config


def _as_loaded(config: HFConfig) -> Any:
    """The text model's config, where transformers' language model of a multimodal config is the text model alone (Qwen3.5)."""
    text, classes = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING
    if text is config or type(config) not in classes or type(text) not in classes or not head_in(config).generates:
        return config
    if classes[type(config)] is not classes[type(text)]:
        return config
    if hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return text


def no_config(name: str) -> ModelError:
    return ModelError(
        what="the folder has no config.json",
        where=name,
        why="it is not a Hugging Face model folder",
        fix="set `model:` to the folder with config.json and model.safetensors",
    )


def empty_model(name: str, config: HFConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The family's own modules without memory."""
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        return constructed(
            name, UNBUILDABLE, lambda: auto_class(config).from_config(config, trust_remote_code=False, **options)
        )


def generation_config(name: str, folder: Path) -> GenerationConfig:
    """What generation_config.json says, the tokens that end an answer, for one; without such a file, what config.json says of
    it, as transformers reads older models."""
    if (folder / GENERATION).is_file():
        require_generation_numbers(read_json(folder / GENERATION, name), GENERATION, name)
        return constructed(name, f"invalid {GENERATION}", lambda: GenerationConfig.from_pretrained(str(folder)))
    older = {"config_file_name": CONFIG, "_from_model_config": True}
    return constructed(name, UNBUILDABLE, lambda: GenerationConfig.from_pretrained(str(folder), **older))


def place(name: str) -> str:
    """Expands `~`, which transformers would take for part of a hub name."""
    return str(folder_of(name) or name)


def constructed(name: str, what: str, construct: Callable[[], T]) -> T:
    """Builds a transformers object from a file; on failure raises `what` with the first line of the error as the reason."""
    try:
        return construct()
    except UNREADABLE as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise _told(name, error, what) from error


def guarded(name: str, load: Callable[[], T]) -> T:
    """Converts transformers' errors that a user can cause to ours."""
    try:
        return load()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _told(name, error, "cannot load the model") from error


def _told(name: str, error: BaseException, what: str) -> ModelError:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return ModelError(
            what="this model needs code from its repository",
            where=name,
            why="Pronghorn does not run code from model repositories",
            fix="use a model type that transformers supports without remote code",
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, StrictDataclassError) and len(lines) > 1:
        first = " ".join(lines[:2])  # which field, then what is wrong with it
    elif isinstance(error, ArithmeticError | AssertionError | AttributeError | LookupError | TypeError):
        first = f"{type(error).__name__}: {first}"
    fix = "check the name; without network access, the model must be a folder or already in the Hub cache"
    if folder_of(name):
        fix = "download the folder's files again; or use a causal language model that the installed transformers supports"
    return ModelError(what=what, where=name, why=first[:300], fix=fix)


def stays_wide(model: HFModel, name: str) -> bool:
    """Whether this parameter or buffer stays in float32 whatever the model's dtype, as transformers loads it: the bias of a
    router's choice, for one, whose steps of 0.001 bf16 would lose beside a value near 1."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){part}($|\.)", name) for part in kept)
