"""One message of a conversation, however a file writes it, brought to the form that chat templates know.

`role` and `content`, with `tool_calls` as {"type": "function", "function": {"name", "arguments"}} whose arguments are an
object, and `tools` likewise. Read are also ShareGPT's `from` and `value`, other spellings of who speaks (`Human`, `GPT`),
OpenAI's arguments as JSON text, its older `function_call` and role `function`, calls without their wrapping, and thinking in
parts. What a message says is never changed; what cannot be brought to this form is an UnfitError, with what to do about it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from typing import Any

from pronghorn.data.read.json_rows import STRICT
from pronghorn.data.read.source_files import UnfitError, excerpt

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython")
SPEAKERS = {  # who speaks, in lower case, as data sets and the tools that read them write it
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "bing", "bard", "claude", "ai", "bot", "chatbot"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
}
CALLERS = ("function_call", "tool_call")  # speakers whose text is a call, as JSON
SPEAKERS_AND_CALLERS = {**SPEAKERS, **dict.fromkeys(CALLERS, "assistant")}
# What a turn says about being trained on, and whether 1 or true there means that it is: OpenAI's and Mistral's `weight`,
# Axolotl's `train` (its documentation) or `training` (its default), `loss` of ms-swift and XTuner, torchtune's `masked`.
MARKS = {
    **dict.fromkeys(("weight", "loss_weight", "train", "training", "loss", "trainable"), True),
    **dict.fromkeys(("masked", "mask"), False),
}
ASKING = tuple(key for key, trained in MARKS.items() if trained and "weight" not in key)  # a weight of 1 every message has
NUMBERS = ("weight", "loss_weight")
LIKE_A_MARK = re.compile(r"(?:^|_)(?:loss|un)?mask|(?:^|_)(?:loss|weight|train(?:ed|able)?|supervised?)(?:_|$)", re.IGNORECASE)
PARTS_KEY = "train_detail"  # Axolotl's: offsets within a turn
REASONING = ("reasoning_content", "reasoning", "thinking")
PLAIN_KEYS = {"role", "content", "from", "value"}  # that nothing more need be asked of
MEDIA = ("image", "audio", "video")  # also with an s
CONTENT_KEYS = ("content", "value", "text", "parts")  # OpenAI's, ShareGPT's, OpenAssistant's, Gemini's
READ_KEYS = {  # of a message; templates know some more of them than this program
    *("role", "from", "tool_calls", "function_call", "tool_call_id", "name", "tool_name", "id", "channel", "recipient"),
    *(*CONTENT_KEYS, *REASONING, *MARKS),
}
TEXT_PARTS = ("text", "input_text", "output_text")
TEXT_ONLY = "Pronghorn trains on text only"
THINKING_PARTS = ("thinking", "reasoning")
# How Capybara and XTuner, Firefly, and others write a question and its answer as one item of a conversation.
EXCHANGES = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("question", "answer"), ("prompt", "response"))
CALL_FORM = '{"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}'
TOOL_FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def only_read(message: dict[str, Any]) -> bool:
    """Whether the message itself says that it is not trained on."""
    return not MARKS.keys().isdisjoint(message) and any(
        message.get(key) is not None and bool(message[key]) != trained for key, trained in MARKS.items()
    )


def asks_to_train(message: dict[str, Any]) -> bool:
    """By `train: true`; a `weight` of 1 is what every message has."""
    return not MARKS.keys().isdisjoint(message) and any(message.get(key) is True for key in ASKING)


def unused_keys(messages: object) -> set[str]:
    """Keys of these messages, as a file has them, that hold something and that nothing reads."""
    if not isinstance(messages, list):
        return set()
    items = [item for item in messages if isinstance(item, dict) and not item.keys() <= PLAIN_KEYS]
    turns = [turn for item in items for turn in _apart(item)]
    return {key for turn in turns for key in turn.keys() - READ_KEYS if turn[key] not in (None, "", [], {})}


def to_message(message: dict[str, Any], number: int) -> dict[str, Any]:
    name = f"message {number}"
    speaker, role = _speaker(message, name)
    if not message.keys() <= PLAIN_KEYS:
        _require_marks(message, name)
        _refuse_media(message, name)
    content = _content(message, name)
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
    taken = {"role", "from", "tool_calls", "function_call", *CONTENT_KEYS}
    made = {key: item for key, item in message.items() if item is not None and key not in taken}
    if made or thinking:
        _require_one_reasoning(made, thinking, name)
    if thinking:
        made["reasoning_content"] = thinking
    return {"role": role, "content": content} | made | ({"tool_calls": calls} if calls else {})


def _speaker(message: dict[str, Any], name: str) -> tuple[str, str]:
    """As the file writes it, in lower case, and the role."""
    word, other = message.get("role"), message.get("from")
    word, other = (other, None) if word is None else (word, other)
    if word is None or word == "":
        key = next((key for key in ("role", "from") if key in message), "")
        if key:
            raise UnfitError(
                f"{name} has an empty `{key}`",
                f"write who speaks into `{key}`: system, user, assistant or tool; or remove the row",
            )
        raise UnfitError(
            f"{name} has no `role`; its keys are {', '.join(message)}",
            "set the key names of a message: data.message_fields: {role: KEY, content: KEY}",
        )
    role = _role(word, name)
    if other is not None and _role(other, name) != role:
        raise UnfitError(f"{name} has two roles: `{word}` and `{other}`", "keep one of them")
    return word.strip().lower(), role


def _role(word: object, name: str) -> str:
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


def _content(message: dict[str, Any], name: str) -> Any:
    """What is said, under whichever key."""
    given = {key: message[key] for key in CONTENT_KEYS if message.get(key) is not None}
    if any(said != next(iter(given.values())) for said in given.values()):
        both = " and ".join(f"`{key}`" for key in given)
        raise UnfitError(f"{name} has {both}, and they differ", "keep one of them")
    return next(iter(given.values()), None)


def _require_marks(message: dict[str, Any], name: str) -> None:
    """What the turn itself says about being trained on is yes or no, and one of the two."""
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, mark in marks.items():
        fits = mark in (0, 1) if key in NUMBERS and isinstance(mark, int | float) else isinstance(mark, bool)
        if not fits:
            shown, allowed = (f"the {key}", "0 or 1") if key in NUMBERS else (f"`{key}`", "true or false")
            raise UnfitError(f"{name} has {shown} {mark!r}; a turn carries loss or not", f"set it to {allowed}")
    if message.get(PARTS_KEY) is not None:
        raise UnfitError(
            f"{name} has `{PARTS_KEY}`; only whole turns can be marked, with `train`",
            f"remove `{PARTS_KEY}`, and mark whole turns with `train`",
        )
    for key in message.keys() - READ_KEYS:
        if LIKE_A_MARK.search(key) and message[key] is not None:
            raise UnfitError(
                f"{name} has the unknown key `{key}`, which may say whether the turn carries loss",
                f"if true or 1 there means that it does, set data.message_fields: {{train: {key}}}; if it means the opposite, "
                f"{{masked: {key}}}; else remove it",
            )
    if len({bool(mark) == MARKS[key] for key, mark in marks.items()}) > 1:
        raise UnfitError(
            f"{name} contradicts itself: " + ", ".join(f"`{key}` {mark!r}" for key, mark in marks.items()),
            "keep one of the marks",
        )


def _require_one_reasoning(made: dict[str, Any], thinking: str, name: str) -> None:
    texts = {key: made[key] for key in REASONING if made.get(key)}
    wrong = next((key for key, text in texts.items() if not isinstance(text, str)), None)
    if wrong:
        raise UnfitError(f"{name}: `{wrong}` is not text", f"write the reasoning as a text in `{wrong}`, or remove it")
    texts |= {"thinking parts": thinking} if thinking else {}
    if len(set(texts.values())) > 1:
        shown = " and ".join(f"`{key}`" if key in REASONING else key for key in texts)
        raise UnfitError(f"{name} has {shown}, each with a different text", "keep one of them")


def _refuse_media(message: dict[str, Any], name: str) -> None:
    found = next((key for key in message if media_name(key) and holds_media(message[key])), None)
    if found:
        raise UnfitError(f"{name} has `{found}`; {TEXT_ONLY}", f"remove `{found}` and what the text says of it, or the row")


def media_name(name: str) -> bool:
    return name.lower().removesuffix("s") in MEDIA


def holds_media(value: object) -> bool:
    """A path, bytes or an object; not a number or a flag of that name."""
    if isinstance(value, list):
        return any(map(holds_media, value))
    return isinstance(value, str | bytes | dict) and bool(value)


# Parts ----------------------------------------------------------------------------------------------------------------


def _parts(parts: list[Any], name: str) -> tuple[str, str]:
    """What the parts say, and what they think before that."""
    said: list[str] = []
    thought: list[str] = []
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if kind in THINKING_PARTS or (isinstance(part, dict) and part.get("thought") is True):  # the latter is Gemini's
            if said:
                raise UnfitError(f"{name} has thinking after its text", "put the thinking before the text, or remove it")
            thought.append(_thought(part, name))
        else:
            said.append(_part(part, name))
    return "".join(said), "".join(thought)


def text_of_parts(parts: list[Any], name: str) -> str:
    return "".join(_part(part, name) for part in parts)


def _thought(part: dict[str, Any], name: str) -> str:
    inner = next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key) is not None), None)
    if isinstance(inner, list):  # Mistral's are text parts again
        return text_of_parts(inner, name)
    if not isinstance(inner, str):
        raise UnfitError(f"{name} has a thinking part without text", 'write {"type": "thinking", "thinking": "..."}')
    return inner


def _part(part: object, name: str) -> str:
    text = None
    if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
        text = part.get("text", part.get("content"))  # the latter is torchtune's
    if not isinstance(text, str):
        kind = part.get("type", next(iter(part), None)) if isinstance(part, dict) else type(part).__name__
        called, result = f"write the call as `tool_calls`: [{CALL_FORM}]", "write the result as a message with the role `tool`"
        fix = {"tool_use": called, "functionCall": called, "tool_result": result, "functionResponse": result}
        raise UnfitError(
            f"{name} has a part of type `{kind}`; {TEXT_ONLY}", fix.get(str(kind), "remove the part, or remove the row")
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


def _decoded(value: object) -> Any:
    """What a column that may hold JSON text says; None where it says nothing."""
    if not isinstance(value, str):
        return value or None
    decoded = from_json(value)
    return (value if decoded is None else decoded) if value.strip() else None


def _spoken_calls(value: object, name: str) -> list[dict[str, Any]]:
    """Calls in ShareGPT's `function_call`: one as JSON text, or a list."""
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


