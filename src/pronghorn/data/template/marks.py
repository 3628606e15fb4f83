"""Where a template puts each text of a conversation, and which it leaves out: found by private-use characters around them.

The conversation is rendered twice, plainly and with a start and an end mark around every text in it. When taking the marks out
again gives the plain text, they show where each text went, and a text whose marks are gone is not in it. Marks are characters
that the row itself does not use (icon fonts use some).
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import Any, Literal

from pronghorn.data.template.rendering import RowError

Message = dict[str, Any]
Tools = Sequence[Message] | None
What = Literal["content", "reasoning", "name", "argument"]

PRIVATE = (0xF0000, 0xFFFFD), (0x100000, 0x10FFFD)  # the private-use planes
IS_PRIVATE = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in PRIVATE) + "]")
REASONING = ("reasoning_content", "thinking", "reasoning")  # what models' templates call it
THINK_TAG = re.compile(r"(</?think>)")  # templates take a content apart there
# What a template may write differently without losing it: escapes of JSON, of Python's repr and of HTML, and whitespace.
ESCAPED = re.compile(r"\\u[0-9a-fA-F]{4}|\\[nrtbf]|&#?\w+;|[\s\\\"'<>&]|[^\x00-\x7f]")


class Alphabet:
    """A run of characters to mark with: two for each text, and at its end two that are a message by themselves."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.texts = first, (last - first - 1) // 2
        self.probe, self.later = chr(last), chr(last - 1)
        self.any = re.compile(f"[{chr(first)}-{chr(last)}]")

    def around(self, number: int) -> tuple[str, str]:
        return chr(self.first + 2 * number), chr(self.first + 2 * number + 1)


@lru_cache(maxsize=64)
def _free(used: frozenset[str]) -> Alphabet:
    """The longest run of private-use characters that are not among these."""
    borders = sorted({ord(letter) for letter in used} | {end for first, last in PRIVATE for end in (first - 1, last + 1)})
    return Alphabet(*max(((a + 1, b - 1) for a, b in pairwise(borders)), key=lambda run: (run[1] - run[0], -run[0])))


ALPHABET = _free(frozenset())


def alphabet_for(texts: Iterable[Any]) -> Alphabet:
    used = {letter for text in texts if isinstance(text, str) and not text.isascii() for letter in IS_PRIVATE.findall(text)}
    return _free(frozenset(used)) if used else ALPHABET


@dataclass(frozen=True, slots=True)
class Slot:
    """One text of a message."""

    message: int
    what: What
    core: str  # without the whitespace around it
    call: int = 0  # of the message's calls, which
    before: int = 0  # letters of the core before its end mark (all of them, but for marks in the middle)
    around: tuple[str, str] = ("", "")  # the whitespace around it


@dataclass(frozen=True, slots=True)
class Lost:
    """Something that a message holds and its rendered turn does not."""

    message: int
    what: str  # "its reasoning", "the call of `f`", ...


def lost_error(lost: Sequence[Lost], messages: Sequence[Message], where: str) -> RowError:
    one = lost[0]
    what = f"the chat template drops {one.what}"
    if one.message < 0:
        why = "it does not support tools, so the model would train on calls of tools it has never seen"
        fix = "use a model whose template supports tools, remove the tools, or set data.lost: allow to train without them"
        return RowError(what, where=where, why=why, fix=fix)
    role, later = str(messages[one.message].get("role")), any(m.get("role") == "user" for m in messages[one.message + 1 :])
    why = "the template drops it, so the model would train on something other than the row"
    if one.what == "its reasoning" and later:
        why = "this template writes reasoning only after the last question, or not at all"
    elif one.what == "its reasoning":
        why = "this template does not support reasoning"
    what += f" in message {one.message + 1} ({role})" + (f" (and {len(lost) - 1} more)" if len(lost) > 1 else "")
    fix = "use a template that writes it, remove it from the row, set data.lost: allow to train without it, or "
    return RowError(what, where=where, why=why, fix=fix + "data.bad_rows: skip to drop the row")


