"""One message, however a file writes it: the form that templates know, with nothing of it lost, or a reason and a fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronghorn.data.chat_messages import SPEAKERS, UnfitError, objects, to_message, to_tools
from tables import table

ARGUMENTS = {"city": "Oslo", "days": 2}
FUNCTION = {"name": "weather", "arguments": ARGUMENTS}
CALL = {"type": "function", "function": FUNCTION}

READ = ("role", "from", "content", "value", "tool_calls", "function_call", "weight", "train", "training", "train_detail")


def unfit(message: dict[str, Any]) -> str:
    with pytest.raises(UnfitError) as caught:
        to_message(message, 3)
    assert str(caught.value).startswith("message 3")
    assert caught.value.fix
    return str(caught.value)


@table(
    ("word", "role"),
    [
        ("Human", "user"),
        ("GPT", "assistant"),
        (" Assistant ", "assistant"),
        ("SYSTEM", "system"),
        ("prompter", "user"),
        ("function", "tool"),
        ("Observation", "tool"),
        ("developer", "developer"),
        ("ipython", "ipython"),
        ("Chatbot", "assistant"),
    ],
)
@table("keys", [("role", "content"), ("from", "value"), ("role", "value"), ("from", "content"), ("role", "text")])
def test_who_speaks_in_any_spelling(word: str, role: str, keys: tuple[str, str]) -> None:
    assert to_message({keys[0]: word, keys[1]: "hi"}, 1) == {"role": role, "content": "hi"}


@given(
    st.sampled_from(sorted(SPEAKERS)),
    st.text(),
    st.dictionaries(st.text().filter(lambda key: key not in READ), st.text() | st.integers()),
)
def test_nothing_of_a_message_is_lost_or_changed(who: str, said: str, more: dict[str, Any]) -> None:
    made = to_message({"from": who, "value": said, **more}, 1)
    assert made == more | {"role": SPEAKERS[who], "content": said}


@table(
    "call",
    [
        CALL,
        FUNCTION,
        {"function": FUNCTION},
        {"function": FUNCTION | {"arguments": json.dumps(ARGUMENTS)}},
        {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
        {"name": "weather", "parameters": ARGUMENTS},
    ],
)
@table("way", ["tool_calls", "as text", "function_call", "spoken", "spoken list"])
def test_a_call_has_one_form(call: dict[str, Any], way: str) -> None:
    messages = {
        "tool_calls": {"role": "assistant", "content": None, "tool_calls": [call]},
        "as text": {"role": "assistant", "tool_calls": json.dumps([call])},
        "function_call": {"role": "assistant", "content": None, "function_call": call},
        "spoken": {"from": "function_call", "value": json.dumps(call)},
        "spoken list": {"from": "tool_call", "value": json.dumps([call])},
    }
    assert to_message(messages[way], 1) == {"role": "assistant", "content": None, "tool_calls": [CALL]}


def test_what_stands_beside_a_call_stays() -> None:
    calls = [CALL | {"id": "a1", "index": 0}, {"id": "a2", "type": "function", "name": "weather", "arguments": "{}"}]
    made = to_message({"role": "assistant", "content": "so:", "tool_calls": calls, "name": "bot"}, 1)
    assert made["tool_calls"] == [calls[0], {"id": "a2", "type": "function", "function": {"name": "weather", "arguments": {}}}]
    assert (made["content"], made["name"]) == ("so:", "bot")
    for nothing in ([], "", None):
        made = to_message({"role": "assistant", "content": "a", "tool_calls": nothing}, 1)
        assert made == {"role": "assistant", "content": "a"}


@table(
    ("message", "why"),
    [
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x=1"}}]}, "not a JSON object: x=1"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}, "not a JSON object: []"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]},
            "not a JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "without a name"),
        ({"role": "assistant", "tool_calls": "f()"}, "`tool_calls` is not a list"),
        ({"role": "assistant", "tool_calls": CALL}, "`tool_calls` is not a list"),
        ({"role": "assistant", "function_call": "auto"}, "`function_call` is not an object"),
        ({"role": "assistant", "tool_calls": [CALL], "function_call": FUNCTION}, "both `tool_calls` and `function_call`"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "(user) calls a tool"),
        ({"role": "user", "from": "gpt", "content": "a"}, "two roles"),
        ({"role": "user", "content": "a", "value": "b"}, "they differ"),
        ({"role": "user", "content": {"text": "a"}}, "not text"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]}, "after its"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "part without text"),
        (
            {"role": "assistant", "reasoning_content": "c", "content": [{"type": "thinking", "thinking": "b"}]},
            "a different text",
        ),
        ({"role": "user", "content": [{"type": "tool_result", "content": "2"}]}, "a part of type `tool_result`"),
        ({"role": "assistant", "content": "a", "train_detail": []}, "`train_detail`"),
    ],
)
def test_what_has_no_such_form_is_told_with_a_fix(message: dict[str, Any], why: str) -> None:
    assert why in unfit(message)


def test_thinking_in_parts() -> None:
    inner = [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]
    parts = {"type": "thinking", "thinking": "hm"}, {"type": "reasoning", "text": "hm"}, {"type": "thinking", "thinking": inner}
    for part in parts:
        made = to_message({"role": "assistant", "content": [part, {"type": "text", "text": "ho"}]}, 1)
        assert made == {"role": "assistant", "content": "ho", "reasoning_content": "hm"}


def test_tools_have_one_form() -> None:
    plain = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": plain}
    texts = [json.dumps(tool)], json.dumps([plain]), [plain | {"parameters": json.dumps(plain["parameters"])}]
    for given_ in ([tool], [plain], *texts):
        assert to_tools(given_, "tools") == (tool,)
    assert to_tools(" [] ", "tools") is None
    for wrong in ("f", 3, ["f"], [plain | {"parameters": "x"}]):
        with pytest.raises(UnfitError):
            to_tools(wrong, "tools")


def test_an_object_of_lists_is_a_list_of_objects() -> None:
    found = objects({"role": ["a", "b"], "content": ["c", "d"]}, "x")
    assert found == [{"role": "a", "content": "c"}, {"role": "b", "content": "d"}]
    with pytest.raises(UnfitError):
        objects({"role": ["a", "b"], "content": ["c"]}, "x")