def to_tools(value: object, column: str) -> tuple[dict[str, Any], ...] | None:
    """A list of tools, or its JSON text; a function without its wrapping gets one, and Gemini's list of them is taken apart."""
    if not value or (isinstance(value, str) and value.strip() in ("", "[]")):
        return None
    tools = from_json(value) if isinstance(value, str) else value
    tools = [from_json(tool) if isinstance(tool, str) else tool for tool in tools] if isinstance(tools, list) else None
    apart: list[Any] = []
    for tool in objects(tools, column):
        declared = next((tool[key] for key in ("functionDeclarations", "function_declarations") if tool.get(key)), [tool])
        apart += objects(declared, column)
    return tuple(_tool(tool, column, number) for number, tool in enumerate(apart, start=1))


def _tool(tool: dict[str, Any], column: str, number: int) -> dict[str, Any]:
    wrapped = tool if "function" in tool or "name" not in tool else {"type": "function", "function": tool}
    function = wrapped.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UnfitError(f"`{column}`: tool {number} has no function with a name", f"write {TOOL_FORM}")
    key = next(
        (key for key in ("parameters", "input_schema") if function.get(key) is not None), None
    )  # the latter: Anthropic's
    if key is None:
        return wrapped
    parameters = from_json(function[key]) if isinstance(function[key], str) else function[key]
    if not isinstance(parameters, dict):
        raise UnfitError(
            f"`{column}`: the {key} of `{function['name']}` are not a JSON object", "write them as an object, or as JSON text"
        )
    if key == "parameters" and parameters is function[key]:
        return wrapped
    rest = {name: item for name, item in function.items() if name != key}
    return wrapped | {"function": rest | {"parameters": parameters}}


