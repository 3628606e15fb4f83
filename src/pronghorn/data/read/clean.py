"""Rows that teach nothing new, or nothing good: exact copies and junk. Near copies: copies.py.

Works on examples, before tokens, so what it finds does not depend on the model. It only finds; the recipe decides.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import numpy as np

from pronghorn.data.read.formats import Example

BATCH = 1000  # examples that are looked at together
IDENTITY = 16  # bytes

# How many times smaller an answer may become under zlib. The most in 49,430 real answers (mathematics, chat in many
# languages, code, song texts) was 5.2, in a hundred lines `x7 = 0` 5.9; one sentence said 20 times reaches 15, `no` said
# 1,000 times 100. Twice what real data reaches, so that nothing ordinary is lost.
MOST_REPETITION = 10.0
LEAST_LENGTH = 200  # bytes; a shorter "hahaha" is an answer


def copies_of(identities: bytes | bytearray) -> dict[int, int]:
    """Index of every copy -> index of the first, by the examples' identities one after the other: 16 bytes a row, where a
    dictionary takes 200."""
    found = np.frombuffer(identities, dtype=[("high", "<u8"), ("low", "<u8")])
    order = np.lexsort((np.arange(len(found)), found["low"], found["high"]))
    same = found[order[1:]] == found[order[:-1]] if len(found) > 1 else np.zeros(0, np.bool_)
    copies: dict[int, int] = {}
    for at in np.flatnonzero(same):
        before, index = int(order[at]), int(order[at + 1])
        copies[index] = copies.get(before, before)
    return dict(sorted(copies.items()))


def identity(example: Example) -> bytes:
    parts = [
        example.kind,
        example.messages,
        example.tools,
        example.prompt,
        example.completion,
        example.text,
        example.prompt_messages,
        *([example.columns] if example.asks else []),
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=IDENTITY).digest()


def said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return (message["content"] or "") + (json.dumps(calls, sort_keys=True, default=str) if calls else "")


def junk(example: Example) -> str | None:
    """Why this example should not be trained on, or None."""
    if example.asks:
        return None
    pairs = _answers(example)
    if says_nothing(example):
        return "empty text" if example.kind == "text" else "empty answer"
    # In a longer talk an echo ("Bye!" - "Bye!") is ordinary, so all answers must be echoes.
    if all(_plain(prompt) == _plain(answer) for prompt, answer in pairs):
        return "answer equal to the prompt"
    if any(repetition(answer) > MOST_REPETITION for _, answer in pairs):
        return "absurd repetition"
    return None


def says_nothing(example: Example) -> bool:
    """Whether an answer is empty: the model would learn to end its turn at once."""
    return any(not answer.strip() for _, answer in _answers(example))


def _answers(example: Example) -> list[tuple[str, str]]:
    """What was said before, and the answer to it, for every answer that carries loss."""
    if example.kind == "text":
        return [("", example.text)]
    if example.kind == "completion":
        return [(example.prompt, example.completion)]
    before = ("", *(said(message) for message in example.messages))
    return [
        (before[i], said(message))
        for i, message in enumerate(example.messages)
        if message["role"] == "assistant" and i >= example.prompt_messages
    ]


def last_answer(example: Example) -> int | None:
    """Which message of a chat is the last answer; None: there is none."""
    if example.asks:
        return example.prompt_messages
    return next((i for i in range(len(example.messages) - 1, 0, -1) if example.messages[i].get("role") == "assistant"), None)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def repetition(text: str) -> float:
    """How many times smaller the text becomes when zlib says each repeated thing once; 1.0 for short texts."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if len(data) >= LEAST_LENGTH else 1.0
