"""Pronghorn fine-tunes language models. Importing it imports nothing heavy and changes nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pronghorn.chat_templates import (
        apply_chat_template,
        get_chat_template,
        standardize_data_formats,
        standardize_sharegpt,
        to_sharegpt,
        train_on_responses_only,
    )
    from pronghorn.compat.dropin.language_model import FastLanguageModel, FastModel, is_bf16_supported, is_bfloat16_supported
    from pronghorn.recipe import Recipe
    from pronghorn.trainer import PatchDPOTrainer

__version__ = "0.1.0"
_HOMES = {
    "recipe": ("Recipe",),
    "compat.dropin.language_model": (
        "FastLanguageModel", "FastModel", "FastLlamaModel", "FastMistralModel", "FastGemmaModel", "FastGemma2Model",
        "FastQwen2Model", "FastQwen3Model", "FastQwen3MoeModel", "FastVisionModel", "is_bf16_supported",
        "is_bfloat16_supported",
    ),
    "chat_templates": (
        "apply_chat_template", "get_chat_template", "standardize_data_formats", "standardize_sharegpt", "to_sharegpt",
        "train_on_responses_only",
    ),
    "trainer": (
        "PatchDPOTrainer", "PatchFastRL", "PatchKTOTrainer", "PronghornTrainer", "PronghornTrainingArguments", "UnslothTrainer",
        "UnslothTrainingArguments", "UnslothVisionDataCollator", "unsloth_train",
    ),
    "compat.dropin.absent": (
        "FastSentenceTransformer", "add_new_tokens", "is_port_open", "launch_openenv",
    ),
    "compat.dropin.generated_code": ("check_python_modules", "create_locked_down_function", "execute_with_time_limit"),
    "compat.dropin.sampling_params": ("SamplingParams",),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [  # what needs no TRL
    "FastLanguageModel", "FastModel", "PatchDPOTrainer", "Recipe",
    "apply_chat_template", "get_chat_template", "is_bf16_supported", "is_bfloat16_supported", "standardize_data_formats",
    "standardize_sharegpt", "to_sharegpt", "train_on_responses_only",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'pronghorn' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pronghorn.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


def load_ipython_extension(shell: object) -> None:
    """`%load_ext pronghorn`"""
    from pronghorn.compat.scripts.notebooks import load

    load(shell)


def unload_ipython_extension(shell: object) -> None:
    from pronghorn.compat.scripts.notebooks import unload

    unload(shell)
