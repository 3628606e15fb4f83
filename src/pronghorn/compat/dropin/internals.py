"""Internals of the other library that scripts import by name, where they have a meaning here."""

from __future__ import annotations

from typing import Any

from pronghorn.compat.dropin.training import set_embedding_rate
from pronghorn.data.encode.tokens import load_tokenizer
from pronghorn.hf_types import HFModel


def load_correct_tokenizer(tokenizer_name: str, **_: object) -> Any:
    """A tokenizer as `from_pretrained` gives it, which loads the right one by itself."""
    return load_tokenizer(str(tokenizer_name))


def _create_unsloth_optimizer(
    model: HFModel, optimizer_cls: Any, optimizer_kwargs: dict[str, Any], embedding_lr: float = 5e-5
) -> Any:
    """An optimizer of what trains, with a learning rate of their own for embeddings and head."""
    optimizer = optimizer_cls([p for p in model.parameters() if p.requires_grad], **optimizer_kwargs)
    set_embedding_rate(optimizer, model, embedding_lr)
    return optimizer
