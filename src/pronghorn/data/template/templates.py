"""A conversation through the tokenizer's chat template, and exactly which characters of it the assistant says.

A turn's span is what the model has to produce: everything after the generation prompt, up to and including what closes the
turn (not the newline after it). Where it lies is never guessed:

1. The conversation is rendered twice, plainly and with marks around every text in it (marks.py). They show where each text
   went, and what the template leaves out; what stands between two texts is split once for all rows (turn_borders.py).
2. A template with `{% generation %}` blocks says itself what of a turn is trained: never the turn's header, always its end.
3. Where the marks disturb the template, each turn is rendered as a prefix of the conversation; the prefix that ends with the
   generation prompt must be a prefix of the whole.
4. Otherwise it is an error that names the row.

A plain conversation whose gaps are known from earlier rows is rendered once, and held against them (known_shapes.py).

What a message holds must be in the text: a row of which the template leaves something out is refused, or counted (data.lost).

A template without any end-of-turn token teaches no model to stop: the tokenizer's end token is appended to such a
conversation when it ends with the assistant; turns inside it end with the text that closes them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pronghorn.data.encode.tokens import Span, render_tracked
from pronghorn.data.read.spellings import Spelling, kind, spelling, spellings
from pronghorn.data.template.chat_messages import texts_in
from pronghorn.data.template.known_shapes import KnownShapes, Rendered, Turn
from pronghorn.data.template.marks import (
    Marks,
    Message,
    Tools,
    alphabet_for,
    lost_by_text,
    lost_error,
    lost_tools,
    lost_values,
    says_nothing,
    ways_to_mark,
)
from pronghorn.data.template.outer_space import Gaps, carried, span
from pronghorn.data.template.rendering import RowError, special_tokens, within_limits
from pronghorn.data.template.turn_borders import Borders, Row, misspelt
from pronghorn.errors import DataError
from pronghorn.hf_types import Tokenizer

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
LOOKS_SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|</?s>|</?[a-z]+_of_[a-z]+>|\[/?[A-Z_]{3,}\]")
GIVE_IT_A_TEXT = "give it a text, remove it, or set data.bad_rows: skip to drop the row"
ASK, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


@lru_cache(maxsize=4)
def _probed(tokenizer: Tokenizer, template: str) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def chat_template(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's template, probed once."""
    return _probed(tokenizer, str(tokenizer.chat_template))


