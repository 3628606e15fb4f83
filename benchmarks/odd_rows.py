"""Rows whose texts are white space, tags, empty or odd, in every place of a conversation: generated, and judged.

A row is a conversation of `template_oracle.py` with an odd text in one place or two: instead of a word, before it, behind it,
on both sides of it, or between two. `PLACES` × `WAYS` is gone through in order, text and conversation are random (seeded by the
template's name). What is expected comes from the conversation with words, its twin: a border stays where it is in the text that
surrounds the odd one.

Nothing of pronghorn is imported here; tests hold that.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.template_oracle import (
    WORD,
    Answer,
    Chat,
    Facts,
    Message,
    Refusal,
    Render,
    Under,
    Verdict,
    alike,
    chats,
    says_nothing,
    wrong_row,
)

SEED = 20261118
SPACES = (" ", "\n", "\n\n", "  \n ", "\t", "\r\n", "\xa0", "\u3000", "\u2028", "\x85", "\x1f", "\u200b", "\ufeff")
TAGS = (
    "<think>", "</think>", "<think></think>", "<think>\n\n</think>\n\n", "<think>so</think>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<b>", "</s", "[/INST", "<|", "|>", "<|no|>", "<!--", "</",
)  # fmt: skip
PRIVATE = (
    "\ue000", "\uf8ff", "\U000f0000", "\U000f0001\U000f0000", "\U000f0005", "\U000ffffc\U000ffffd", "\U00100000", "\U0010fffd",
)  # fmt: skip
WORDS = (
    "None", "null", "{}", "[]", "0", "False", "user", "assistant\n", "User:", "Assistant:", "### ", "```", '"', "'", "\\",
    "\\n", "{{ 7 }}", "{% raw %}", "{#", "&lt;", "\u6c34", "\U0001f9a6", "e\u0301", "]", "[", "}", ": ",
)  # fmt: skip
WAYS: dict[str, Callable[[str, str], str]] = {
    "whole": lambda word, odd: odd,
    "begins": lambda word, odd: odd + word,
    "ends": lambda word, odd: word + odd,
    "around": lambda word, odd: odd + word + odd,
    "between": lambda word, odd: f"{word}{odd}so",
}


def _content(role: str, *, calls: bool | None = None, last: bool | None = None) -> Callable[[list[Message]], Iterator[str]]:
    def find(messages: list[Message]) -> Iterator[str]:
        for i, message in enumerate(messages):
            fits = message["role"] == role and calls in (None, bool(message.get("tool_calls")))
            if fits and last in (None, i == len(messages) - 1) and WORD.fullmatch(message["content"] or ""):
                yield message["content"]

    return find


def _arguments(messages: list[Message]) -> Iterator[str]:
    for message in messages:
        yield from WORD.findall(json.dumps([call["function"]["arguments"] for call in message.get("tool_calls") or []]))


def _reasoning(messages: list[Message]) -> Iterator[str]:
    yield from (message[key] for message in messages for key in ("reasoning_content", "thinking") if message.get(key))


PLACES: dict[str, Callable[[list[Message]], Iterator[str]]] = {
    "user": _content("user"),
    "system": _content("system"),
    "answer inside": _content("assistant", calls=False, last=False),
    "last answer": _content("assistant", calls=False, last=True),
    "text beside a call": _content("assistant", calls=True),
    "result": _content("tool"),
    "argument": _arguments,
    "reasoning": _reasoning,
}


def odd_chats(
    name: str, count: int, controls: Sequence[str], usable: Callable[[Chat], bool], seed: int = SEED
) -> Iterator[Chat]:
    """So many rows for the template of this name; `usable`: whether it can write the conversation at all."""
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    kinds = [chat for chat in chats() if not chat.contents and usable(chat)]
    texts = [("",), SPACES, TAGS, PRIVATE, WORDS, *([tuple(controls)] if controls else [])]

    def some(choices: Sequence[Any]) -> Any:
        return choices[int(random.integers(len(choices)))]

    steps = itertools.cycle(itertools.product(PLACES, WAYS))
    for number in range(count):
        place, way = next(steps)
        found = [(chat, word) for chat in kinds for word in PLACES[place](chat.messages)]
        while not found:
            place = some(list(PLACES))
            found = [(chat, word) for chat in kinds for word in PLACES[place](chat.messages)]
        chat, word = some(found)
        contents = {word: WAYS[way](word, some(some(texts if way == "whole" else texts[1:])))}
        if number % 4 == 3:  # and one more
            others = [other for find in PLACES.values() for other in find(chat.messages) if other != word]
            if others:
                contents[some(others)] = some(some(texts))
        yield replace(chat, kind=f"odd {number}: {place} {way}: {chat.kind}", contents=contents, plain=False)


# The judge -------------------------------------------------------------------------------------------------------------


def judge_odd(chat: Chat, facts: Facts, render: Render, under: Under) -> Verdict:
    """Whether what `under` says of this row is right; its twin must have been found exact before."""
    row = under(chat.row, chat.tools)
    if isinstance(row, Refusal):
        why = (
            _missing(chat, render) or says_nothing(chat.row, row.reason) or facts.cannot.get(chat.kind.rpartition(": ")[2], "")
        )
        return Verdict("refused", f"{why}. Said: {row.reason}") if why else Verdict("refused without need", row.reason)
    twin = under(chat.messages, chat.tools)
    if isinstance(twin, Refusal):
        return Verdict("wrong", f"the twin is refused: {twin.reason}")
    return verdict(chat, facts, twin, row, render, under)


def verdict(chat: Chat, facts: Facts, twin: Answer, row: Answer, render: Render, under: Under) -> Verdict:
    wrong = wrong_row(chat, facts, twin, row)
    if wrong and len(chat.contents) > 1:  # one text after the other
        first = replace(chat, contents=dict(list(chat.contents.items())[:1]))
        between = under(first.row, chat.tools)
        if isinstance(between, Answer) and not wrong_row(first, facts, twin, between, taken_apart=True):
            rest = dict(list(chat.contents.items())[1:])
            wrong = wrong_row(replace(first, contents=rest), facts, between, row, taken_apart=True)
    elif wrong:
        wrong = wrong_row(chat, facts, twin, row, taken_apart=True)
    return Verdict("wrong", "; ".join(wrong)) if wrong else Verdict("exact")


def _missing(chat: Chat, render: Render) -> str:
    """Why plain transformers does not write all of this row; "" when it does."""
    try:
        text, twin = render(chat.row, chat.tools), render(chat.messages, chat.tools)
    except Exception as error:  # noqa: BLE001 - whatever a template raises is its answer
        return f"the template says {type(error).__name__}: {str(error)[:120]}"
    begin = alike(text, twin)
    end = min(alike(text[::-1], twin[::-1]), len(text) - begin)
    written = text[max(0, begin - 40) : len(text) - end + 40]
    spoken = "".join(str(message) for message in chat.messages if message["role"] == "assistant")
    for word, content in chat.contents.items():
        pieces = re.split(r"</?think>", content) if word in spoken else [content]  # of an answer, tags may be taken off
        for piece in filter(None, map(str.strip, pieces)):
            forms = (piece, *(json.dumps(piece, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)))
            if not any(form in written for form in forms):
                return "the template leaves out or rewrites a text"
    return ""
