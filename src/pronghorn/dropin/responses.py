"""`train_on_responses_only`, as scripts call it."""

from __future__ import annotations

from typing import Any

from pronghorn.data import responses
from pronghorn.kernels.runtime.dispatch import say_once


def train_on_responses_only(
    trainer: Any = None,
    instruction_part: str | None = None,
    response_part: str | None = None,
    force_match: bool = True,
    tokenizer: Any = None,
    return_function: bool = False,
    num_proc: int | None = None,
    last_response_only: bool = False,
) -> Any:
    """The trainer, with labels on answers only. Without the two parts they are derived from the chat template; rows without an
    answer are left out, and that is said. The rest as in data/responses.py."""
    return responses.train_on_responses_only(
        trainer,
        instruction_part,
        response_part,
        force_match,
        tokenizer,
        return_function,
        num_proc,
        last_response_only,
        say_once,
    )