class ChatTemplate:
    """A template and what probing it once tells: how it wants to be called, its generation prompt, what ends a turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise DataError(
                "chat template missing: the data is conversations, but the tokenizer has no chat template",
                where=str(getattr(tokenizer, "name_or_path", "")),
                why="without a template, the format of a turn is unknown",
                fix="use an -Instruct model, set data.template: NAME or data.chat_template: FILE, or use prompt/completion",
            )
        self._tokenizer = tokenizer
        self._tracked = any(GENERATION_TAG.search(text) for text in _template_texts(tokenizer.chat_template))
        self._special = special_tokens(tokenizer)
        self._where = ""  # the row at hand: a template that runs away may do so in an attempt
        self._no_tools, self._options = self._how_to_call()
        self._borders = Borders(self._attempt, self._special, str(tokenizer.bos_token or ""))
        self._liked = self._probe_silence()  # kind of conversation -> spelling that lost nothing
        self._closings = self._probe_closings()
        self._known = KnownShapes(lambda plain: self._attempt(plain, Spelling(list(plain), None)))
        self._require_tokens()

    # Rendering

    def _render(self, messages: Sequence[Message], said: Spelling, where: str, prompt: bool = False) -> str:
        tools = said.tools or self._no_tools
        options = self._options(tools) | said.options

        def render() -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **options
                )
            )

        return within_limits(render, messages, where)

    def _attempt(self, messages: Sequence[Message], said: Spelling, prompt: bool = False) -> str | None:
        """For probes, marks and prefixes, which a template may refuse (a lone system message, two users in a row)."""
        try:
            return self._render(messages, said, self._where, prompt)
        except RowError:
            return None

    def _how_to_call(self) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
        """Some templates fail without a list of tools, some want it under another name."""
        today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"

        def other_names(tools: Tools) -> dict[str, Any]:
            return {"functions": json.dumps(tools or [], ensure_ascii=False, indent=4), "datetime": today}

        ways: list[tuple[Any, Callable[[Any], dict[str, Any]]]]
        ways = [(None, lambda _: {}), ([], lambda _: {}), (None, other_names)]
        for way in ways:
            self._no_tools, self._options = way
            if self._attempt([ASK, ANSWER], Spelling([], None)) is not None:
                return way
        return ways[0]

    def prompt_text(self, messages: Sequence[Message], tools: Tools = None, where: str = "") -> str:
        """The conversation so far, and the generation prompt."""
        said = spelling(messages, list(tools) if tools else None, self._liked.get(kind(messages), (0, 0)))
        return self._render(said.messages, said, where, prompt=True)

    def plain(self, messages: Sequence[Message], tools: Tools = None, where: str = "", allow_lost: bool = False) -> Rendered:
        """The whole conversation, when nobody asks who says what."""
        try:
            rendered = self.render(messages, tools, where, allow_lost=allow_lost)
        except CannotTellError as error:
            rendered = error.rendered
        return replace(rendered, turns=())

    def render(self, messages: Sequence[Message], tools: Tools = None, where: str = "", **options: Any) -> Rendered:
        """Options as of `render_at_length`."""
        self._where = where
        known = self._known.find(messages) if not tools else None
        if known is not None and not self._known.to_be_checked:
            return known
        rendered = self.render_at_length(messages, tools, where, **options)
        if known is not None and known != rendered:
            raise RuntimeError(f"{where}: known gaps and marks give different turns: {known.turns} and {rendered.turns}")
        if not tools and not rendered.lost:
            self._known.learn(messages, rendered)
        return rendered

    def render_at_length(
        self,
        messages: Sequence[Message],
        tools: Tools = None,
        where: str = "",
        *,
        allow_lost: bool = False,
        read_only: Collection[int] = (),
    ) -> Rendered:
        """The same, whatever is known from other rows. `read_only`: messages that are not trained on, whose reasoning a
        template may drop."""
        kind_of = kind(messages)
        tools = list(tools) if tools else None
        first: Rendered | None = None
        problem: RowError | None = None
        for said in self._spellings(messages, tools, kind_of):
            try:
                rendered = self._spoken(said, where)
            except RowError as error:
                problem = problem or error
                continue
            lost = tuple(one for one in rendered.lost if one.message not in read_only or one.what != "its reasoning")
            if not lost:
                if said.name != (0, 0):
                    self._liked[kind_of] = said.name
                return replace(rendered, lost=())
            first = first or replace(rendered, lost=lost)
        if first is None or (problem is not None and not isinstance(problem, CannotTellError) and not first.lost):
            assert problem is not None
            raise self._because_empty(problem, messages, tools) or problem
        if not allow_lost:
            raise lost_error(first.lost, messages, where)
        return first

    def _because_empty(self, problem: RowError, messages: Sequence[Message], tools: Tools) -> RowError | None:
        """The same problem in other words, if a text in an empty answer would solve it."""
        empty = [i for i, message in enumerate(messages) if message.get("role") == "assistant" and says_nothing(message)]
        filled = [message | {"content": "!"} if i in empty else message for i, message in enumerate(messages)]
        if isinstance(problem, CannotTellError) or not empty or self._attempt(filled, Spelling(filled, tools)) is None:
            return None
        return RowError(
            f"message {empty[0] + 1} (assistant) is empty", where=problem.where, why=problem.why, fix=GIVE_IT_A_TEXT
        )

    def _spellings(self, messages: Sequence[Message], tools: Tools, kind_of: tuple[bool, bool, bool]) -> Iterator[Spelling]:
        liked = self._liked.get(kind_of)
        if liked is not None:
            yield spelling(messages, tools, liked)
        yield from (said for said in spellings(messages, tools) if said.name != liked)

    def control_token(self, messages: Sequence[Message]) -> str:
        """The first that a message holds, as `control_tokens` finds them."""
        found = (token[0] for text in texts_in(messages) for token in self._special.finditer(text))
        return next((token for token in found if "think" not in token.lower()), "")

    def control_tokens(self, rendered: Rendered, messages: Sequence[Message]) -> list[Span]:
        """Where the texts of the messages hold control tokens of the tokenizer. Tags of thinking are none: templates read them
        in a content."""
        if not any(map(self._special.search, texts_in(messages))):
            return []
        found = (
            token.span()
            for start, stop in sorted(set(rendered.contents))
            for token in self._special.finditer(rendered.text, start, stop)
            if "think" not in token[0].lower()
        )
        return sorted(set(found))

    # One spelling

    def _spoken(self, said: Spelling, where: str) -> Rendered:
        """Raises RowError where the template refuses it, or where a turn cannot be found."""
        if self._tracked:
            tools = said.tools or self._no_tools
            options = self._options(tools) | said.options
            text, blocks = within_limits(
                lambda: render_tracked(self._tokenizer, said.messages, tools, **options), said.messages, where
            )
        else:
            text, blocks = self._render(said.messages, said, where), []
        speaking = [i for i, message in enumerate(said.messages) if message.get("role") == "assistant"]
        row = self._marked(said, text)
        if row is None and said.name != (0, 0):
            raise RowError("the chat template does not know this spelling", where=where)
        if row is None:
            turns = self._from_prefixes(text, said, speaking, where)
            rendered = self._with_end(text, turns, said, where, ended=self._closings[1])
            return replace(rendered, lost=tuple(lost_by_text(said.messages, said.tools, rendered.text)))
        lost = [*row.placed.lost(), *lost_tools(said.tools, text)]
        contents = tuple(place for place in row.placed.at if place is not None)
        turns, missing, ended = self._turns(row, speaking, where, Rendered(text, (), tuple(lost), contents))
        if misspelt(row, turns) or self._writes_none(said, text):
            raise RowError("the chat template does not know this spelling", where=where)
        if blocks:
            turns = _within_blocks(turns, blocks, row)
        rendered = self._with_end(text, turns, said, where, missing, ended)
        lost += lost_values(said.messages, turns, rendered.text)
        return replace(rendered, lost=tuple(dict.fromkeys(lost)), contents=contents)

    def _writes_none(self, said: Spelling, text: str) -> bool:
        """Whether the word None stands where an empty content would not be seen."""
        if said.name[1] not in (1, 3):
            return False
        empty = [message if message.get("content") is not None else message | {"content": ""} for message in said.messages]
        other = self._attempt(empty, said)
        return other is not None and text.count("None") > other.count("None")

    def _marked(self, said: Spelling, text: str) -> Row | None:
        """None where every way of marking disturbs the template."""
        alphabet = alphabet_for([text, *texts_in(said.messages)])
        for way in ways_to_mark(said.messages):
            marks = Marks(said.messages, alphabet, **way)
            marked = None if marks.too_many else self._attempt(marks.messages, said)
            if marked is not None and alphabet.any.sub("", marked) == text:
                row = Row(said, marks, marks.placed(marked, text))
                if "split" in way and any(row.placed.lost()):
                    continue  # the template takes texts apart at their tags
                if row.placed.repeated:
                    self._borders.count_repeats(row)
                return row
        return None

    def _trimmed(self, row: Row) -> tuple[Row, Gaps | None]:
        """The row without whitespace around its texts, and the way back; the row itself where there is none."""
        if not any(any(slot.around) for slot in row.marks.slots):
            return row, None
        marks = row.marks.trimmed(row.spelling.messages)
        marked = self._attempt(marks.messages, row.spelling)
        if marked is None:
            return row, None
        trimmed = Row(row.spelling, marks, marks.placed(marked, marks.alphabet.any.sub("", marked)))
        if trimmed.placed.repeated:
            self._borders.count_repeats(trimmed)
        back = carried(trimmed.placed, row.placed)
        return (trimmed, back) if back is not None else (row, None)

    def _turns(self, row: Row, speaking: Sequence[int], where: str, so_far: Rendered) -> tuple[list[Turn], str, bool]:
        """The turns, what is missing behind the last one, and whether it has an end."""
        turns: list[Turn] = []
        missing, ended = "", True
        gone = {one.message for one in so_far.lost}
        messages = row.spelling.messages
        trimmed, back = self._trimmed(row)
        for i in speaking:
            if i in row.placed.mixed:
                raise _cannot_tell(messages, i, where, "the template writes part of it after the following message", so_far)
            if messages[i].get("tool_calls") and self._borders.opened_again(row, i, str(self._tokenizer.eos_token or "")):
                raise _cannot_tell(messages, i, where, "the template writes its text and its calls as two turns", so_far)
            if row.placed.holds_another(i):
                raise _cannot_tell(messages, i, where, "the template writes another message inside it", so_far)
            repeated = [row.marks.slots[number] for number in row.placed.repeated]
            if any(slot.message == i and slot.what != "name" for slot in repeated):
                raise _cannot_tell(messages, i, where, "the template writes it more than once", so_far)
            start, stop = self._borders.start(trimmed, i), self._borders.stop(trimmed, i)
            if start is None or stop is None:
                found = self._by_prefix(so_far.text, row.spelling, i)
                if found is None and i in gone and row.placed.first[i] is None:
                    continue  # nothing of it is there; told as lost
                if found is None:
                    raise _cannot_tell(
                        messages,
                        i,
                        where,
                        "the template writes no generation prompt before it, or renders the conversation up to it differently"
                        if start is None
                        else "nothing shows where it ends",
                        so_far,
                    )
                turns.append(Turn(i, *found))
                missing, ended = "", self._closings[1]
            else:
                turns.append(Turn(i, *(span(back, start, stop[0]) if back is not None else (start, stop[0]))))
                missing, ended = stop[1].missing, stop[1].ended
            if len(turns) > 1 and turns[-1].start < turns[-2].stop:
                raise _cannot_tell(messages, i, where, "the template writes it before the end of the previous turn", so_far)
        return turns, missing, ended

    def _probe_silence(self) -> dict[tuple[bool, bool, bool], tuple[int, int]]:
        """A template that writes one turn more (or tags of a text) for the content "" beside a call gets None there."""
        for name in (1, 3):
            calls = [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}]
            said = [spelling([ASK, ANSWER | {"content": "", "tool_calls": calls}], None, (0, way)) for way in (name - 1, name)]
            texts = [self._attempt(one.messages, one) for one in said]
            if texts[0] is not None and texts[1] is not None and "None" not in texts[1]:
                more, fewer = (len(self._special.findall(text)) for text in texts if text is not None)
                return dict.fromkeys([(False, True, True), (True, True, True)], (0, name)) if fewer < more else {}
        return {}

    # Without marks: prefixes of the conversation

    def _probe_closings(self) -> tuple[tuple[str, ...], bool]:
        """What closes plain answers, and whether the last one has an end."""
        for before in ([], [{"role": "system", "content": "."}]):
            said = Spelling([*before, ASK, ANSWER, ASK, ANSWER], None)
            text = self._attempt(said.messages, said)
            row = self._marked(said, text) if text is not None else None
            stops = [self._borders.stop(row, i) for i in (len(before) + 1, len(before) + 3)] if row is not None else [None]
            if row is not None and all(stops):
                found = []
                for i, stop in zip((len(before) + 1, len(before) + 3), stops, strict=True):
                    said_at = row.placed.stop[i]
                    assert stop is not None
                    assert said_at is not None
                    found.append(row.placed.text[said_at : stop[0]])
                last = stops[-1]
                assert last is not None
                return tuple(dict.fromkeys(found)), last[1].ended
        return (), True

    def _from_prefixes(self, text: str, said: Spelling, speaking: Sequence[int], where: str) -> list[Turn]:
        turns: list[Turn] = []
        for i in speaking:
            found = self._by_prefix(text, said, i)
            if found is None or (turns and found[0] < turns[-1].stop):
                raise _cannot_tell(
                    said.messages,
                    i,
                    where,
                    "the conversation up to it is not a prefix of the whole conversation, or nothing shows where it ends",
                    Rendered(text, ()),
                )
            turns.append(Turn(i, *found))
        return turns

    def _by_prefix(self, text: str, said: Spelling, i: int) -> tuple[int, int] | None:
        before = self._attempt(said.messages[:i], said, prompt=True) if i else self._borders.prompt
        whole = self._attempt(said.messages[: i + 1], said)
        if not before or not text.startswith(before):
            return None
        last = i == len(said.messages) - 1
        content = str(said.messages[i].get("content") or "").strip()
        for closing in sorted(self._closings[0], key=len, reverse=True):
            # What it says and then what closes it: `<think>` before an answer "think" is not that.
            pattern = re.compile(rf"{re.escape(content)}\s*{re.escape(closing)}" if closing.strip() else re.escape(content))
            found = pattern.search(text, len(before)) if content else pattern.match(text, len(before))
            behind = text if last else whole
            if found and behind is not None and text.startswith(behind) and not behind[found.end() :].strip():
                return len(before), found.end()
            if found and not last and whole is not None and not text.startswith(whole) and closing.strip():
                return len(before), found.end()
        return None

    # The end of a conversation

    def _with_end(
        self, text: str, turns: Sequence[Turn], said: Spelling, where: str, missing: str = "", ended: bool = True
    ) -> Rendered:
        """Append the end to a conversation that ends with the assistant and without one."""
        if not turns or turns[-1].message != len(said.messages) - 1 or (ended and not missing):
            return Rendered(text, tuple(turns))
        end = missing or self._tokenizer.eos_token
        if not end:
            raise RowError(
                "neither the chat template nor the tokenizer has an end token", where=where,
                why="a model trained on this would never stop",
                fix="set data.chat_template to a template that ends each turn, or set the tokenizer's eos_token",
            )  # fmt: skip
        last, written = turns[-1], text
        if missing or text[last.stop :].strip():  # what the template writes behind it is not the turn's
            text = text[: last.stop]
        ended_turns = (*turns[:-1], Turn(last.message, last.start, len(text) + len(end)))
        return Rendered(text + end, ended_turns, written=written)

    def _require_tokens(self) -> None:
        """A template of the recipe's must fit the tokenizer: what ends a turn is one token."""
        if not getattr(self._tokenizer, "pronghorn_own_template", False):
            return
        vocabulary = self._tokenizer.get_vocab()
        for closing in self._closings[0]:
            if missing := [text for text in LOOKS_SPECIAL.findall(closing) if text not in vocabulary]:
                raise DataError(
                    f"the chat template ends turns with {missing[0]}, but the tokenizer has no such token",
                    where="data.chat_template",
                    why="it would be split into several tokens, and generation would not stop there",
                    fix="use the model's own template, data.template: chatml, or a template for this model",
                )