def ways_to_mark(messages: Sequence[Message]) -> Iterator[dict[str, bool]]:
    """Options of `Marks`, from those that tell most to those that disturb a template least."""
    if any(message.get("role") == "assistant" and "</think>" in str(message.get("content")) for message in messages):
        yield {"split": False}
    yield from ({}, {"empty": False}, {"in_the_middle": True, "empty": False})


class Marks:
    """Messages with marks inside the outer whitespace of every text, each text its own pair.

    `in_the_middle`: what others than the assistant say has one mark in its middle instead, where templates do not look.
    `empty`: a message that says nothing is marked, too. `split`: what the assistant says is marked between its tags.
    `trimmed`: without the whitespace around each text.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        alphabet: Alphabet = ALPHABET,
        *,
        in_the_middle: bool = False,
        empty: bool = True,
        split: bool = True,
        trimmed: bool = False,
    ) -> None:
        self.slots: list[Slot] = []
        self.alphabet, self._trimmed = alphabet, trimmed
        self._in_the_middle, self._empty, self._split = in_the_middle, empty, split
        self.messages = [self._marked(message, i) for i, message in enumerate(messages)]

    def trimmed(self, messages: Sequence[Message]) -> Marks:
        """The same marks in the same messages, without the whitespace around their texts."""
        return Marks(
            messages, self.alphabet, in_the_middle=self._in_the_middle, empty=self._empty, split=self._split, trimmed=True
        )

    @property
    def too_many(self) -> bool:
        return len(self.slots) >= self.alphabet.texts

    def _marked(self, message: Message, i: int) -> Message:
        edges = message.get("role") == "assistant" or not self._in_the_middle
        self._mark_blank = self._empty and says_nothing(message)
        changed = dict(message)
        for key in REASONING:
            if isinstance(message.get(key), str):
                changed[key] = self._around(message[key], i, "reasoning", edges=edges)
        if "content" in message:
            changed["content"] = self._content(message["content"], i, edges, message.get("role") == "assistant")
        if message.get("tool_calls"):
            changed["tool_calls"] = [self._call(call, i, number) for number, call in enumerate(message["tool_calls"])]
        return changed

    def _content(self, value: object, i: int, edges: bool, speaks: bool) -> Any:
        if isinstance(value, list):
            return [
                part
                | {
                    key: self._around(part[key], i, "reasoning" if key == "thinking" else "content", edges=edges)
                    for key in ("text", "thinking")
                    if isinstance(part.get(key), str)
                }
                for part in value
            ]
        if not isinstance(value, str):
            return value
        parts = THINK_TAG.split(value) if speaks and self._split and "</think>" in value else []
        if not any(part.strip() and not THINK_TAG.fullmatch(part) for part in parts):
            return self._around(value, i, "content", edges=edges) if self._empty or not parts else value  # tags alone
        last = len(parts) - 1
        return "".join(
            part
            if THINK_TAG.fullmatch(part) or not part.strip()
            else self._around(part, i, "content", outer=(number == 0, number == last))
            for number, part in enumerate(parts)
        )

    def _call(self, call: Message, i: int, number: int) -> Message:
        inner = call.get("function")
        called: Message = inner if isinstance(inner, dict) else call
        marked = dict(called)
        if isinstance(called.get("name"), str):
            marked["name"] = self._around(called["name"], i, "name", number)
        if "arguments" in called:
            marked["arguments"] = self._argument(called["arguments"], i, number)
        return call | {"function": marked} if called is not call else marked

    def _argument(self, value: object, i: int, number: int) -> Any:
        if isinstance(value, str):
            return self._around(value, i, "argument", number) if value.strip() else value
        if isinstance(value, list):
            return [self._argument(item, i, number) for item in value]
        return {key: self._argument(item, i, number) for key, item in value.items()} if isinstance(value, dict) else value

    def _around(
        self, value: str, i: int, what: What, call: int = 0, *, edges: bool = True, outer: tuple[bool, bool] = (True, True)
    ) -> str:
        """`outer`: whether the text begins, and ends, here."""
        core = value.strip()
        if self.too_many or not (core or self._mark_blank):
            return value
        at = value.find(core) if core else len(value)
        half = len(core) if edges else len(core) // 2
        start, stop = self.alphabet.around(len(self.slots))
        lead, trail = value[:at], value[at + len(core) :]
        self.slots.append(Slot(i, what, core, call, half, (lead * outer[0], trail * outer[1])))
        marked = f"{start if edges else ''}{core[:half]}{stop}{core[half:]}"
        kept = (not (self._trimmed and one) for one in outer)
        return f"{lead * next(kept)}{marked}{trail * next(kept)}"

    def placed(self, marked: str, text: str) -> Placed:
        """Where the slots are in `text`, which is `marked` without its marks. Where a text is repeated the first place counts
        (Harmony names a call again in its response)."""
        starts: dict[int, int] = {}
        stops: dict[int, list[int]] = {}
        for before, found in enumerate(self.alphabet.any.finditer(marked)):
            number, is_stop = divmod(ord(found[0]) - self.alphabet.first, 2)
            if is_stop:
                stops.setdefault(number, []).append(found.start() - before)
            else:
                starts.setdefault(number, found.start() - before)
        at: list[tuple[int, int] | None] = []
        for number, slot in enumerate(self.slots):
            at.append(None)
            if number in stops:
                stop = stops[number][0]
                whole = slot.before == len(slot.core)
                start = starts.get(number) if whole else stop - slot.before
                if start is not None and (whole or text.startswith(slot.core, start)):
                    at[-1] = (start, stop + len(slot.core) - slot.before)
        placed = Placed(self, text, at)
        placed.repeated = {number: places for number, places in stops.items() if len(places) > 1 and at[number]}
        return placed


class Placed:
    """The places of a conversation's texts in its rendering."""

    def __init__(self, marks: Marks, text: str, at: list[tuple[int, int] | None]) -> None:
        self.marks, self.text, self.at = marks, text, at
        self.repeated: dict[int, list[int]] = {}  # slots that stand there more than once: where each time ends
        self.times: dict[int, int] = {}  # of those, how often in their own turn
        self.settle()

    def settle(self) -> None:
        count = len(self.marks.messages)
        speaks = {slot.message for slot, place in zip(self.marks.slots, self.at, strict=True) if place and slot.core}
        # Where an empty text would stand tells only of messages that hold nothing else.
        self.at = [
            None if not slot.core and slot.message in speaks else place
            for slot, place in zip(self.marks.slots, self.at, strict=True)
        ]
        self.first: list[int | None] = [None] * count  # where a message's first text starts
        self.stop: list[int | None] = [None] * count  # where its last one ends
        for number, (slot, place) in enumerate(zip(self.marks.slots, self.at, strict=True)):
            if place is not None:
                first, stop = self.first[slot.message], self.stop[slot.message]
                self.first[slot.message] = place[0] if first is None else min(first, place[0])
                ends = [place[1], *self.repeated.get(number, [])[1 : self.times.get(number, 1)]]
                self.stop[slot.message] = max(ends if stop is None else [stop, *ends])

    @cached_property
    def _in_order(self) -> list[tuple[int, int]]:
        """(start, message) of every text that was found."""
        return sorted((place[0], slot.message) for slot, place in zip(self.marks.slots, self.at, strict=True) if place)

    @cached_property
    def mixed(self) -> set[int]:
        """Messages between two of whose texts one of another message stands."""
        runs = [message for message, _ in groupby(message for _, message in self._in_order)]
        return {message for message, count in Counter(runs).items() if count > 1}

    def following(self, i: int) -> tuple[int, int | None]:
        """Where the next text begins that is not of message i, and whose it is; the end of the text where there is none."""
        at = bisect_left(self._in_order, (self.stop[i] or 0, -1))
        later = (self._in_order[k] for k in range(at, len(self._in_order)))
        return next(((start, message) for start, message in later if message != i), (len(self.text), None))

    def holds_another(self, i: int) -> bool:
        """Whether a text of another message stands here too, between two of this one: a tool's result that the template writes
        into every turn before it, for one."""
        first, stop = self.first[i], self.stop[i]
        return (
            first is not None
            and stop is not None
            and any(
                first < place < stop
                for number, places in self.repeated.items()
                if self.marks.slots[number].message != i
                for place in places
            )
        )

    def lost(self) -> Iterator[Lost]:
        reasoned: dict[int, list[bool]] = {}
        for slot, place in zip(self.marks.slots, self.at, strict=True):
            kept = place is not None and self._same(slot, place)
            if slot.what == "reasoning":
                reasoned.setdefault(slot.message, []).append(kept)
            elif not kept and self._says(slot):
                yield Lost(slot.message, self._name(slot, place))
        for message, kept_ones in reasoned.items():
            if sum(kept_ones) != 1 and any(
                slot.core for slot in self.marks.slots if slot.message == message and slot.what == "reasoning"
            ):
                yield Lost(message, "its reasoning")

    def _says(self, slot: Slot) -> bool:
        """Tags alone are no answer."""
        speaks = self.marks.messages[slot.message].get("role") == "assistant"
        return bool(THINK_TAG.sub("", slot.core).strip() if speaks and slot.what == "content" else slot.core)

    def _same(self, slot: Slot, place: tuple[int, int]) -> bool:
        written = self.text[slice(*place)]
        return written == slot.core or ESCAPED.sub("", written) == ESCAPED.sub("", slot.core)

    def _name(self, slot: Slot, place: tuple[int, int] | None) -> str:
        if slot.what in ("name", "argument"):
            calls = self.marks.messages[slot.message]["tool_calls"]
            called = calls[slot.call].get("function") or calls[slot.call]
            name = self.marks.alphabet.any.sub("", str(called.get("name")))
            return f"the call of `{name}`" if slot.what == "name" else f"an argument of the call of `{name}`"
        several = sum(other.message == slot.message and other.what == "content" for other in self.marks.slots) > 1
        return (
            "its content as it is (the template rewrites it)"
            if place is not None
            else ("part of its content" if several else "its content")
        )


