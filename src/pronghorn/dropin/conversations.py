"""Data sets of conversations brought into one form: messages with role and content."""

from __future__ import annotations

from typing import Any


def standardize_sharegpt(dataset: Any, **options: Any) -> Any:
    raise NotImplementedError


def standardize_data_formats(dataset: Any, **options: Any) -> Any:
    raise NotImplementedError


def to_sharegpt(dataset: Any, **options: Any) -> Any:
    raise NotImplementedError


def apply_chat_template(dataset: Any, tokenizer: Any, **options: Any) -> Any:
    raise NotImplementedError
