"""A conversation through the tokenizer's chat template, and exactly which characters of it the assistant says.

A turn's span is what the model has to produce: everything after the generation prompt, up to and including the
end-of-turn token (not the newline after it). Where it lies is never guessed:

1. A template with `{% generation %}` blocks says it itself.
2. Otherwise the conversation is rendered twice, plainly and with private-use characters set around every text in it.
   When taking them out again gives the plain text, they show where each text went; what stands between two texts
   comes from the template alone, and is compared with what the same template writes around a probe. Two renders a
   row, whatever its number of turns.
3. Where the marks disturb the template, each turn is rendered as a prefix of the conversation; the prefix that ends
   with the generation prompt must be a prefix of the whole.
4. Otherwise it is an error that names the row.

A template without any end-of-turn token teaches no model to stop: the tokenizer's end token is appended to such a
conversation when it ends with the assistant; turns inside it end with the text that closes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pronghorn.data.rendering import RowError, within_limits
from pronghorn.data.tokens import Span, render_tracked
from pronghorn.errors import DataError

Message = dict[str, Any]

# Marks: a start and an end character for each text, from the private-use plane 15, which chat data does not use.
FIRST_MARK, LAST_MARK = 0xF0000, 0xFFFFD
MARKS = re.compile(f"[{chr(FIRST_MARK)}-{chr(LAST_MARK)}]")
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = chr(LAST_MARK)  # a message that is nothing but a mark
ASK = {"role": "user", "content": "?"}
CALL_ID = {"tool_call_id": "call00000", "name": "f"}  # nine characters: Mistral's templates insist


@dataclass(frozen=True, slots=True)
class Turn:
    """Characters start:stop of the text are what the assistant says in messages[message]."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rendered:
    text: str
    turns: tuple[Turn, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple((turn.start, turn.stop) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Ends:
    """How turns end, as a probe shows it; "" where there is no such token."""

    last: str  # the token after the last turn
    inside: str  # the token after a turn that others follow
    closing: str  # the text after any turn, up to where it depends on what follows
    call: str  # the token after a turn that calls a tool


@lru_cache(maxsize=4)
def _probed(tokenizer: Any, template: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def chat_template(tokenizer: Any) -> ChatTemplate:
    """The tokenizer's template, probed once."""
    return _probed(tokenizer, str(tokenizer.chat_template))


def render_chat(tokenizer: Any, messages: Sequence[Message], tools: Any = None, where: str = "") -> Rendered:
    return chat_template(tokenizer).render(messages, tools, where)


class ChatTemplate:
    """A template and what probing it once tells: its generation prompt, what precedes and what ends a turn."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "template missing: the data is conversations, and the tokenizer has no chat template",
                where=str(getattr(tokenizer, "name_or_path", "")),
                why="without one nobody can say how this model marks who speaks",
                fix="train an -Instruct model, set data.chat_template: file.jinja, or give prompt/completion data",
            )
        self._tokenizer = tokenizer
        self._tracked = any(GENERATION_TAG.search(text) for text in _template_texts(tokenizer.chat_template))
        # Read once: transformers builds this list from the vocabulary at every call.
        specials = set(tokenizer.all_special_tokens)
        specials |= {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        specials |= set(getattr(tokenizer, "pronghorn_eot_tokens", ()))  # data.eot_tokens
        longest_first = sorted((token for token in specials if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")  # (?!) matches nothing
        self._before: dict[str, tuple[str, ...]] = {}  # role -> what follows its message when the assistant is to speak
        self._generation_prompt = self._probe_generation_prompt()
        self._ends = self._probe_ends()

    # Rendering

    def _render(self, messages: Sequence[Message], tools: Any, where: str, prompt: bool = False) -> str:
        def render() -> str:
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt))

        return within_limits(render, messages, where)

    def _attempt(self, messages: Sequence[Message], tools: Any = None, prompt: bool = False) -> str | None:
        """For probes and prefixes, which a template may refuse (a lone system message, two users in a row)."""
        try:
            return self._render(messages, tools, "", prompt)
        except RowError:
            return None

    def prompt_text(self, messages: Sequence[Message], tools: Any = None, where: str = "") -> str:
        """The conversation so far, and the generation prompt."""
        return self._render(_with_text(messages), list(tools) if tools else None, where, prompt=True)

    def plain(self, messages: Sequence[Message], tools: Any = None, where: str = "") -> str:
        """The whole conversation, when nobody asks who says what."""
        text = self._render(_with_text(messages), list(tools) if tools else None, where)
        ends_open = self._ends is not None and not self._ends.last and messages[-1].get("role") == "assistant"
        return text + str(self._tokenizer.eos_token or "") if ends_open else text

    def render(self, messages: Sequence[Message], tools: Any = None, where: str = "") -> Rendered:
        messages, tools = _with_text(messages), (list(tools) if tools else None)
        rendered = self._from_generation_tags(messages, tools, where) if self._tracked else None
        rendered = rendered or self._derived(messages, tools, where)
        _require_calls(rendered, messages, where)
        return rendered

    def _derived(self, messages: list[Message], tools: Any, where: str) -> Rendered:
        text = self._render(messages, tools, where)
        speaking = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not speaking:
            return Rendered(text, ())
        turns = None
        if self._ends and not MARKS.search(text):
            turns = self._from_marks(text, _Marks(messages), messages, tools)
            # A template may look at how the user's text begins and ends; marks in its middle do not show there.
            turns = turns or self._from_marks(text, _Marks(messages, in_the_middle=True), messages, tools)
        turns = turns or self._from_prefixes(text, messages, tools, where)
        return self._with_end(Rendered(text, turns), messages, where)

    # What the template does around a probe

    def _probe(self, *messages: Message, prompt: bool = False) -> str | None:
        """The text that holds PROBE once; some templates want a system message first."""
        for before in ([], [{"role": "system", "content": "."}]):
            text = self._attempt([*before, *messages], prompt=prompt)
            if text is not None and text.count(PROBE) == 1:
                return text
        return None

    def _probe_generation_prompt(self) -> str:
        user = {"role": "user", "content": PROBE}
        plain, prompted = self._probe(user), self._probe(user, prompt=True)
        if plain is None or prompted is None or not prompted.startswith(plain):
            return ""
        return prompted[len(plain) :]

    def _probe_ends(self) -> Ends | None:
        """None when the template refuses a question and an answer."""
        last, inside = self._after({"role": "assistant", "content": PROBE}, ASK)
        if last is None:
            return None
        end_last, end_inside = self._special.search(last), self._special.search(inside or "")
        closing = _common_start(last, inside or "").rstrip()
        response = {"role": "tool", "content": "."} | CALL_ID
        call_last, call_inside = self._after(_calling({"a": PROBE}), response)
        if call_last is None:  # DeepSeek's templates want the arguments as text
            call_last, call_inside = self._after(_calling(f'{{"a": "{PROBE}"}}'), response)
        call_ends = self._special.findall(_common_start(call_last or "", call_inside or ""))
        return Ends(
            last=end_last[0] if end_last else "",
            # Without an end after the last turn, the token after an inner one opens the next turn.
            inside=end_inside[0] if end_last and end_inside else "",
            closing=closing,
            call=call_ends[-1] if call_ends else "",
        )

    def _after(self, answer: Message, following: Message) -> tuple[str | None, str | None]:
        """What the template writes after PROBE when this answer is the last message, and when another follows."""
        texts = self._probe(ASK, answer), self._probe(ASK, answer, following)
        last, inside = (text.split(PROBE)[1] if text is not None else None for text in texts)
        return last, inside

    def _lead_ins(self, role: str) -> tuple[str, ...]:
        """What the template writes after a message of this role up to where the assistant starts; () when it refuses."""
        if role not in self._before:
            ahead: list[list[Message]] = [[], [ASK, {"role": "assistant", "content": "!"}]]
            probe = {"role": role, "content": PROBE}
            if role == "assistant":
                ahead = [[ASK]]
            elif role == "tool":
                ahead, probe = [[ASK, _calling({})], [ASK, _calling("{}")]], probe | CALL_ID
            texts = [self._probe(*before, probe, prompt=True) for before in ahead]
            tails = {text.split(PROBE)[1] for text in texts if text is not None}
            self._before[role] = tuple(sorted(tails, key=len, reverse=True))
        return self._before[role]

    # Way 1: the template's own {% generation %} blocks

    def _from_generation_tags(self, messages: list[Message], tools: Any, where: str) -> Rendered | None:
        """None when the tracked ranges do not hold what the assistant says (a block inside a macro is tracked wrongly)."""
        text, spans = within_limits(lambda: render_tracked(self._tokenizer, messages, tools), messages, where)
        turns: list[Turn] = []
        ahead = iter([i for i, message in enumerate(messages) if message.get("role") == "assistant"])
        done = 0
        for start, stop in spans:
            said = text[start:stop]
            message = next((i for i in ahead if _could_say(messages[i], said)), None)
            if message is None or start < done:
                return None
            done = self._past_end_token(text, start, stop)
            turns.append(Turn(message, start, done))
        return self._with_end(Rendered(text, tuple(turns)), messages, where) if turns else None

    def _past_end_token(self, text: str, start: int, stop: int) -> int:
        """A block may end before the end token, at it, or after the newline behind it; a span ends at it."""
        stop = start + len(text[start:stop].rstrip())
        inside = [found.end() for found in self._special.finditer(text, start, stop)]
        if inside and inside[-1] == stop:
            return stop
        space = re.compile(r"\s*").match(text, stop)
        after = self._special.match(text, space.end() if space else stop)
        known = (self._ends.last, self._ends.inside, self._ends.call) if self._ends else ()
        return after.end() if after and after[0] in known else stop

    # Way 2: marks around every text

    def _from_marks(self, text: str, marks: _Marks, messages: list[Message], tools: Any) -> tuple[Turn, ...] | None:
        marked = None if marks.too_many else self._attempt(marks.messages, tools)
        if marked is None or MARKS.sub("", marked) != text:
            return None
        starts, stops, repeated = marks.places(marked, text)
        following = [len(text)] * len(messages)  # the first mark of any later message
        for i in range(len(messages) - 1, 0, -1):
            following[i - 1] = min(following[i], starts.get(i, len(text)), stops.get(i, len(text)))
        turns: list[Turn] = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            if i not in stops or (i in repeated and not message.get("tool_calls")):
                return None  # the template dropped or cut what this turn says, or repeats it; or the turn says nothing
            previous_stop = turns[-1].stop if turns else 0
            before = (str(messages[i - 1].get("role")), stops[i - 1]) if i - 1 in stops else ("", previous_stop)
            start = self._start(text, *before, first=starts.get(i))
            stop = self._stop(text, message, stops[i], following[i], last=i == len(messages) - 1)
            if start is None or stop is None or not previous_stop <= start <= stops[i] <= stop:
                return None
            turns.append(Turn(i, start, stop))
        return tuple(turns)

    def _start(self, text: str, role: str, before: int, first: int | None) -> int | None:
        """Where the generation prompt ends, before a turn whose own text starts at `first` (None: not known).

        The text of the message before it ends at `before` and is of this role; role "" when that is not known.
        """
        lead_ins = self._lead_ins(role) if role else ()
        for lead_in in lead_ins:
            if text.startswith(lead_in, before):
                return before + len(lead_in)
        # A generation prompt that opens the thinking, before a turn whose thinking the template dropped.
        if first is not None and any(lead_in.startswith(text[before:first]) for lead_in in lead_ins):
            return first
        prompt = self._generation_prompt
        if first is None or not prompt.strip() or text.count(prompt, before, first) != 1:
            return None
        return text.index(prompt, before, first) + len(prompt)

    def _stop(self, text: str, message: Message, said: int, following: int, last: bool) -> int | None:
        """Where the turn ends whose own text ends at `said`; no text of a marked message stands in said:following."""
        assert self._ends is not None
        if message.get("tool_calls"):
            at = text.find(self._ends.call, said, following) if self._ends.call else -1
            return at + len(self._ends.call) if at >= 0 else None
        if not (self._ends.last if last else self._ends.inside):
            return said + len(self._ends.closing) if text.startswith(self._ends.closing, said) else None
        end = self._special.search(text, said, following)
        return end.end() if end and end[0] in (self._ends.last, self._ends.inside) else None

    # Way 3: prefixes of the conversation

    def _from_prefixes(self, text: str, messages: list[Message], tools: Any, where: str) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        for i, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._attempt(messages[:i], tools, prompt=True) if i else self._generation_prompt
            start = len(before) if before and text.startswith(before) else None
            if start is None or (turns and start < turns[-1].stop):
                raise _cannot_derive(i, where, "the conversation up to it is not how the whole conversation starts")
            stop = self._stop_by_prefix(text, messages[: i + 1], tools, start, last=i == len(messages) - 1)
            if stop is None:
                raise _cannot_derive(i, where, "no end-of-turn token follows what it says")
            turns.append(Turn(i, start, stop))
        return tuple(turns)

    def _stop_by_prefix(self, text: str, messages: list[Message], tools: Any, start: int, last: bool) -> int | None:
        message, said = messages[-1], _text_of(messages[-1]).strip()
        upto = text if last else self._attempt(messages, tools)
        whole = len(upto) if upto is not None and text.startswith(upto) else None  # the turn, its end and what follows that
        if self._ends is None or message.get("tool_calls"):
            ends = list(self._special.finditer(text, start, whole)) if whole is not None else []
            if ends or whole is None or self._ends is None or self._ends.last:
                return ends[-1].end() if ends and not text[ends[-1].end() : whole].strip() else None
            return max(start, len(text[:whole].rstrip()))
        if not (self._ends.last if last else self._ends.inside):
            certain = whole is not None and (not said or text.count(said, start, whole) == 1)
            return max(start, len(text[:whole].rstrip())) if certain else None
        end = "|".join(sorted({re.escape(token) for token in (self._ends.last, self._ends.inside) if token}))
        # What it says and then an end token: `<think>` before an answer "think" is not that.
        pattern = re.compile(rf"{re.escape(said)}\s*(?:{end})")
        found = pattern.search(text, start) if said else pattern.match(text, start)
        if found is None and whole is not None:  # rewritten by the template: then there must be just one end token
            ends = list(re.compile(end).finditer(text, start, whole))
            found = ends[0] if len(ends) == 1 else None
        if found is None or (whole is not None and text[found.end() : whole].strip()):
            return None
        return found.end()

    # The end of a conversation

    def _with_end(self, rendered: Rendered, messages: list[Message], where: str) -> Rendered:
        """Append the end token to a conversation that ends with the assistant and without any end-of-turn token."""
        text, turns = rendered.text, rendered.turns
        if self._ends is None or self._ends.last or not turns or turns[-1].message != len(messages) - 1:
            return rendered
        if self._ends.call and messages[-1].get("tool_calls"):
            return rendered
        end = self._tokenizer.eos_token
        if not end:
            raise RowError(
                "neither the chat template nor the tokenizer has an end token", where=where,
                why="a model trained on this would never stop",
                fix="set data.chat_template to a template that ends each turn, or the tokenizer's eos_token",
            )  # fmt: skip
        return Rendered(text + end, (*turns[:-1], Turn(turns[-1].message, turns[-1].start, len(text) + len(end))))


def _template_texts(template: Any) -> list[str]:
    return [template] if isinstance(template, str) else [str(text) for text in dict(template).values()]


def _cannot_derive(message: int, where: str, why: str) -> RowError:
    return RowError(
        f"cannot tell which tokens the assistant says in message {message + 1}", where=where, why=why,
        fix="put {% generation %} blocks into the template (data.chat_template), or set data.loss_on: all",
    )  # fmt: skip


def _with_text(messages: Sequence[Message]) -> list[Message]:
    """Content None beside a call becomes "": of the templates that matter some fail on None, some write the word None."""
    return [message if message.get("content") is not None else message | {"content": ""} for message in messages]


def _require_calls(rendered: Rendered, messages: list[Message], where: str) -> None:
    """A template that knows no tools writes the empty content of a calling turn and leaves out the call."""
    for turn in rendered.turns:
        for call in messages[turn.message].get("tool_calls") or []:
            name = str((call.get("function") or call).get("name"))
            if name not in rendered.text[turn.start : turn.stop]:
                raise RowError(
                    f"the chat template does not write the call of `{name}` in message {turn.message + 1}", where=where,
                    why="the model would learn to say what is left of the turn without it",
                    fix="use a model whose template knows tools, or drop the row (data.bad_rows: skip)",
                )  # fmt: skip


# Marks ----------------------------------------------------------------------------------------------------------------


def _text_of(message: Message) -> str:
    """The text of the content; of a call, its function's name."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    if isinstance(content, str) and content.strip():
        return content
    calls = message.get("tool_calls") or []
    return str((calls[-1].get("function") or calls[-1]).get("name") or "") if calls else ""


def _calling(arguments: dict[str, str] | str) -> Message:
    call = {"type": "function", "id": CALL_ID["tool_call_id"], "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _common_start(one: str, other: str) -> str:
    same = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(same, min(len(one), len(other)))]


def _could_say(message: Message, said: str) -> bool:
    text = _text_of(message).strip()
    return text in said or text.rsplit("</think>", 1)[-1].strip() in said


# Not the reasoning: templates drop it from earlier turns, and then its mark would stand in for the content's.
MARKED_FIELDS = ("content", "tool_calls")


class _Marks:
    """Messages with a start and an end mark inside the outer whitespace of every text in them, each text its own pair.

    `in_the_middle`: what others than the assistant say has its end mark in the middle instead.
    """

    def __init__(self, messages: Sequence[Message], *, in_the_middle: bool = False) -> None:
        self._texts: list[tuple[int, str]] = []  # of each pair of marks: its message, and what of its text follows the end mark
        self._in_the_middle = in_the_middle
        self.messages = [self._marked(message, i) for i, message in enumerate(messages)]

    @property
    def too_many(self) -> bool:
        return 2 * len(self._texts) >= LAST_MARK - FIRST_MARK

    def _marked(self, message: Message, i: int) -> Message:
        edges = message.get("role") == "assistant" or not self._in_the_middle
        return message | {key: self._around(message[key], i, edges) for key in MARKED_FIELDS if key in message}

    def _around(self, value: Any, i: int, edges: bool) -> Any:
        if isinstance(value, str) and value.strip() and not self.too_many:
            core, mark = value.strip(), FIRST_MARK + 2 * len(self._texts)
            at = value.find(core)
            half = len(core) if edges else len(core) // 2
            self._texts.append((i, core[half:]))
            start = chr(mark) if edges else ""
            return f"{value[:at]}{start}{core[:half]}{chr(mark + 1)}{core[half:]}{value[at + len(core) :]}"
        if isinstance(value, list):
            return [self._around(item, i, edges) for item in value]
        if isinstance(value, dict):
            return {key: item if key in {"type", "id"} else self._around(item, i, edges) for key, item in value.items()}
        return value

    def places(self, marked: str, text: str) -> tuple[dict[int, int], dict[int, int], set[int]]:
        """For each message, where its first text starts and its last one ends, in the text without marks.

        Where a text is repeated the first place counts (Harmony names a call again in its response); the third value
        is the messages it happens to.
        """
        starts: dict[int, int] = {}
        stops: dict[int, int] = {}
        seen: set[str] = set()
        repeated: set[int] = set()
        for before, found in enumerate(MARKS.finditer(marked)):
            number, is_stop = divmod(ord(found[0]) - FIRST_MARK, 2)
            (message, rest), at = self._texts[number], found.start() - before
            if found[0] in seen:
                repeated.add(message)
            elif not is_stop:
                starts.setdefault(message, at)
            elif text.startswith(rest, at):
                stops[message] = at + len(rest)
            seen.add(found[0])
        return starts, stops, repeated
