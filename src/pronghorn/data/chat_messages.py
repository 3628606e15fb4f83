"""One message of a conversation, however a file writes it, brought to the form that chat templates know.

`role` and `content`, with `tool_calls` as {"type": "function", "function": {"name", "arguments"}} whose arguments are an
object, and `tools` likewise. Read are also ShareGPT's `from` and `value`, other spellings of who speaks (`Human`, `GPT`),
OpenAI's arguments as JSON text, its older `function_call` and role `function`, calls without their wrapping, and thinking in
parts. What a message says is never changed; what cannot be brought to this form is an UnfitError, with what to do about it.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from pronghorn.data.json_rows import STRICT
from pronghorn.data.source_files import excerpt

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
SPEAKERS = {  # who speaks, in lower case, as data sets and the tools that read them write it
    **{role: role for role in ROLES},
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "claude": "assistant",
    "ai": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
CALLERS = ("function_call", "tool_call")  # speakers whose text is a call, as JSON
SPEAKERS_AND_CALLERS = {**SPEAKERS, **dict.fromkeys(CALLERS, "assistant")}
TRAIN_KEYS = ("train", "training")  # Axolotl's documentation writes the one, its default is the other
MARK_KEYS = ("weight", *TRAIN_KEYS)
PARTS_KEY = "train_detail"  # there, offsets within a turn
TEXT_PARTS = ("text", "input_text", "output_text")
THINKING_PARTS = ("thinking", "reasoning")
CALL_FORM = '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}'


class UnfitError(Exception):
    """Why a row does not fit, and what to do about it; becomes a BadRow."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(why)
        self.fix = fix


def only_read(message: dict[str, Any]) -> bool:
    """Whether the message itself says that it is not trained on."""
    return message.get("weight") == 0 or any(message.get(key) is False for key in TRAIN_KEYS)


def asks_to_train(message: dict[str, Any]) -> bool:
    """By `train: true`; a `weight` of 1 is what every message has."""
    return any(message.get(key) is True for key in TRAIN_KEYS)


def to_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    name = f"message {number}"
    speaker, role = _speaker(message, name)
    _require_marks(message, name)
    key, content = _content(message, name)
    thinking = ""
    if isinstance(content, list):
        content, thinking = _parts(content, name)
    if speaker in CALLERS and message.get("tool_calls") is None and message.get("function_call") is None:
        calls, content = _spoken_calls(content, name), None
    else:
        calls = _calls(message, name)
    if calls and role != "assistant":
        raise UnfitError(f"{name} ({role}) calls a tool", "only an assistant can call tools: fix the role, or remove the call")
    if not isinstance(content, str) and not (content is None and calls):
        if content is None:
            raise UnfitError(
                f"{name} ({role}) has no `content`", 'add a text ("" for none), a call in `tool_calls`, or remove the message'
            )
        raise UnfitError(f"{name} ({role}) has a `content` that is not text", "write it as text (an object as JSON text)")
    # Templates ask `'tool_calls' in message`, so a null that only fills a column must not stand there.
    taken = {"role", "from", "tool_calls", "function_call", key}
    made = {key: item for key, item in message.items() if item is not None and key not in taken}
    if thinking:
        if made.get("reasoning_content", thinking) != thinking:
            raise UnfitError(f"{name} has thinking parts and a different text in `reasoning_content`", "keep one of them")
        made["reasoning_content"] = thinking
    return {"role": role, "content": content} | made | ({"tool_calls": calls} if calls else {})


def _speaker(message: dict[str, Any], name: str) -> tuple[str, str]:
    """As the file writes it, in lower case, and the role."""
    word, other = message.get("role"), message.get("from")
    word, other = (other, None) if word is None else (word, other)
    if word is None:
        raise UnfitError(
            f"{name} has no `role`; its keys are {', '.join(message)}",
            "set the key names of a message: data.message_fields: {role: KEY, content: KEY}",
        )
    role = _role(word, name)
    if other is not None and _role(other, name) != role:
        raise UnfitError(f"{name} has two roles: `{word}` and `{other}`", "keep one of them")
    return word.strip().lower(), role


