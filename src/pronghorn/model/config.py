"""A model's config by name or folder: all that a plan needs, so neither weights nor what loads them has to be there."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from pronghorn.errors import ModelError
from pronghorn.folders import folder_of


def read_config(name: str) -> Any:
    """Hugging Face's config object. No code from the model's folder is ever run."""
    return guarded(name, lambda: AutoConfig.from_pretrained(place(name), trust_remote_code=False))


def place(name: str) -> str:
    """`~` opened, which transformers would take for part of a hub name."""
    return str(folder_of(name) or name)


def guarded(name: str, load: Any) -> Any:
    """transformers' own words for what a user can cause, in our form."""
    try:
        return load()
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        text = str(error)
        if "trust_remote_code" in text:
            raise ModelError(what="this model wants to run code from its own repository", where=name,
                             why="no file can make Pronghorn run code",
                             fix="use a model type that transformers has itself") from error
        first = text.strip().splitlines()[0] if text.strip() else type(error).__name__
        fix = "check the name; without a network, the model must be a folder or already in the hub cache"
        if folder_of(name):
            fix = "get the folder's files again, all of them; or use a causal language model that this transformers knows"
        raise ModelError(what="cannot load the model", where=name, why=first[:300], fix=fix) from error
