"""Plain conversations of a kind that was seen before: rendered once instead of twice, their turns read off what is known.

Between two texts of a plain conversation (messages of a role and a text, no tools) a template writes, as a rule, what it wrote
between two such texts of an earlier row: the gap. Gaps are kept from rows that went the long way (templates.py), by the roles
on both sides and by whether the conversation begins or ends there. A later row is put together from known gaps and its own
texts, and is rendered by the template all the same. Only if the two are equal to the letter, its turns are taken from the
gaps; any other row goes the long way, and so does whatever is not plain.

That gives what the long way gives: there, too, a turn begins and ends at a place in the gap that depends on nothing but the gap
and the roles around it (turn_borders.py). And it is not taken on trust: one row in CHECK_EVERY goes both ways, and a difference
is an error in this program, which stops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pronghorn.data.template.marks import Lost, Message

Span = tuple[int, int]
Place = tuple[str, str, bool, bool]  # the roles before and behind; whether the conversation begins, or ends, right there
PLAIN = {"role", "content"}
CHECK_EVERY = 64
ENOUGH_TRIES = 256  # by then at least half of the rows should be known; else to look is lost time


@dataclass(frozen=True, slots=True)
class Gap:
    """What stands between two texts, and where in it the turn before it stops and the turn behind it starts."""

    text: str
    stop: int
    start: int
    written: str | None = None  # of the last one: what the template wrote, where it was given another end


class Turn(NamedTuple):
    """Characters start:stop of the text are what the assistant says in messages[message]."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    turns: tuple[Turn, ...]
    lost: tuple[Lost, ...] = ()  # what the messages hold and the text does not
    contents: tuple[Span, ...] = ()  # where the text is the messages' own, and not the template's
    written: str = ""  # by the template, where an end was added to that

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple((turn.start, turn.stop) for turn in self.turns)


class KnownShapes:
    def __init__(self, plain: Callable[[Sequence[Message]], str | None]) -> None:
        """`plain`: what the template writes; None where it refuses."""
        self._plain = plain
        self._gaps: dict[Place, Gap] = {}
        self.hits = self._tries = 0

    def find(self, messages: Sequence[Message]) -> Rendered | None:
        """The conversation put together from known gaps; None if it has to go the long way."""
        if self._tries >= ENOUGH_TRIES and 2 * self.hits < self._tries:
            return None
        self._tries += 1
        places = _places(messages)
        if places is None:
            return None
        gaps = [self._gaps.get(place) for place in places]
        if None in gaps:
            return None
        known = _together(messages, gaps)  # type: ignore[arg-type]
        if self._plain(messages) != (known.written or known.text):
            return None
        self.hits += 1
        return known

    @property
    def to_be_checked(self) -> bool:
        """Whether the row that was found just now is one of those that go both ways."""
        return self.hits % CHECK_EVERY == 1

    def learn(self, messages: Sequence[Message], row: Rendered) -> None:
        """The gaps of a row that went the long way and lost nothing."""
        places = _places(messages)
        gaps = _gaps_of(messages, row) if places is not None and len(row.contents) == len(messages) else None
        if places is not None and gaps is not None:
            self._gaps.update(zip(places, gaps, strict=True))


def _places(messages: Sequence[Message]) -> list[Place] | None:
    """The place of every gap; None where a message is more than a role and one text without space around it."""
    for message in messages:
        content = message.get("content")
        if message.keys() != PLAIN or not isinstance(content, str) or not content or content != content.strip():
            return None
        if "</think>" in content:  # templates take it apart there
            return None
    roles = ["", *(str(message["role"]) for message in messages), ""]
    last = len(roles) - 2
    return [(roles[i], roles[i + 1], i <= 1, i + 1 >= last) for i in range(last + 1)]


def _together(messages: Sequence[Message], gaps: Sequence[Gap]) -> Rendered:
    parts, turns, contents = [gaps[0].text], list[Turn](), list[Span]()
    at = len(gaps[0].text)
    for i, message in enumerate(messages):
        before, behind = gaps[i], gaps[i + 1]
        end = at + len(message["content"])
        contents.append((at, end))
        if message["role"] == "assistant":
            turns.append(Turn(i, at - len(before.text) + before.start, end + behind.stop))
        parts += (message["content"], behind.text)
        at = end + len(behind.text)
    last = gaps[-1].written
    written = "" if last is None else "".join([*parts[:-1], last])
    return Rendered("".join(parts), tuple(turns), (), tuple(contents), written)


def _gaps_of(messages: Sequence[Message], row: Rendered) -> list[Gap] | None:
    """None where the row is not its texts in order, one turn for each of the assistant's, its borders in the gaps."""
    text, contents = row.text, row.contents
    if any(text[start:stop] != message["content"] for message, (start, stop) in zip(messages, contents, strict=True)):
        return None
    ends = [0, *(stop for _, stop in contents)]
    begins = [*(start for start, _ in contents), len(text)]
    if any(begin < end for begin, end in zip(begins, ends, strict=True)):
        return None
    if row.written[: ends[-1]] not in ("", text[: ends[-1]]):
        return None
    if [i for i, _, _ in row.turns] != [i for i, message in enumerate(messages) if message["role"] == "assistant"]:
        return None
    starts = {i: start - ends[i] for i, start, _ in row.turns}
    stops = {i + 1: stop - ends[i + 1] for i, _, stop in row.turns}
    gaps = [Gap(text[ends[i] : begins[i]], stops.get(i, 0), starts.get(i, 0)) for i in range(len(ends))]
    if row.written:
        gaps[-1] = replace(gaps[-1], written=row.written[ends[-1] :])
    return gaps if all(0 <= gap.stop <= len(gap.text) and 0 <= gap.start <= len(gap.text) for gap in gaps) else None
