"""The text of an answer while its tokens arrive: letters as soon as they are certain, stop strings, and why it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pronghorn.hf_types import Tokenizer

BROKEN = "\ufffd"  # of a letter whose last bytes are in the next token
OnText = Callable[[str, list[Any]], None]


class GrowingText:
    """`tokens` are those of `text`: the ones that only complete a stop string, and those after it, are no part of either."""

    def __init__(
        self, tokenizer: Tokenizer, ends: Sequence[int], stop: Sequence[str] = (), on_text: OnText | None = None
    ) -> None:
        """`ends`: tokens that end an answer. `on_text` gets each piece of text with the notes of its tokens."""
        self._tokenizer, self._ends, self._stop, self._on_text = tokenizer, set(ends), stop, on_text
        self.text, self.tokens, self.notes = "", list[int](), list[Any]()
        self.count = 0  # tokens, with the one that ended it
        self.stopped = False  # by a token or a string; else it was cut, or goes on
        self._window = self._read = 0  # tokens before which nothing changes any more; tokens whose text is known
        self._held = ""  # may be the beginning of a stop string
        self._waiting: list[Any] = []  # notes of tokens whose text was not handed on yet

    def add(self, token: int, note: object = None) -> bool:
        """Whether the answer is over."""
        self.count += 1
        if token in self._ends:
            self.stopped = True
            return True
        self.tokens.append(token)
        if note is not None:
            self._waiting.append(note)
        return self._stops(self._new_text())

    def finish(self) -> None:
        """What was held back turned out to be text."""
        self._send(self._held + self._new_text(last=True), last=True)
        self._held = ""

    def _new_text(self, *, last: bool = False) -> str:
        """The text of the tokens since the last call; a character of several tokens waits for its last one."""
        known = self._decode(self.tokens[self._window : self._read])
        text = self._decode(self.tokens[self._window :])
        if text.endswith(BROKEN) and not last:
            return ""
        self._window, self._read = self._read, len(self.tokens)
        return text[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _stops(self, text: str) -> bool:
        """Hands the text on, up to a stop string: whether there is one."""
        whole, self._held = self._held + text, ""
        if found := [at for stop in self._stop if (at := whole.find(stop)) >= 0]:
            self.stopped = True
            self._send(whole[: min(found)])
            while self.tokens and self._decode(self.tokens[:-1]).startswith(self.text):
                self.tokens.pop()
            return True
        held = max((_overlap(whole, stop) for stop in self._stop), default=0)
        self._held = whole[len(whole) - held :]
        self._send(whole[: len(whole) - held])
        return False

    def _send(self, text: str, *, last: bool = False) -> None:
        if not text and not (last and self._waiting):
            return
        notes, self._waiting = self._waiting, []
        self.text += text
        self.notes += notes
        if self._on_text is not None:
            self._on_text(text, notes)


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of the text begin the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
