"""`get_chat_template`, as scripts call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pronghorn.data.named_templates import TEMPLATES
from pronghorn.data.template_by_name import with_template
from pronghorn.kernels.runtime.dispatch import say_once

# As (template, end of turn), for scripts that look a name up.
CHAT_TEMPLATES = {name: (row.template, row.end_of_turn or "eos_token") for name, row in TEMPLATES.items() if row.body}


def get_chat_template(
    tokenizer: Any,
    chat_template: str | tuple[str, str] = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> Any:
    """A copy of the tokenizer with this template; `map_eos_token` makes the format's end of turn its end token, and the
    tokenizer's end token the end of turn where it has no other. The rest as in `with_template`."""
    return with_template(tokenizer, chat_template, mapping, map_eos_token, system_message, say_once)