def _within_blocks(turns: Sequence[Turn], blocks: Sequence[Span], row: Row) -> list[Turn]:
    """A template's own {% generation %} blocks choose what of a turn is trained. A block may begin with the role's header,
    which the model never says, and end before the end; transformers tracks a block inside a macro at the wrong place, so blocks
    count only when they hold what the assistant says."""
    chosen: list[Turn] = []
    for turn in turns:
        said = row.placed.stop[turn.message]
        block = next((block for block in blocks if said is not None and block[0] < said <= block[1]), None)
        if block is not None:
            chosen.append(Turn(turn.message, max(turn.start, block[0]), turn.stop))
    return chosen if len(chosen) == len(blocks) else list(turns)


def _template_texts(template: str | dict[str, str]) -> list[str]:
    return [template] if isinstance(template, str) else [str(text) for text in dict(template).values()]


class CannotTellError(RowError):
    """The text is known, and not which of it the assistant says."""

    rendered: Rendered


def _cannot_tell(messages: Sequence[Message], i: int, where: str, why: str, rendered: Rendered) -> CannotTellError:
    fix = "add {% generation %} blocks to the template (data.chat_template), or set data.loss_on: all"
    what = f"cannot determine which tokens are the assistant's in message {i + 1}"
    if says_nothing(messages[i]):
        what, why = f"message {i + 1} (assistant) is empty", "for such a turn this chat template writes nothing to train on"
        fix = GIVE_IT_A_TEXT
    error = CannotTellError(what, where=where, why=why, fix=fix)
    error.rendered = rendered
    return error
