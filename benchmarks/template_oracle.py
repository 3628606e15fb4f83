"""Which characters of a rendered conversation does the assistant say? A judge that shares no code with the answer.

It knows each template by facts that a person wrote down after reading it (`Facts`): what stands right before an answer, what
closes one, what opens the next turn. It knows each conversation by its words: every text of a twin conversation is one word
that occurs nowhere else, so a span is right when it holds its own message's words and no others, begins after the header and
ends with the end. A conversation with odd contents (control tokens, spaces) is then compared with its twin, whose words are
replaced by the contents.

Nothing of pronghorn is imported here; tests hold that.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
WORD = re.compile(r"w\d{3}x")


@dataclass(frozen=True)
class Facts:
    """What a person read in a template."""

    header: tuple[str, ...]  # one of these stands right before what the assistant says
    end: str  # closes an answer; "" where the template writes none
    opens: tuple[str, ...] = ()  # one of these follows a closed turn, unless the text ends
    last: str | None = None  # closes the last answer, where it is another
    call: tuple[str, ...] = ()  # of these one closes a turn that calls, where it is another
    last_call: tuple[str, ...] = ()  # the same, of a call that is the last message
    after_tool: tuple[str, ...] = ()  # before an answer that follows a tool's result, where it is another
    after_assistant: tuple[str, ...] = ()  # before the second of two assistant turns, where it is another
    first: tuple[str, ...] = ()  # before a conversation's first message, where that is the assistant's and has no header
    eos: str = ""  # the tokenizer's end token, where it is not `end`
    bos: str = "<|bos|>"
    specials: tuple[str, ...] = ()  # special tokens that no pattern finds
    again: bool = False  # a turn may have several parts, each with the header
    cannot: dict[str, str] = field(default_factory=dict)  # kind of conversation -> why this template cannot express it

    def closing(self, last: bool, calls: bool) -> tuple[str, ...]:
        if calls and (self.call or self.last_call):
            return (last and self.last_call) or self.call or (self.end,)
        return (self.last if last and self.last is not None else self.end,)

    def before(self, previous: str) -> tuple[str, ...]:
        other = {"tool": self.after_tool, "assistant": self.after_assistant, "": self.first}.get(previous, ())
        return (*other, *self.header)


@dataclass(frozen=True)
class Chat:
    kind: str
    messages: list[Message]
    tools: list[Message] | None = None
    contents: dict[str, str] = field(default_factory=dict)  # word -> what the row really says there
    plain: bool = False  # nothing but a question and an answer, once or more: no template may be refused for it

    @property
    def row(self) -> list[Message]:
        return replaced(self.messages, self.contents) if self.contents else self.messages


@dataclass(frozen=True)
class Answer:
    """What the code under test says about a row."""

    text: str
    spans: tuple[tuple[int, int, int], ...]  # message, start, stop
    decoded: tuple[str, ...]  # the supervised tokens, decoded: one text for each run
    controls: int  # tokens of the row that are control tokens


@dataclass(frozen=True)
class Refusal:
    reason: str


@dataclass(frozen=True)
class Verdict:
    result: str  # exact | refused | refused without need | wrong
    why: str = ""


# Conversations ---------------------------------------------------------------------------------------------------------


def words() -> Iterator[str]:
    return (f"w{number:03}x" for number in itertools.count(1))


def replaced(value: Any, contents: dict[str, str]) -> Any:
    if isinstance(value, str):
        return WORD.sub(lambda found: contents.get(found[0], found[0]), value)
    if isinstance(value, list):
        return [replaced(item, contents) for item in value]
    return {key: replaced(item, contents) for key, item in value.items()} if isinstance(value, dict) else value


def words_of(message: Message) -> set[str]:
    """Of what the message says; ids that join a result to its call are no text."""
    said = {key: item for key, item in message.items() if key not in ("role", "tool_call_id", "name")}
    return set(WORD.findall(json.dumps(said)))


def _call(name: str, arguments: dict[str, Any], number: int) -> Message:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str, *keys: str) -> Message:
    known = {key: {"type": "string", "description": "one"} for key in keys}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": known, "required": list(keys)},
        },
    }


ODD = {  # contents that templates and tokenizers may trip over
    "unicode": "caf\u00e9 \u6c34\u2028\U0001f9a6 e\u0301",
    "spaces": "  \n two  spaces \n\n ",
    "lines": "one\n\ntwo\n",
    "jinja": "{{ 7 }} {% raw %} {# no #}",
    "quotes": "say \"rain\" and 'snow' \\n \\",
    "tags": "a <b> & <|no_token|> [x] </s",
    "digits": "0",
    "tag": "no <thing> here",
    "null": "None",
}


class _Writer:
    """Messages whose every text is a word of its own."""

    def __init__(self) -> None:
        self.words = words()
        self.found: list[Chat] = []

    def user(self) -> Message:
        return {"role": "user", "content": next(self.words)}

    def system(self) -> Message:
        return {"role": "system", "content": next(self.words)}

    def says(self, reasoning: str = "") -> Message:
        return {"role": "assistant", "content": next(self.words), **({reasoning: next(self.words)} if reasoning else {})}

    def calls(self, *called: Message, content: Any = "", **more: Any) -> Message:
        return {"role": "assistant", "content": content, **more, "tool_calls": list(called)}

    def result(self, number: int = 1, name: str = "look_up") -> Message:
        return {"role": "tool", "content": next(self.words), "tool_call_id": f"call0000{number}", "name": name}

    def one(self, number: int = 1, name: str = "look_up") -> Message:
        return _call(name, {"city": next(self.words)}, number)

    def add(self, kind: str, messages: list[Message], tools: Any = None, **more: Any) -> None:
        self.found.append(Chat(kind, messages, tools, **more))


def chats(controls: Sequence[str] = ()) -> list[Chat]:
    """Every kind of conversation; `controls`: control tokens of the template, for contents that hold them."""
    writer = _Writer()
    _talks(writer)
    _thoughts(writer)
    _uses_of_tools(writer)
    _oddities(writer, controls)
    return writer.found


def _talks(w: _Writer) -> None:
    user, says, add, empty = w.user, w.says, w.add, {"role": "assistant", "content": ""}
    add("one turn", [user(), says()], plain=True)
    add("three turns", [user(), says(), user(), says(), user(), says()], plain=True)
    add("ends with a question", [user(), says(), user()])
    add("system", [w.system(), user(), says()])
    add("system, two turns", [w.system(), user(), says(), user(), says()])
    add("system later", [user(), says(), w.system(), user(), says()])
    add("assistant first", [says(), user(), says()])
    add("two users", [user(), user(), says()])
    add("two assistants", [user(), says(), says()])
    add("two assistants inside", [user(), says(), says(), user(), says()])
    add("empty answer", [user(), empty])
    add("empty answer inside", [user(), empty, user(), says()])
    add("empty question", [{"role": "user", "content": ""}, says()])


def _thoughts(w: _Writer) -> None:
    user, says, add, why = w.user, w.says, w.add, "reasoning_content"
    add("reasoning_content", [user(), says(why)])
    add("thinking", [user(), says("thinking")])
    add("reasoning, two turns", [user(), says(why), user(), says(why)])
    add("reasoning first", [user(), says(why), user(), says()])
    add("reasoning last", [user(), says(), user(), says(why)])
    inside = f"<think>\n{next(w.words)}\n</think>\n\n{next(w.words)}"
    add("think in content", [user(), {"role": "assistant", "content": inside}])


def _uses_of_tools(w: _Writer) -> None:
    user, says, add, calls, one, result = w.user, w.says, w.add, w.calls, w.one, w.result
    look_up, count = _tool("look_up", "city"), _tool("count_up", "city")
    add("tools, no call", [user(), says()], [look_up])
    add("call", [user(), calls(one())], [look_up])
    add("call, null content", [user(), calls(one(), content=None)], [look_up])
    add("call, result", [user(), calls(one()), result(), says()], [look_up])
    add("call, result, null", [user(), calls(one(), content=None), result(), says()], [look_up])
    add("call, then a question", [user(), calls(one()), result(), says(), user(), says()], [look_up])
    add("call after an answer", [user(), says(), user(), calls(one()), result(), says()], [look_up])
    add("system and call", [w.system(), user(), calls(one()), result(), says()], [look_up])
    add("two calls", [user(), calls(one(1), one(2, "count_up")), result(1), result(2, "count_up"), says()], [look_up, count])
    add("same call twice", [user(), calls(one(1), one(2)), result(1), result(2), says()], [look_up])
    add("call after call", [user(), calls(one(1)), result(1), calls(one(2)), result(2), says()], [look_up])
    add("text and call", [user(), calls(one(), content=next(w.words)), result(), says()], [look_up])
    add("text and call, last", [user(), calls(one(), content=next(w.words))], [look_up])
    thought = calls(one(), reasoning_content=next(w.words))
    add("reasoning and call", [user(), thought, result(), says("reasoning_content")], [look_up])
    add("no arguments", [user(), calls(_call("look_up", {}, 1)), result(), says()], [_tool("look_up")])
    add("numbers", [user(), calls(_call("look_up", {"n": 70013, "x": 2.25, "ok": True}, 1)), result(), says()], [look_up])
    add("nested", [user(), calls(_call("look_up", {"a": {"b": [next(w.words), 70017]}}, 1)), result(), says()], [look_up])
    add("no tools given", [user(), calls(one()), result(), says()])


def _oddities(w: _Writer, controls: Sequence[str]) -> None:
    for kind, content in (ODD | {f"control {token}": f"a {token} b" for token in controls}).items():
        first, second, third = w.user(), w.says(), w.user()
        w.add(
            kind, [first, second, third, w.says()], plain=True, contents={first["content"]: content, second["content"]: content}
        )
    first, second = w.user(), w.says()
    w.add(
        "echo", [first, second, w.user(), w.says()], plain=True, contents={first["content"]: "same", second["content"]: "same"}
    )


# The judge -------------------------------------------------------------------------------------------------------------

Render = Callable[[list[Message], Any], str]  # plain transformers: apply_chat_template
Under = Callable[[list[Message], Any], Answer | Refusal]  # the code under test


def judge(chat: Chat, facts: Facts, render: Render, under: Under) -> Verdict:
    """Whether what `under` says of this conversation is right."""
    twin = under(chat.messages, chat.tools)
    missing = _missing(chat, render)
    if isinstance(twin, Refusal):
        missing = missing or says_nothing(chat.messages, twin.reason)
        if missing and not chat.plain:
            return Verdict("refused", f"{missing}. Said: {twin.reason}")
        if why := facts.cannot.get(chat.kind.rpartition(": ")[2]):
            return Verdict("refused", f"{why}. Said: {twin.reason}")
        return Verdict("refused without need", twin.reason)
    wrong = _wrong_twin(chat, facts, twin, render, raw_is_whole=not missing)
    if wrong:
        return Verdict("wrong", "; ".join(wrong))
    if not chat.contents:
        return Verdict("exact")
    row = under(chat.row, chat.tools)
    if isinstance(row, Refusal):
        return Verdict("refused without need", row.reason)
    wrong = wrong_row(chat, facts, twin, row)
    return Verdict("wrong", "; ".join(wrong)) if wrong else Verdict("exact")


def says_nothing(messages: list[Message], reason: str) -> str:
    """Why the row may be refused, and is told to be: one of its answers is empty."""
    keys = ("content", "reasoning_content", "thinking")
    empty = any(
        message["role"] == "assistant"
        and not any(re.sub("</?think>", "", message.get(key) or "").strip() for key in keys)
        and not message.get("tool_calls")
        for message in messages
    )
    return "an answer is empty" if empty and "is empty" in reason else ""


def _missing(chat: Chat, render: Render) -> str:
    """Why plain transformers cannot write this conversation; "" when it writes all of it."""
    try:
        text = render(chat.messages, chat.tools)
    except Exception as error:  # noqa: BLE001 - whatever a template raises is its answer
        return f"the template says {type(error).__name__}: {str(error)[:120]}"
    said = [word for message in chat.messages for word in sorted(words_of(message)) if word not in text]
    said += [name for message in chat.messages for name in _lost_calls(message, chat.messages, text)]
    said += _unnamed_calls(chat, render)
    if chat.tools and any(tool["function"]["name"] not in text for tool in chat.tools):
        said.append("the tools")
    return f"the template leaves out {', '.join(said)}" if said else ""


def _unnamed_calls(chat: Chat, render: Render) -> list[str]:
    """Calls that are not written at all: another name for the function changes nothing."""
    calls = sum(len(message.get("tool_calls") or []) for message in chat.messages)
    other = [
        message
        | {"tool_calls": [call | {"function": call["function"] | {"name": "quite_other"}} for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in chat.messages
    ]
    return ["a call"] if calls and render(other, chat.tools).count("quite_other") < calls else []


def _lost_calls(message: Message, messages: list[Message], text: str) -> list[str]:
    found = []
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        leaves = [str(key) for key in arguments] + [json.dumps(v) for v in arguments.values() if isinstance(v, (int, float))]
        if name not in text or any(leaf not in text and leaf.title() not in text for leaf in leaves):
            found.append(f"the call of {name}")
    return found


def _wrong_twin(chat: Chat, facts: Facts, answer: Answer, render: Render, raw_is_whole: bool) -> list[str]:
    found = _wrong_text(chat, facts, answer, render) if raw_is_whole else []
    speaking = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if [message for message, _, _ in answer.spans] != speaking:
        return [*found, f"spans of messages {[m for m, _, _ in answer.spans]}, the assistant speaks in {speaking}"]
    for number, (i, _, _) in enumerate(answer.spans):
        found += [f"message {i}: {what}" for what in _wrong_span(chat, facts, answer, number)]
    joined = "".join(answer.text[start:stop] for _, start, stop in answer.spans)
    if "".join(answer.decoded) != joined:
        found.append(f"tokens decode to {answer.decoded!r}, spans are {joined!r}")
    for message in chat.messages:
        found += [f"{word} is not in the text" for word in sorted(words_of(message)) if word not in answer.text]
        found += [f"{name} is not in the text" for name in _lost_calls(message, chat.messages, answer.text)]
    return found


def _wrong_text(chat: Chat, facts: Facts, answer: Answer, render: Render) -> list[str]:
    silent = [message | {"content": message["content"] or ""} for message in chat.messages]
    raws = [render(messages, chat.tools) for messages in (chat.messages, silent)]  # templates write the word None for null
    if answer.text in raws:
        return []
    ends = {end for end in (facts.eos, facts.end, facts.last, *facts.closing(True, True)) if end}
    for raw in raws:
        if answer.text.startswith(raw) and any(end.endswith(answer.text[len(raw) :]) for end in ends):
            return []
        if any(raw.startswith(answer.text.removesuffix(end)) for end in facts.closing(True, True)):
            return []  # cut right behind the last turn, which the template does not close
    return [f"the text is not what transformers renders: {answer.text[-80:]!r}, not {raws[0][-80:]!r}"]


def _wrong_span(chat: Chat, facts: Facts, answer: Answer, number: int) -> list[str]:
    text, (i, start, stop) = answer.text, answer.spans[number]
    found, said = [], text[start:stop]
    message, last = chat.messages[i], i == len(chat.messages) - 1
    held = set(WORD.findall(said))
    others = set().union(*(words_of(other) for j, other in enumerate(chat.messages) if j != i)) - words_of(message)
    if missing := words_of(message) - held:
        found.append(f"{sorted(missing)} of its words are outside the span {said!r}")
    if held & others:
        found.append(f"the words {sorted(held & others)} of other messages are in the span {said!r}")
    found += [f"{name} is not in the span" for name in _lost_calls(message, chat.messages, said)]
    if any(sign in said for sign in ("None", "'type'", '"type"', '\\\\"', '"{')):  # no word of a twin holds these
        found.append(f"what is no text was written as one: {said!r}")
    found += _wrong_start(chat, facts, answer, number)
    if any(header in said for header in facts.header) and not facts.again:
        found.append(f"another turn is opened in {said!r}")
    calls = bool(message.get("tool_calls"))
    end = facts.closing(last, calls)
    glued = facts.after_assistant and i + 1 < len(chat.messages) and chat.messages[i + 1]["role"] == "assistant"
    if not said.endswith(end) and not (glued and "" in facts.after_assistant):
        found.append(f"ends with {said[-40:]!r}, not with {end!r}")
    following = text[stop:].lstrip()
    if facts.opens and following and not following.startswith(facts.opens) and not glued:
        found.append(f"followed by {following[:40]!r}, which opens no turn")
    return found


def _wrong_start(chat: Chat, facts: Facts, answer: Answer, number: int) -> list[str]:
    i, start, _ = answer.spans[number]
    before, previous = answer.text[:start], answer.spans[number - 1] if number else (-1, 0, 0)
    headers = facts.before(chat.messages[i - 1]["role"] if i else "")
    goes_on = "" in headers and previous[0] == i - 1 and start == previous[2]  # without a header, where the one before ended
    right = goes_on or any(header and before.endswith(header) for header in headers)
    return [] if right else [f"begins after {before[-40:]!r}, not after a header"]


# A row and its twin ----------------------------------------------------------------------------------------------------


def wrong_row(chat: Chat, facts: Facts, twin: Answer, row: Answer, *, taken_apart: bool = False) -> list[str]:
    """`taken_apart`: the template may write the contents in another way than words (tags are), but nothing else changes."""
    if [i for i, _, _ in row.spans] != [i for i, _, _ in twin.spans]:
        return [f"spans of messages {[i for i, _, _ in row.spans]}, its twin has {[i for i, _, _ in twin.spans]}"]
    thoughts = {message[key] for message in chat.messages for key in ("reasoning_content", "thinking") if message.get(key)}
    unthought = any(not chat.contents[word].strip() for word in thoughts & chat.contents.keys())
    unthought |= any("think>" in content for content in chat.contents.values())
    composed = _composed(twin.text, row.text, chat.contents)
    if composed is None and taken_apart:
        composed = _surrounded(twin.text, row.text)
    if composed is None:
        return [f"the text is not the twin's with the contents put in: {row.text[-120:]!r}"]
    expected, found = [], list[str]()
    for number, ((i, start, stop), (_, a, _)) in enumerate(zip(twin.spans, row.spans, strict=True)):
        begins, ends = composed.get(start), composed.get(stop)
        if begins is None or (unthought and a != begins):  # what opens an answer may depend on its thoughts
            found += _wrong_start(chat, facts, row, number)
            begins = a
        expected.append((i, begins, ends if ends is not None else -1))
    open_ended = not facts.end  # then nobody can tell spaces that end an answer from those of the template
    spans = [
        (i, a, max(a, b, c) if open_ended and row.text[b:c].isspace() else b)
        for (i, a, b), (_, _, c) in zip(row.spans, expected, strict=False)
    ]
    if spans != expected:
        found.append(f"spans {[row.text[a:b] for _, a, b in row.spans]}, expected {[row.text[a:b] for _, a, b in expected]}")
    joined = "".join(row.text[start:stop] for _, start, stop in row.spans)
    if _composed_form("".join(row.decoded)) != _composed_form(joined):
        found.append(f"tokens decode to {row.decoded!r}, spans are {joined!r}")
    if row.controls != twin.controls and not taken_apart:
        found.append(f"{row.controls} control tokens, its twin has {twin.controls}")
    return found


def _composed_form(text: str) -> str:
    import unicodedata

    return unicodedata.normalize("NFC", text)  # some tokenizers write texts so


def _composed(twin: str, row: str, contents: dict[str, str]) -> dict[int, int] | None:
    """Where each place between two letters of the twin's text is in the row's; None when the row is not the twin's text with
    contents for words (a template may trim them)."""
    pieces = [(found.start(), found.end(), contents[found[0]]) for found in WORD.finditer(twin) if found[0] in contents]

    def place(number: int, at_twin: int, at_row: int) -> dict[int, int] | None:
        stop = pieces[number][0] if number < len(pieces) else len(twin)
        literal = twin[at_twin:stop]
        if not row.startswith(literal, at_row):
            return None
        here = {at_twin + k: at_row + k for k in range(len(literal) + 1)}
        if number == len(pieces):
            return here if at_row + len(literal) == len(row) else None
        _, behind, content = pieces[number]
        for option in dict.fromkeys((content, content.strip(), content.lstrip(), content.rstrip())):
            if row.startswith(option, at_row + len(literal)):
                rest = place(number + 1, behind, at_row + len(literal) + len(option))
                if rest is not None:
                    return here | rest
        return None

    return place(0, 0, 0)


def _surrounded(twin: str, row: str) -> dict[int, int]:
    """The same places, before and behind the one part in which the two texts differ."""
    before = alike(twin, row)
    behind = min(alike(twin[::-1], row[::-1]), len(twin) - before, len(row) - before)
    here = {place: place for place in range(before + 1)}
    return here | {len(twin) - place: len(row) - place for place in range(behind + 1)}


def alike(one: str, other: str) -> int:
    """With how many letters both begin."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
