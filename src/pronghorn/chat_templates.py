"""Conversations for training: templates by name, data sets brought into one form, labels on answers only."""

from pronghorn.compat.dropin.conversations import (
    CHAT_TEMPLATES,
    apply_chat_template,
    get_chat_template,
    standardize_data_formats,
    standardize_sharegpt,
    to_sharegpt,
)
from pronghorn.compat.dropin.responses import train_on_responses_only

__all__ = [
    "CHAT_TEMPLATES",
    "apply_chat_template",
    "get_chat_template",
    "standardize_data_formats",
    "standardize_sharegpt",
    "to_sharegpt",
    "train_on_responses_only",
]
