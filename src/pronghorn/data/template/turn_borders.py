"""Where a turn begins and ends, between the texts that a template wrote.

What stands between two texts comes from the template alone, so the same words between the same kinds of messages are split at
the same place, and that is found once:

* A turn begins where the generation prompt ends. The conversation up to it is rendered with the generation prompt; what that
  writes behind the message before is held against what really stands there. A prompt that opens the thinking, before a turn
  without thoughts, is held against it piece by piece.
* A turn ends with what closes it. The conversation up to and including it is rendered as if it ended there; where what follows
  begins with the same, that closes the turn. Otherwise the template ends the last turn in another way than those inside (or
  writes a generation prompt unasked): then what closes an inner turn is what stands there whoever speaks next, without what
  opens every turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from pronghorn.data.read.spellings import Spelling
from pronghorn.data.template.marks import ALPHABET, Marks, Message, Placed

Attempt = Callable[[Sequence[Message], Spelling, bool], str | None]  # messages, tools and options of, with generation prompt
THINKS = re.compile(r"think|thought|reason|channel", re.IGNORECASE)  # what a generation prompt may open beyond the header
KEPT_SPLITS = 4096  # of gaps; those of calls with numbers in them are many
LONGEST_GAP = 4096


@dataclass(frozen=True, slots=True)
class Close:
    """How many letters behind a turn's last text close it, and what is missing there (an end that only inner turns have)."""

    letters: int
    missing: str = ""
    ended: bool = True  # with a token that ends it


@dataclass(frozen=True, slots=True)
class Row:
    """A rendered conversation: plain, marked, and where its texts are."""

    spelling: Spelling
    marks: Marks
    placed: Placed


def _places(part: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(re.escape(part), text)]