# Values ---------------------------------------------------------------------------------------------------------------


def objects(value: object, column: str) -> list[dict[str, Any]]:
    """A list of objects, which CSV can only hold as JSON text, and `datasets` may hold as an object of lists."""
    items = from_json(value) if isinstance(value, str) else value
    if isinstance(items, dict) and items and all(isinstance(one, list) for one in items.values()):
        lengths = {len(one) for one in items.values()}
        if len(lengths) == 1:
            items = [dict(zip(items, row, strict=True)) for row in zip(*items.values(), strict=True)]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        form = TOOL_FORM if column in ("tools", "functions") else '{"role": ..., "content": ...}'
        fix = f"write `{column}` as [{form}, ...]"
        raise UnfitError(f"`{column}` is not a list of objects", fix)
    if not items:
        raise UnfitError(f"`{column}` is empty", "add a conversation, or remove the row")
    return items


def texts_in(value: object) -> Iterator[str]:
    """Every text in a JSON value, keys apart."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts_in(item)


def from_json(text: str) -> Any:
    """What a text holds as JSON, under the rules of a JSON file; None where it is none."""
    try:
        value = STRICT.decode(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def to_messages(value: object, column: str) -> list[dict[str, Any]]:
    turns = [turn for item in objects(value, column) for turn in _apart(item)]
    return [to_message(message, number) for number, message in enumerate(turns, start=1)]


def _apart(item: dict[str, Any]) -> list[dict[str, Any]]:
    """A question and its answer in one item are two messages."""
    if "role" in item or "from" in item:
        return [item]
    for asked, answered in EXCHANGES:
        if asked in item and answered in item and item.keys() <= {"system", asked, answered}:
            said = {"system": item.get("system") or None, "user": item[asked] or None, "assistant": item[answered]}
            return [{"role": role, "content": content} for role, content in said.items() if content is not None]
    return [item]
