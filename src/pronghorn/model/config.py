"""A model's config by name or folder: all that a plan needs, so no weights have to be there."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from pronghorn.model.load import _guarded, _place


def read_config(name: str) -> Any:
    """Hugging Face's config object. No code from the model's folder is ever run."""
    return _guarded(name, lambda: AutoConfig.from_pretrained(_place(name), trust_remote_code=False))