class Borders:
    def __init__(self, attempt: Attempt, special: re.Pattern[str], bos: str) -> None:
        self._attempt, self._special = attempt, special
        self._piece = re.compile(rf"(?:{special.pattern})|</?[A-Za-z][\w:.=-]*>|\[/?[A-Z_]+\]|.", re.DOTALL)
        self._starts: dict[tuple[str, ...], int | None] = {}
        self._stops: dict[tuple[str, ...], Close | None] = {}
        self._bos = bos
        self.prompt, self._before_user, self._always = self._generation_prompt()
        pieces = self._piece.findall(self.prompt)
        thinks = next((i for i, piece in enumerate(pieces) if len(piece) > 1 and THINKS.search(piece)), len(pieces))
        self._unopened, self._opening = "".join(pieces[:thinks]), "".join(pieces[thinks:])
        self._openers = {bos, *self._first_token(self._before_user), *special.findall(self.prompt)[:1]} - {""}

    def _first_token(self, text: str) -> list[str]:
        return [token for token in self._special.findall(text) if token != self._bos][:1]

    def _generation_prompt(self) -> tuple[str, str, bool]:
        """The generation prompt, what stands before a first question, and whether the prompt is written even unasked."""
        for before in ([], [{"role": "system", "content": "."}]):
            probe = ALPHABET.probe
            asked = Spelling([*before, {"role": "user", "content": probe}], None)
            plain, prompted = (self._attempt(asked.messages, asked, prompt) for prompt in (False, True))
            if prompted is None or prompted.count(probe) != 1:
                continue
            opening, tail = prompted.split(probe)
            if plain != prompted:
                shared = self._common(plain or "", prompted)
                return (prompted[len(shared) :] if probe in shared else ""), opening, False
            opener = self._first_token(opening)
            unasked = tail[tail.rfind(opener[0]) :] if opener and opener[0] in tail else ""
            return unasked, opening, bool(unasked)
        return "", "", False

    # Where a turn begins

    def start(self, row: Row, i: int) -> int | None:
        """None when that cannot be told."""
        first = row.placed.first[i]
        if first is None:
            return None
        before = next((j for j in range(i - 1, -1, -1) if row.placed.stop[j] is not None), None)
        begin = row.placed.stop[before] if before is not None else 0
        assert begin is not None
        if begin > first:
            return None
        gap = row.placed.text[begin:first]
        role = str(row.marks.messages[before].get("role")) if before is not None else ""
        key = (role, str(before == i - 1), gap)
        if key not in self._starts or len(gap) > LONGEST_GAP:
            self._remember(self._starts, key, self._begins(row, i, before, gap))
        split = self._starts[key]
        return None if split is None else self._behind_opening(row.placed.text, begin + split)

    def _behind_opening(self, text: str, at: int) -> int:
        """A text may itself begin with the thinking that the generation prompt opens."""
        begins = self._opening and text.startswith(self._opening, at) and text.endswith(self._unopened, 0, at)
        return at + len(self._opening) if begins else at

    @staticmethod
    def _remember(known: dict[Any, Any], key: object, value: object) -> None:
        if len(known) >= KEPT_SPLITS:
            known.clear()
        known[key] = value

    def _begins(self, row: Row, i: int, before: int | None, gap: str) -> int | None:
        """How much of the gap before a turn belongs to the prompt."""
        if before is None and gap.strip() in ("", self._bos):
            return gap.index(self._bos) + len(self._bos) if gap.strip() else 0  # the first message, without any header
        found = [at for at in (self._by_header(gap), self._by_tail(row, i, before, gap)) if at is not None]
        return max(found, default=None)

    def _by_header(self, gap: str) -> int | None:
        """The generation prompt, or all of it but the thinking that it opens, in the gap."""
        pieces = self._piece.findall(self.prompt)
        if not pieces:
            return None
        found = [(place, self._common(self.prompt, gap[place:])) for place in _places(pieces[0], gap)]
        if not found:
            return None
        place, same = max(found, key=lambda one: (len(one[1]), -one[0]))
        header = self._header(same, self.prompt)
        return place + len(header) if header else None

    def _header(self, same: str, prompt: str) -> str:
        """What `same` is of a generation prompt: all of it, or all but the thinking that it opens; "" when it is less."""
        rest = prompt[len(same) :]
        if not rest:
            return same
        pieces = self._piece.findall(same)
        while pieces and len(pieces[-1]) > 1 and THINKS.search(pieces[-1]):  # begun, and not gone on with
            rest = pieces.pop() + rest
        header = "".join(pieces)
        first = re.match(rf"\s*(?:{self._special.pattern}|</?[\w:.=-]+>|\w+)?", rest)
        opens_thinking = first is not None and THINKS.search(first[0])
        only_words = not self._special.search(rest) and self._special.search(header)
        return header if not rest.strip() or opens_thinking or only_words else ""

    def _by_tail(self, row: Row, i: int, before: int | None, gap: str) -> int | None:
        """What the conversation up to the turn ends with, behind the last text, when the assistant is to speak."""
        if before is None or before != i - 1:
            return None
        prompted = self._attempt(row.marks.messages[:i], row.spelling, True)
        tail = self._behind(prompted, row, before)
        if tail is None:
            return None
        if gap.startswith(tail):
            return len(tail)
        same = self._common(tail, gap)
        if same == gap or tail[len(same) :] == self.prompt:  # a turn that goes on without a header of its own
            return len(same)
        header = self._header(same, tail)
        return len(header) if header else None

    def opened_again(self, row: Row, i: int, end: str) -> bool:
        """Whether the end token and a header stand between a message's text and its calls: the model would stop in between."""
        if not end or not self._unopened.strip():
            return False
        own = sorted(
            (place, slot.what == "content")
            for slot, place in zip(row.marks.slots, row.placed.at, strict=True)
            if slot.message == i and place is not None and slot.what != "reasoning"
        )
        between = (row.placed.text[a[1] : b[0]] for (a, is_text), (b, other_is) in pairwise(own) if is_text != other_is)
        again = re.compile(rf"{re.escape(end)}\s*{re.escape(self._unopened.strip())}")
        return any(again.search(gap) for gap in between)

    # Where a turn ends

    def stop(self, row: Row, i: int) -> tuple[int, Close] | None:
        said = row.placed.stop[i]
        if said is None:
            return None
        behind, following = row.placed.following(i)
        gap = row.placed.text[said:behind]
        # Those of messages without a mark, too, if they stand in the gap.
        roles = [str(message.get("role")) for message in row.marks.messages[i + 1 : None if following is None else following]]
        roles += [str(row.marks.messages[following].get("role"))] if following is not None else []
        key = (*roles, str(bool(row.marks.messages[i].get("tool_calls"))), gap)
        if key not in self._stops or len(gap) > LONGEST_GAP:
            self._remember(self._stops, key, self._ends(row, i, roles, gap) if roles else self._ends_last(row, i, gap))
        close = self._stops[key]
        return None if close is None else (said + close.letters, close)

    def _ends(self, row: Row, i: int, roles: Sequence[str], gap: str) -> Close | None:
        as_last = self._behind(self._attempt(row.marks.messages[: i + 1], row.spelling, False), row, i)
        if as_last is not None and self._always:
            as_last = as_last.removesuffix(self.prompt)
        if as_last is not None and self._special.search(as_last) and gap.startswith(as_last):
            return Close(len(as_last.rstrip()))
        closing = self._closing(row, i, roles, gap)
        if self._special.search(closing):
            return Close(len(closing))
        shared = self._common(as_last, gap) if as_last is not None else closing
        return Close(len(min(closing, shared, key=len).rstrip()), ended=False)

    def _ends_last(self, row: Row, i: int, gap: str) -> Close | None:
        gap = gap.removesuffix(self.prompt) if self._always else gap
        followed = dict(self._followers(row, i))
        tokens = list(self._special.finditer(gap))
        if tokens and any(text.startswith(gap) for role, text in followed.items() if role != "assistant"):
            return Close(len(gap.rstrip()))
        role = "tool" if "tool" in followed else "user"
        closing = self._closing(row, i, [role], followed[role]) if role in followed else ""
        ended = bool(self._special.search(closing))
        if ended and not gap.startswith(closing) and closing.startswith(gap.rstrip()):
            return Close(len(gap.rstrip()), closing[len(gap.rstrip()) :])
        if closing.strip() and gap.startswith(closing):
            return Close(len(closing.rstrip()), ended=ended)
        if tokens:  # the last turn has an end of its own
            return Close(tokens[-1].end())
        end = re.search(rf"(?:\s*(?:{self._special.pattern}))+$", closing)
        return Close(len(gap.rstrip()), end[0] if end else "", ended=False)

    def _closing(self, row: Row, i: int, roles: Sequence[str], gap: str) -> str:
        """What closes a turn that messages of these roles follow, up to its last token; without one, all that looks like it."""
        # One that is written as these are tells nothing.
        followers = {other: text for other, text in self._followers(row, i) if other not in roles and text != gap}
        shared = {other: self._closed(self._common(gap, text)) for other, text in followers.items()}
        # Blank: a template that joins the two messages. The generation prompt may begin as a message of another role does.
        speakers = [text for other, text in shared.items() if text.strip() and other != "assistant"]
        prompted = shared.get("assistant", "")
        if speakers or self._special.search(prompted):
            return min(speakers or [prompted], key=len)
        if roles[-1] == "user":
            same = self._common_end(gap, self._before_user)
            if self._special.search(opened := self._closed(gap[: len(gap) - len(same)])):
                return opened
        return prompted if prompted.strip() else ""

    def _closed(self, text: str) -> str:
        """Without what opens a turn at its end, and up to its last token."""
        pieces = self._piece.findall(text)
        while pieces and (pieces[-1] in self._openers or not pieces[-1].strip()):
            pieces.pop()
        tokens = list(self._special.finditer("".join(pieces)))
        return "".join(pieces)[: tokens[-1].end()] if tokens else "".join(pieces)

    def _followers(self, row: Row, i: int) -> Iterator[tuple[str, str]]:
        """What stands behind a turn, up to the next text, for each role that may speak next."""
        messages, probe = row.marks.messages[: i + 1], row.marks.alphabet.probe
        results = [
            {"role": "tool", "content": probe, "name": "f", "tool_call_id": call.get("id", "call00000")}
            for call in messages[-1].get("tool_calls") or []
        ]
        user, system, later = (
            {"role": role, "content": mark}
            for role, mark in (("user", probe), ("system", probe), ("user", row.marks.alphabet.later))
        )
        for role, after, prompt in (
            ("tool", results, False),
            ("user", [user], False),
            ("assistant", [], True),
            ("system", [system, later], False),
        ):
            if after or role == "assistant":
                text = self._behind(self._attempt([*messages, *after], row.spelling, prompt), row, i, until=probe * bool(after))
                if text is not None:
                    yield role, text

    def count_repeats(self, row: Row) -> None:
        """A text that stands more than once in its own turn ends it where it last stands; Harmony names a call once more in the
        result, which is not the turn."""
        for i in {row.marks.slots[number].message for number in row.placed.repeated}:
            alone = self._attempt(row.marks.messages[: i + 1], row.spelling, False)
            for number in row.placed.repeated:
                if row.marks.slots[number].message == i and alone is not None:
                    row.placed.times[number] = max(1, alone.count(row.marks.alphabet.around(number)[1]))
        row.placed.settle()

    # Texts

    def _behind(self, marked: str | None, row: Row, i: int, until: str = "") -> str | None:
        """Behind the last text of message i, up to the next one (which is `until`, where given)."""
        if marked is None:
            return None
        places, own = [], set[str]()
        for number, slot in enumerate(row.marks.slots):
            if slot.message == i:
                own.update(row.marks.alphabet.around(number))
            if slot.message == i and row.placed.at[number] is not None:
                times = _places(row.marks.alphabet.around(number)[1], marked)[: row.placed.times.get(number, 1)]
                if not times:
                    return None
                places.append(times[-1] + 1 + len(slot.core) - slot.before)
        if not places:
            return None
        rest = re.sub(f"[{''.join(own)}]", "", marked[max(places) :])  # an empty text of its own may stand there
        following = row.marks.alphabet.any.search(rest)
        if until and (following is None or following[0] != until):
            return None
        return rest[: following.start()] if following else rest

    def _common(self, one: str, other: str) -> str:
        """How both begin, in whole pieces: special tokens, tags, letters."""
        length = 0
        for a, b in zip(self._piece.finditer(one), self._piece.finditer(other), strict=False):
            if a[0] != b[0]:
                break
            length = a.end()
        return one[:length]

    def _common_end(self, one: str, other: str) -> str:
        length = 0
        for a, b in zip(reversed(self._piece.findall(one)), reversed(self._piece.findall(other)), strict=False):
            if a != b:
                break
            length += len(a)
        return one[len(one) - length :]


def misspelt(row: Row, turns: Sequence[tuple[int, int, int]]) -> bool:
    """Whether the template wrote the spelling itself: the word None, parts as Python shows them, JSON in quotes."""
    think, call = row.spelling.name
    slots, at, text = row.marks.slots, row.placed.at, row.placed.text
    if call >= 2 and any(
        slot.what == "argument"
        and place is not None
        and (text[slice(*place)] != slot.core or text[place[0] - 1 : place[0]] == '"')
        for slot, place in zip(slots, at, strict=True)
    ):
        return True
    wrong = [*(["None"] if call in (1, 3) else []), *(["'type'", '"type"'] if think == 4 else [])]
    for i, begin, end in turns if wrong else ():
        own = sorted(place for slot, place in zip(slots, at, strict=True) if slot.message == i and place is not None)
        borders = [begin, *chain.from_iterable(own), end]
        if any(one in text[start:stop] for start, stop in zip(borders[::2], borders[1::2], strict=True) for one in wrong):
            return True
    return False
