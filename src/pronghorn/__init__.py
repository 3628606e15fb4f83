"""Pronghorn fine-tunes language models. Importing it imports nothing heavy and changes nothing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pronghorn.api import FastLanguageModel, get_chat_template, is_bfloat16_supported, train_on_responses_only
    from pronghorn.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["FastLanguageModel", "Recipe", "get_chat_template", "is_bfloat16_supported", "train_on_responses_only"]

_HOMES = {
    "FastLanguageModel": "api", "get_chat_template": "api", "is_bfloat16_supported": "api",
    "train_on_responses_only": "api", "Recipe": "recipe",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pronghorn' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pronghorn.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
