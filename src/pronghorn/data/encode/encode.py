"""Examples into token rows: which tokens they become, and which of those carry loss, checked by decoding them.

The text is tokenized whole, as it will be when the model is used. The tokens of each span that carries loss must decode
to exactly that span; where a token straddles its border, the parts are tokenized one by one (which is how a prompt and
its answer meet at inference), and checked again. Rows that fail come back as bad rows.

Where the tokenizer allows it, a text is put together of the tokens of its words, which gives the same and is faster (words.py).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from pronghorn.data.encode.encode_groups import rows_of_groups
from pronghorn.data.encode.tokens import Ints, Span, TokenRow, record_batch
from pronghorn.data.encode.words import words_of
from pronghorn.data.preference.preference_rows import Group
from pronghorn.data.read.formats import Example
from pronghorn.data.read.source_files import BadRow, excerpt
from pronghorn.data.template.chat_messages import asks_to_train, only_read
from pronghorn.data.template.rendering import RowError
from pronghorn.data.template.templates import ChatTemplate, chat_template
from pronghorn.errors import DataError
from pronghorn.hf_types import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

LossOn = Literal["auto", "assistant", "completion", "all"]
Lose = Literal["refuse", "allow"]  # recipe.Data.lost
Controls = Literal["escape", "refuse", "keep"]  # recipe.Data.control_tokens
Told = dict[str, int]  # counts of `Note`, by name
Said = tuple[str, Sequence[Span], Sequence[Span], str]  # as of `_text_and_spans`
T = TypeVar("T")


class Encoder:
    """One tokenizer and one choice of what carries loss."""

    def __init__(
        self, tokenizer: Tokenizer, loss_on: LossOn = "auto", lost: Lose = "refuse", controls: Controls = "escape"
    ) -> None:
        self._tokenizer, self._loss_on, self._lost, self._controls = tokenizer, loss_on, lost, controls
        self._backend = tokenizer.backend_tokenizer
        self._words = words_of(self._backend)
        self._chat: ChatTemplate | None = None
        # What the tokenizer itself puts before a plain text: [<bos>] or nothing.
        framed = self._backend.encode("", add_special_tokens=True).ids
        self._before_text: list[int] = [i for i in framed if i == tokenizer.bos_token_id][:1]

    def prepare_for(self, example: Example) -> None:
        """Probe the chat template now, so that what is wrong with it is said once and not for every row."""
        if example.kind == "chat" and self._chat is None:
            self._chat = chat_template(self._tokenizer)

    def encode(self, example: Example, *, apart: bool = False) -> TokenRow:
        """Raises RowError when this row cannot be encoded exactly. `apart`: each part that carries loss is tokenized by
        itself, as an answer is when a model gives it."""
        return self._row(example, self._text_and_spans(example), apart)

    def _row(self, example: Example, said: Said, apart: bool = False) -> TokenRow:
        text, spans, literal, lost = said
        before = self._before_text if example.kind != "chat" else []
        if before and text.startswith(self._tokenizer.bos_token):
            before = []
        ids, runs = self._tokens(text, spans, example.where, literal if self._controls == "escape" else (), apart)
        if self._loss_on == "all" or example.kind == "text":
            runs = [(0, len(ids))]
        if before:
            ids = np.concatenate([np.array(before, np.int32), ids])
            runs = [(start + len(before), stop + len(before)) for start, stop in runs]
        return TokenRow(ids, tuple(runs), example.where, example.to_json(), lost, len(literal))

    def encode_many(self, groups: Sequence[Group]) -> tuple[Any, list[BadRow], Told]:
        """A record batch of the rows that could be encoded, the others, and how many of the first are not as given."""
        if groups[0].roles and self._loss_on == "all":
            raise DataError(
                "data.loss_on: all cannot be used with preference data", where=groups[0].where,
                why="preference objectives compare answers, not prompts", fix="remove data.loss_on",
            )  # fmt: skip
        answers = iter(self._try_all([answer for group in groups for answer in group.answers]))
        made = [[next(answers) for _ in group.answers] for group in groups]
        rows, bad, told = rows_of_groups(groups, made, lambda example: self._try(lambda: self.encode(example, apart=True)))
        told |= {"lost": sum(bool(row.lost) for row in rows), "controls": sum(bool(row.controls) for row in rows)}
        return record_batch(rows), bad, told

    def _try_all(self, examples: Sequence[Example]) -> list[TokenRow | RowError]:
        # All texts first, then all tokens. A template runs through Python, a tokenizer through tables of megabytes; in turn,
        # each pushes the other out of the processor's cache: 1.40 instead of 1.08 ms a row (two ARM cores, 1 MB of L2 each).
        if examples and examples[0].asks:
            return [self._try(self._asked, example) for example in examples]
        texts = [self._try(self._text_and_spans, example) for example in examples]
        return [
            said if isinstance(said, RowError) else self._try(self._row, example, said)
            for example, said in zip(examples, texts, strict=True)
        ]

    @staticmethod
    def _try(work: Callable[..., T], *given: object) -> T | RowError:
        try:
            return work(*given)
        except RowError as error:
            return error

    def _asked(self, example: Example) -> TokenRow:
        """A prompt as the model is given it. Nothing of it carries loss."""
        question = replace(example, messages=example.messages[: example.prompt_messages], completion="")
        self.prepare_for(question)
        named = self._chat.control_token(question.messages) if self._chat and self._controls != "keep" else ""
        if named:
            raise RowError(
                f"a message contains the control token {named}", where=example.where,
                why="inside a prompt it would start or end a turn, and prompts are given to the model whole",
                fix="remove it from the row, or set data.control_tokens: keep",
            )  # fmt: skip
        ids = np.array(self.prompt_ids(question), np.int32)
        return TokenRow(ids, (), example.where, example.to_json())

    def prompt_ids(self, question: Example) -> list[int]:
        """What the model is given to answer: a conversation and the generation prompt, or a prompt."""
        self.prepare_for(question)
        if question.kind == "chat":
            assert self._chat is not None
            text, before = self._chat.prompt_text(question.messages, question.tools, question.where), []
        else:
            text, before = question.prompt, self._before_text
        return [*before, *self._backend.encode(text, add_special_tokens=False).ids]

    def _text_and_spans(self, example: Example) -> Said:
        """The text, the characters of it that carry loss, those that only look like control tokens, and what it lost."""
        if example.kind == "chat":
            return self._chat_text(example)
        if example.kind == "text" and self._loss_on not in {"auto", "all"}:
            raise DataError(
                f"data.loss_on: {self._loss_on} does not apply to plain text", where=example.where,
                why="plain text has no turns and no completion", fix="set data.loss_on: all, or remove it",
            )  # fmt: skip
        said = example.prompt + example.completion if example.kind == "completion" else example.text
        end = self._end_token(example.where)
        text = said if said.endswith(end) else said + end
        return text, [(len(example.prompt), len(text))] if example.kind == "completion" else (), (), ""

    def _chat_text(self, example: Example) -> Said:
        self.prepare_for(example)
        assert self._chat is not None
        messages, allowed = example.messages, self._lost == "allow"
        if self._loss_on == "all":
            rendered = self._chat.plain(messages, example.tools, example.where, allow_lost=allowed)
            trained = []
        else:
            _refuse_others_trained(example)
            read_only = {i for i, message in enumerate(messages) if i < example.prompt_messages or only_read(message)}
            rendered = self._chat.render(messages, example.tools, example.where, allow_lost=allowed, read_only=read_only)
            turns = [turn for turn in rendered.turns if turn.message >= example.prompt_messages]
            if self._loss_on == "completion" and not example.prompt_messages:
                turns = turns[-1:]
            trained = [turn for turn in turns if turn.message not in read_only]
        literal = self._chat.control_tokens(rendered, messages)
        if literal and self._controls == "refuse":
            raise RowError(
                f"a message contains the control token {rendered.text[slice(*literal[0])]}", where=example.where,
                why="inside a text it would start or end a turn",
                fix="remove it from the row, or set data.control_tokens: escape (train on it as text) or keep",
            )  # fmt: skip
        spans: list[Span] = []
        for turn in trained:  # a template may write two turns in a row as one
            joined = spans and spans[-1][1] == turn.start
            spans[-1:] = [(spans[-1][0], turn.stop)] if joined else [*spans[-1:], (turn.start, turn.stop)]
        return rendered.text, spans, literal, rendered.lost[0].what if rendered.lost else ""

    def _end_token(self, where: str) -> str:
        if not self._tokenizer.eos_token:
            raise DataError(
                "the tokenizer has no end-of-sequence token", where=where, why="a model trained on this would never stop",
                fix="set eos_token in the model folder's tokenizer_config.json",
            )  # fmt: skip
        return str(self._tokenizer.eos_token)

    # Characters to tokens

    def _tokens(
        self, text: str, spans: Sequence[Span], where: str, literal: Sequence[Span] = (), apart: bool = False
    ) -> tuple[Ints, list[Span]]:
        """`literal`: parts of the text that look like control tokens and are none."""
        if literal or apart:
            ids, runs = self._tokens_of_parts(text, spans, literal)
        else:
            found = self._words.find(text, spans) if self._words is not None else None
            if found is not None and self._words is not None and not self._words.to_be_checked:
                return found
            ids, runs = self._tokens_of_text(text, spans)
            if found is not None and (found[0].tolist(), found[1]) != (ids.tolist(), runs):
                raise RuntimeError(f"{where}: the tokens of its words differ from those of the text")
        wrong = self._first_wrong(ids, runs, text, spans)
        if wrong is not None:
            start, stop = spans[wrong]
            decoded = self._decode(ids[slice(*runs[wrong])])
            raise RowError(
                "the tokens that would carry loss do not decode to the answer", where=where,
                why=f"the text is {excerpt(text[start:stop])!r}, its tokens decode to {excerpt(decoded)!r}",
                fix="drop the row (data.bad_rows: skip), or set data.loss_on: all",
            )  # fmt: skip
        return ids, runs

    def _tokens_of_text(self, text: str, spans: Sequence[Span]) -> tuple[Ints, list[Span]]:
        """Tokenized whole, or in parts where a token straddles a border."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids, runs = np.array(encoding.ids, np.int32), _runs(encoding, spans) if spans else []
        return (ids, runs) if self._first_wrong(ids, runs, text, spans) is None else self._tokens_of_parts(text, spans)

    def _tokens_of_parts(self, text: str, spans: Sequence[Span], literal: Sequence[Span] = ()) -> tuple[Ints, list[Span]]:
        borders = sorted({0, len(text), *itertools.chain.from_iterable(spans), *itertools.chain.from_iterable(literal)})
        plain = {start for start, _ in literal}
        ids: list[int] = []
        before = {0: 0}  # border -> how many tokens stand before it
        for start, stop in itertools.pairwise(borders):
            ids += (
                self._as_text(text[start:stop])
                if start in plain
                else self._backend.encode(text[start:stop], add_special_tokens=False).ids
            )
            before[stop] = len(ids)
        return np.array(ids, np.int32), [(before[start], before[stop]) for start, stop in spans]

    def _as_text(self, part: str) -> list[int]:
        """The tokens of a text that looks like a control token, none of which is one."""
        self._backend.encode_special_tokens = True
        try:
            ids = list(self._backend.encode(part, add_special_tokens=False).ids)
            if len(ids) == 1:  # not marked as special, so still found whole
                ids = [i for piece in (part[:1], part[1:]) for i in self._backend.encode(piece, add_special_tokens=False).ids]
            return ids
        finally:
            self._backend.encode_special_tokens = False

    def _decode(self, ids: Ints) -> str:
        return str(self._backend.decode(ids.tolist(), skip_special_tokens=False))

    def _first_wrong(self, ids: Ints, runs: Sequence[Span], text: str, spans: Sequence[Span]) -> int | None:
        """The first run whose tokens do not decode to its span."""
        for i, ((first, last), (start, stop)) in enumerate(zip(runs, spans, strict=True)):
            if not self._spells(ids, first, last, text[start:stop]):
                return i
        return None

    def _spells(self, ids: Ints, first: int, last: int, said: str) -> bool:
        decoded = self._decode(ids[first:last])
        if decoded == said:
            return True
        # A tokenizer may normalize first (Qwen: NFC), and then no tokens spell the text as it was written.
        normalizer = self._backend.normalizer
        expected = normalizer.normalize_str(said) if normalizer is not None else said
        if decoded == expected:
            return True
        # A SentencePiece decoder drops the space before the first token: look at it in its place.
        return self._decode(ids[:last]).removeprefix(self._decode(ids[:first])) == said


def _runs(encoding: Encoding, spans: Sequence[Span]) -> list[Span]:
    """The run of tokens of each span of characters: a border falls before the first token that starts at it or behind it."""
    starts = [start for start, _ in encoding.offsets]
    return [(bisect_left(starts, first), bisect_left(starts, last)) for first, last in spans]


def _refuse_others_trained(example: Example) -> None:
    for number, message in enumerate(example.messages, start=1):
        if message["role"] != "assistant" and asks_to_train(message):
            raise RowError(
                f"message {number} ({message['role']}) is marked as carrying loss", where=example.where,
                why="only assistant turns can carry loss (or everything: data.loss_on: all)",
                fix="remove the mark from this message, or set it to false",
            )  # fmt: skip
