"""One message, however a file writes it: the form that templates know, with nothing of it lost, or a reason and a fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronghorn.data.template.chat_messages import (
    CONTENT_KEYS,
    LIKE_A_MARK,
    REASONING,
    SPEAKERS,
    UnfitError,
    media_name,
    only_read,
    to_message,
    to_tools,
)
from tables import table

ARGUMENTS = {"city": "Oslo", "days": 2}
FUNCTION = {"name": "weather", "arguments": ARGUMENTS}
CALL = {"type": "function", "function": FUNCTION}

READ = ("role", "from", *CONTENT_KEYS, "tool_calls", "function_call", *REASONING)


def says_nothing(key: str) -> bool:
    return key not in READ and not LIKE_A_MARK.search(key) and not media_name(key) and key != "training"


def unfit(message: dict[str, Any]) -> str:
    with pytest.raises(UnfitError) as caught:
        to_message(message, 3)
    assert str(caught.value).startswith("message 3")
    assert caught.value.fix
    return str(caught.value)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(sorted(SPEAKERS)), st.text(), st.dictionaries(st.text().filter(says_nothing), st.text() | st.integers()))
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
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}]},
            "not a JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "without a name"),
        ({"role": "assistant", "tool_calls": CALL}, "`tool_calls` is not a list"),
        ({"role": "assistant", "function_call": "auto"}, "`function_call` is not an object"),
        ({"role": "user", "from": "gpt", "content": "a"}, "two roles"),
        ({"role": "user", "content": "a", "value": "b"}, "they differ"),
        ({"role": "user", "content": "a", "text": "b"}, "`content` and `text`, and they differ"),
        ({"role": "user", "content": {"text": "a"}}, "not text"),
        ({"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]}, "after its"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "part without text"),
        (
            {"role": "assistant", "reasoning_content": "c", "content": [{"type": "thinking", "thinking": "b"}]},
            "a different text",
        ),
        ({"role": "assistant", "content": "a", "train_detail": []}, "`train_detail`"),
    ],
)
def test_what_has_no_such_form_is_told_with_a_fix(message: dict[str, Any], why: str) -> None:
    assert why in unfit(message)


@table(
    ("mark", "read"),
    [
        ({"weight": 1}, False),
        ({"loss_weight": 1}, False),
        ({"trainable": False}, True),
        ({"masked": False}, False),
        ({"mask": True}, True),
        ({"loss": None, "masked": None}, False),
        ({"weight": 0, "loss": False, "masked": True}, True),
    ],
)
def test_a_message_says_whether_it_carries_loss(mark: dict[str, Any], read: bool) -> None:
    assert only_read(to_message({"role": "assistant", "content": "a", **mark}, 1)) is read


@table(
    ("more", "why", "fix"),
    [
        ({"loss": "no"}, "has `loss` 'no'", "true or false"),
        ({"mask": 1}, "has `mask` 1", "true or false"),
        ({"weight": [0]}, "has the weight [0]", "0 or 1"),
        ({"masked": "yes"}, "has `masked` 'yes'", "true or false"),
        ({"train": True, "masked": True}, "contradicts itself", "keep one"),
        ({"loss_mask": [0, 1]}, "unknown key `loss_mask`", "data.message_fields: {train: loss_mask}"),
        ({"train_on_turn": False}, "unknown key `train_on_turn`", "{masked: train_on_turn}"),
        ({"thinking": ["b"]}, "`thinking` is not text", "as a text"),
        ({"audio": {"data": "x"}}, "has `audio`", "or the row"),
        ({"role": ""}, "has an empty `role`", "system, user, assistant or tool"),
    ],
)
def test_what_could_change_training_is_never_ignored(more: dict[str, Any], why: str, fix: str) -> None:
    with pytest.raises(UnfitError) as caught:
        to_message({"role": "assistant", "content": "a", **more}, 3)
    assert why in str(caught.value)
    assert fix in caught.value.fix


def test_a_text_beside_a_content_that_is_null_is_what_is_said() -> None:
    """As Arrow fills in the keys of other messages."""
    assert to_message({"role": "user", "content": None, "text": "a", "value": None}, 1) == {"role": "user", "content": "a"}
    assert to_message({"role": "user", "content": "a", "text": "a"}, 1) == {"role": "user", "content": "a"}


def test_tools_have_one_form() -> None:
    plain = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": plain}
    texts = [json.dumps(tool)], json.dumps([plain]), [plain | {"parameters": json.dumps(plain["parameters"])}]
    for given_ in ([tool], [plain], *texts):
        assert to_tools(given_, "tools") == (tool,)
    assert to_tools(" [] ", "tools") is None
    assert to_tools([{"name": "f", "input_schema": plain["parameters"]}], "tools") == (tool,)  # Anthropic's
    assert to_tools([{"functionDeclarations": [plain, plain]}], "tools") == (tool, tool)  # Gemini's


@table(
    "wrong",
    [
        "f",
        3,
        ["f"],
        [3],
        [[{"name": "f"}]],
        [{"name": "f", "parameters": "x"}],
        [{"name": "f", "parameters": [5]}],
        [{"type": "function", "function": "x"}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": 5}}],
        [{"type": "function", "function": [{"name": "f"}]}],
        [{"type": "function"}],
        [{"name": ""}],
        [{"functionDeclarations": "f"}],
        {"a": 1},
    ],
)
def test_tools_that_are_none_are_told_with_a_fix(wrong: Any) -> None:
    with pytest.raises(UnfitError) as caught:
        to_tools(wrong, "tools")
    assert str(caught.value).startswith("`tools`")
    assert "write" in caught.value.fix