def _role(word: Any, name: str) -> str:
    known = SPEAKERS_AND_CALLERS
    plain = word.strip().lower() if isinstance(word, str) else ""
    if plain in known:
        return known[plain]
    close = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.7)
    hint = f"did you mean `{close[0]}`?" if close else f"known roles: {', '.join(ROLES)}, human and gpt"
    ours = known[close[0]] if close else "user"
    raise UnfitError(
        f"{name} has the role `{word}`; {hint}",
        f"fix it, or map it to system, user, assistant or tool: data.roles: {{{ours}: [{word}]}}",
    )


def _content(message: dict[str, Any], name: str) -> tuple[str, Any]:
    """The key that holds what is said, and that."""
    given = {key: message[key] for key in ("content", "value") if message.get(key) is not None}
    if len(given) > 1 and given["content"] != given["value"]:
        raise UnfitError(f"{name} has both `content` and `value`, and they differ", "keep one of them")
    if "content" not in message and "value" not in message:
        return "text", message.get("text")
    return next(iter(given.items()), ("content", None)) if len(given) < 2 else ("value", given["content"])


def _require_marks(message: dict[str, Any], name: str) -> None:
    """What the turn itself says about being trained on: `weight` 0 or 1, as in OpenAI's and Mistral's formats, or `train` or
    `training` false or true, as in Axolotl's."""
    marks = {key: message[key] for key in MARK_KEYS if message.get(key) is not None}
    if not marks and message.get(PARTS_KEY) is None:
        return
    if marks.get("weight", 1) not in (0, 1):
        raise UnfitError(f"{name} has the weight {marks['weight']!r}; a turn carries loss (1) or not (0)", "set it to 0 or 1")
    for key in TRAIN_KEYS:
        if not isinstance(marks.get(key, True), bool):
            raise UnfitError(
                f"{name} has `{key}` {marks[key]!r}; a turn carries loss (true) or not (false)", "set it to true or false"
            )
    if message.get(PARTS_KEY) is not None:
        raise UnfitError(
            f"{name} has `{PARTS_KEY}`; only whole turns can be marked, with `train`",
            f"remove `{PARTS_KEY}`, and mark whole turns with `train`",
        )
    if len({bool(mark) for mark in marks.values()}) > 1:
        raise UnfitError(
            f"{name} contradicts itself: " + ", ".join(f"`{key}` {mark!r}" for key, mark in marks.items()),
            "keep one of the marks",
        )


# Parts ----------------------------------------------------------------------------------------------------------------


def _parts(parts: list[Any], name: str) -> tuple[str, str]:
    """What the parts say, and what they think before that."""
    said: list[str] = []
    thought: list[str] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind in THINKING_PARTS:
            if said:
                raise UnfitError(f"{name} has thinking after its text", "put the thinking before the text, or remove it")
            thought.append(_thought(part, name))
        else:
            said.append(_part(part, name))
    return "".join(said), "".join(thought)


def _thought(part: dict[str, Any], name: str) -> str:
    inner = next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key) is not None), None)
    if isinstance(inner, list):  # Mistral's are text parts again
        return "".join(_part(one, name) for one in inner)
    if not isinstance(inner, str):
        raise UnfitError(f"{name} has a thinking part without text", 'write {"type": "thinking", "thinking": "..."}')
    return inner


