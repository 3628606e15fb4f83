"""The heads, by name: every file in this folder has one, as `HEAD` (head.py)."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pronghorn.errors import ModelError
from pronghorn.hf_types import HFConfig
from pronghorn.model.head import Head
from pronghorn.recipe_objective import KINDS

HEADS: dict[str, type[Head]] = {one.name: import_module(f"{__name__}.{one.name}").HEAD for one in iter_modules(__path__)}
WHOLE = frozenset(weight.split(".")[0] for head in HEADS.values() for weight in head.weights)  # modules


def head_in(config: HFConfig) -> type[Head]:
    """The head that a model has, as its config names its class; without a word, the LM head."""
    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    return next((head for head in HEADS.values() if any(map(head.fits, names))), HEADS["lm"])


def auto_class(config: HFConfig) -> Any:
    """transformers' class that loads the whole model."""
    return head_in(config).auto_class(config)


def require_head(config: HFConfig, name: str, asked: str) -> None:
    """Whether the model has the head that is asked for, or can get it."""
    there, head = head_in(config), HEADS[asked]
    if there is not head and not there.generates:
        objectives = [objective for objective, kind in KINDS.items() if kind.head == there.name]
        raise ModelError(
            what=f"the model has the head of {there.title}, which gives {there.gives}",
            where=name,
            why="it has no LM head, so it predicts no tokens",
            fix=f"use the language model it was made from; to continue training it, set objective: {' or '.join(objectives)}",
        )
    head.require(config, name)
