"""The same conversation in other words: templates differ in what they call reasoning, and in how they want a call.

A conversation is rendered as it stands. Only where the template raises, or leaves part of it out, other spellings are tried;
the first one that loses nothing is used, and it says the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pronghorn.data.template.marks import REASONING, Message, Tools

# What templates call the switch for thinking, and the one for keeping the thoughts of earlier turns.
THINKING = {"enable_thinking": True, "thinking": True}
KEPT = THINKING | {
    "clear_thinking": False,
    "drop_thinking": False,
    "truncate_history_thinking": False,
    "preserve_thinking": True,
    "preserved_thinking": True,
}


@dataclass(frozen=True)
class Spelling:
    messages: list[Message]
    tools: Tools
    options: dict[str, Any] = field(default_factory=dict)  # variables of the template
    name: tuple[int, int] = (0, 0)


def kind(messages: Sequence[Message]) -> tuple[bool, bool, bool]:
    """What decides which spellings there are: reasoning, calls, and calls without a text beside them."""
    speaking = [message for message in messages if message.get("role") == "assistant"]
    calling = [message for message in speaking if message.get("tool_calls")]
    return (
        any(message.get(key) for message in speaking for key in REASONING),
        bool(calling),
        any(not message.get("content") for message in calling),
    )


def spellings(messages: Sequence[Message], tools: Tools) -> Iterator[Spelling]:
    reasons, calls, silent = kind(messages)
    ways_to_think = range(5 if reasons else 1)
    ways_to_call = [0, *([1] if silent else []), *([2] if calls else []), *([3] if silent else [])]
    order = sorted(((think, call) for think in ways_to_think for call in ways_to_call), key=lambda way: (sum(way), way))
    for think, call in order:
        yield spelling(messages, tools, (think, call))


def spelling(messages: Sequence[Message], tools: Tools, name: tuple[int, int]) -> Spelling:
    think, call = name
    said = [_called(_thought(message, think), call) for message in messages]
    return Spelling(said, tools, [{}, {}, THINKING, KEPT, {}][think], name)


def _thought(message: Message, way: int) -> Message:
    """0: as it is; 1 to 3: under every name (2 and 3: with the template's switches); 4: as a part of the content."""
    given = next((message[key] for key in REASONING if isinstance(message.get(key), str) and message[key]), None)
    if way == 0 or given is None or message.get("role") != "assistant":
        return message
    rest = {key: item for key, item in message.items() if key not in REASONING}
    if way < 4:
        return rest | dict.fromkeys(REASONING, given)
    parts = [{"type": "thinking", "thinking": given}]
    return rest | {"content": parts + ([{"type": "text", "text": message["content"]}] if message.get("content") else [])}


def _called(message: Message, way: int) -> Message:
    """Content None beside a call is "" at first: of the templates that matter some fail on None, some write the word None.
    1: None; 2: arguments as JSON text; 3: both."""
    calls = message.get("tool_calls")
    empty = message.get("content") in (None, "")
    if way in (0, 2) or not calls or not empty:
        message = message if message.get("content") is not None else message | {"content": ""}
    else:
        message = message | {"content": None}
    return message | {"tool_calls": [_as_text(call) for call in calls]} if calls and way >= 2 else message


def _as_text(call: Message) -> Message:
    called = call.get("function") or call
    if isinstance(called.get("arguments"), str) or "arguments" not in called:
        return call
    changed = called | {"arguments": json.dumps(called["arguments"], ensure_ascii=False)}
    return call | {"function": changed} if "function" in call else changed