def _part(part: Any, name: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        fix = {
            "tool_use": f"write the call as `tool_calls`: [{CALL_FORM}]",
            "tool_result": "write the result as a separate message with the role `tool`",
        }
        raise UnfitError(
            f"{name} has a part of type `{kind}`; Pronghorn trains on text only",
            fix.get(str(kind), "remove the part, or remove the row"),
        )
    return text


# Calls and tools ------------------------------------------------------------------------------------------------------


def _calls(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """`tool_calls`, or OpenAI's older `function_call`, which is one of them."""
    calls, older = _decoded(message.get("tool_calls")), _decoded(message.get("function_call"))
    if calls and older:
        raise UnfitError(f"{name} has both `tool_calls` and `function_call`", "keep `tool_calls`")
    if older is not None and not isinstance(older, dict):
        raise UnfitError(f"{name}: `function_call` is not an object", 'write {"name": "weather", "arguments": {...}}')
    calls = [older] if older else calls or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise UnfitError(f"{name}: `tool_calls` is not a list of objects", f"write [{CALL_FORM}]")
    return [_call(call, name) for call in calls]


def _decoded(value: Any) -> Any:
    """What a column that may hold JSON text says; None where it says nothing."""
    if not isinstance(value, str):
        return value or None
    decoded = from_json(value)
    return (value if decoded is None else decoded) if value.strip() else None


def _spoken_calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Of ShareGPT's `function_call`: one call as JSON text, or a list of them."""
    call = from_json(value) if isinstance(value, str) else None
    calls = call if isinstance(call, list) else [call]
    made = [_call(one, name) for one in calls if isinstance(one, dict) and ("name" in one or "function" in one)]
    if not made or len(made) < len(calls):
        raise UnfitError(
            f"{name} is a function call, but not JSON with `name` and `arguments`",
            'write {"name": "weather", "arguments": {"city": "Oslo"}} as its text',
        )
    return made


def _call(call: dict[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function") if call.get("function") is not None else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnfitError(f"{name} calls a function without a name", f"write {CALL_FORM}")
    given: Any = next((function[key] for key in ("arguments", "parameters") if function.get(key) is not None), {})
    arguments = given
    if isinstance(given, str):  # as OpenAI writes them; templates would write that text as a text, in quotes
        arguments = from_json(given) if given.strip() else {}
    if not isinstance(arguments, dict):
        raise UnfitError(
            f"{name}: the arguments of the call of `{function['name']}` are not a JSON object: {excerpt(str(given))}",
            'write them as an object, or as JSON text: {"city": "Oslo"}',
        )
    wrapping = call if function is not call else {key: item for key, item in call.items() if key in ("id", "type")}
    inner = {
        key: item
        for key, item in function.items()
        if item is not None and key not in ("arguments", "parameters", "function") and key not in wrapping
    }
    outer = {key: item for key, item in wrapping.items() if item is not None and key != "function"}
    return {"type": "function"} | outer | {"function": inner | {"name": function["name"], "arguments": arguments}}


def to_tools(value: Any, column: str) -> tuple[dict[str, Any], ...] | None:
    """A list of tools, or its JSON text; a function without its wrapping gets one."""
    if not value or (isinstance(value, str) and value.strip() in ("", "[]")):
        return None
    tools = from_json(value) if isinstance(value, str) else value
    tools = [from_json(tool) if isinstance(tool, str) else tool for tool in tools] if isinstance(tools, list) else None
    return tuple(_tool(tool, column) for tool in objects(tools, column))


def _tool(tool: dict[str, Any], column: str) -> dict[str, Any]:
    wrapped = tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
    function = wrapped.get("function")
    if isinstance(function, dict) and isinstance(function.get("parameters"), str):
        parameters = from_json(function["parameters"])
        if not isinstance(parameters, dict):
            raise UnfitError(
                f"`{column}`: the parameters of `{function.get('name')}` are not a JSON object",
                "write them as an object, or as JSON text",
            )
        return wrapped | {"function": function | {"parameters": parameters}}
    return wrapped


# Values ---------------------------------------------------------------------------------------------------------------


def objects(value: Any, column: str) -> list[dict[str, Any]]:
    """A list of objects, which CSV can only hold as JSON text, and `datasets` may hold as an object of lists."""
    items = from_json(value) if isinstance(value, str) else value
    if isinstance(items, dict) and items and all(isinstance(one, list) for one in items.values()):
        lengths = {len(one) for one in items.values()}
        if len(lengths) == 1:
            items = [dict(zip(items, row, strict=True)) for row in zip(*items.values(), strict=True)]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        form = (
            '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
            if column in ("tools", "functions")
            else ('{"role": ..., "content": ...}')
        )
        fix = f"write `{column}` as [{form}, ...]"
        raise UnfitError(f"`{column}` is not a list of objects", fix)
    if not items:
        raise UnfitError(f"`{column}` is empty", "add a conversation, or remove the row")
    return items


def from_json(text: str) -> Any:
    """What a text holds as JSON, under the rules of a JSON file; None where it is none."""
    try:
        value = STRICT.decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def to_messages(value: Any, column: str) -> list[dict[str, Any]]:
    return [to_message(message, number) for number, message in enumerate(objects(value, column), start=1)]