def lost_values(messages: Sequence[Message], spans: Sequence[tuple[int, int, int]], text: str) -> Iterator[Lost]:
    """Names and numbers among the arguments of calls, which carry no marks; `spans`: (message, start, stop)."""
    for i, start, stop in spans:
        for call in messages[i].get("tool_calls") or []:
            called = call.get("function") or call
            said = text[start:stop]
            if any(not any(form in said for form in forms) for forms in _leaves(called.get("arguments"))):
                yield Lost(i, f"an argument of the call of `{called.get('name')}`")


def _leaves(value: object) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield (str(key), json.dumps(str(key))[1:-1])
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None and not isinstance(value, str):
        yield (json.dumps(value), str(value))


def lost_by_text(messages: Sequence[Message], tools: Tools, text: str) -> list[Lost]:
    """Without marks: what of the messages cannot be read in the text."""
    lost = lost_tools(tools, text)
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and content.strip() not in text:
            lost.append(Lost(i, "its content as it is (the template rewrites it)"))
        for key in ("reasoning_content", "thinking"):
            if isinstance(message.get(key), str) and message[key].strip() not in text:
                lost.append(Lost(i, "its reasoning"))
        for call in message.get("tool_calls") or []:
            if str((call.get("function") or call).get("name")) not in text:
                lost.append(Lost(i, f"the call of `{(call.get('function') or call).get('name')}`"))
    return lost


def lost_tools(tools: Tools, text: str) -> list[Lost]:
    names = [str((tool.get("function") or tool).get("name") or "") for tool in tools or [] if isinstance(tool, dict)]
    gone = [name for name in names if name not in text]
    return [Lost(-1, f"the tool `{gone[0]}`")] if gone else []


def says_nothing(message: Message) -> bool:
    """Tags of thinking alone are nothing."""
    said = [message.get(key) for key in ("content", *REASONING)]
    return not message.get("tool_calls") and not any(
        THINK_TAG.sub("", text).strip() if isinstance(text, str) else text for text in said
    )
