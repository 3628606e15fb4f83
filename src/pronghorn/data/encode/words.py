"""The tokens of a text from the tokens of its words, which are looked up: what the tokenizer gives, in a quarter of its time.

A byte-level BPE tokenizer cuts a text at its added tokens (`<|im_end|>`), the rest by a regular expression into words, and
makes tokens of each word by itself. So the tokens of a text are those of its words, one after the other. Here the text is cut
in the same way, and the tokens of a word are asked for when it is first seen. Then their decoding is held against it, too:
tokens of such a tokenizer are bytes, so a text is spelt right if each of its words is.

This is done only where the two ways are the same by construction: for expressions that are known (PATTERNS), for letters whose
kind is beyond doubt and that no normalizer changes (EASY), for spans that begin and end between two words. Everything else goes
through the tokenizer, and one row in CHECK_EVERY goes both ways (encode.py): a difference is an error in this program.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pronghorn.data.encode.tokens import Ints, Span

CHECK_EVERY = 64
KEPT = 1 << 16  # words: about 20 MB; real texts say most of what they say with a fourth of that
LONGEST = 64  # letters of a word that is kept
ENOUGH = 1 << 17  # words looked up; by then at most one in RARE should be new, else to look is lost time
RARE = 4  # a new word takes ten times as long as a known one, and the tokenizer four times

# Beyond ASCII: Western and Central European letters, Cyrillic ones, typographic signs, currencies, arrows. None of them joins
# with another (so NFC leaves them alone), and none is a form of an ASCII letter in another case.
EASY = (
    (0, 0x7F),
    (0xA0, 0x148),
    (0x14A, 0x17E),
    (0x401, 0x401),
    (0x410, 0x44F),
    (0x451, 0x451),
    (0x2010, 0x2027),
    (0x2030, 0x205E),
    (0x20A0, 0x20BF),
    (0x2190, 0x21FF),
    (0x2212, 0x2212),
)
SPACE = "\t\n\x0b\x0c\r \xa0"  # of EASY

SHORT_FORMS = r"'s|'t|'re|'ve|'m|'ll|'d"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT2 = rf"{SHORT_FORMS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# The same between digits, each of which is cut out first: a blank before a digit is at the end of its piece.
GPT2_BETWEEN_DIGITS = rf"{SHORT_FORMS}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?![^\s\p{{N}}])|\s+"
CL100K = rf"(?i:{SHORT_FORMS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s|\p{{N}}%s"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
)
PATTERNS = {  # as they stand in tokenizer.json
    CL100K % "",  # Qwen 2, 2.5 and 3
    CL100K % "{1,3}",  # Llama 3
    O200K % (f"(?i:{SHORT_FORMS})?", f"(?i:{SHORT_FORMS})?", "{1,3}"),  # gpt-oss
    O200K % ("", "", ""),  # Mistral's Tekken
    GPT2,
}


def _byte_letters() -> list[str]:
    """How byte-level tokenizers write each byte: as the letter of that number, or, where it cannot be seen, as a later one."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    later = itertools.count(0x100)
    return [chr(byte if byte in seen else next(later)) for byte in range(256)]


BYTES = _byte_letters()


class WordTable:
    """The word look-up of one tokenizer, as `words_of` found it."""

    def __init__(self, backend: Any, word: re.Pattern[str], added: dict[str, int]) -> None:
        self._tokenize: Callable[[str], list[Any]] = backend.model.tokenize
        self._decode: Callable[..., str] = backend.decode
        self._words = word.findall
        longest_first = sorted(added, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})").split  # (?!) matches nothing
        self._added = {text: (number,) for text, number in added.items()}
        self._known: dict[str, tuple[int, ...]] = dict(self._added)
        self._looked_up = self._new = 0
        self._useful = True
        self.hits = 0

    def find(self, text: str, spans: Sequence[Span]) -> tuple[Ints, list[Span]] | None:
        """The tokens, and the run of tokens of each span of characters; None: ask the tokenizer."""
        parts = self._cut(text)  # every second one is an added token
        if not self._useful or (not text.isascii() and any(map(HARD.search, parts[::2]))):
            return None
        words: list[str] = []
        for number, part in enumerate(parts):
            if number % 2:
                words.append(part)
            else:
                words += self._words(part)
        known = self._known
        try:
            tokens = [known[word] for word in words]
        except KeyError:
            learned = self._learn(words)
            if learned is None:
                return None
            tokens = learned
        self._count(len(words))
        runs = _runs(text, spans, words, tokens)
        if runs is None:
            return None
        self.hits += 1
        return np.array(list(itertools.chain.from_iterable(tokens)), np.int32), runs

    @property
    def to_be_checked(self) -> bool:
        """Whether the row that was found just now is one of those that go both ways."""
        return self.hits % CHECK_EVERY == 1

    def _count(self, words: int) -> None:
        self._looked_up += words
        if self._looked_up >= ENOUGH:
            self._useful = RARE * self._new < self._looked_up
            self._looked_up = self._new = 0

    def _learn(self, words: Sequence[str]) -> list[tuple[int, ...]] | None:
        """Their tokens, kept for later; None where those of one do not spell it."""
        if len(self._known) > KEPT:
            self._known = dict(self._added)
        known, new = self._known, dict[str, tuple[int, ...]]()
        for word in set(words).difference(known):
            made = self._tokenize("".join([BYTES[byte] for byte in word.encode()]))
            new[word] = tuple([token.id for token in made])
            if self._decode(new[word], skip_special_tokens=False) != word:
                return None
        self._new += len(new)
        known.update({word: tokens for word, tokens in new.items() if len(word) <= LONGEST})
        return [known[word] if word in known else new[word] for word in words]


def _runs(text: str, spans: Sequence[Span], words: Sequence[str], tokens: Sequence[Sequence[int]]) -> list[Span] | None:
    """None where a border falls into a word; or behind a blank, which some tokenizers take out of what a token covers."""
    ends = list(itertools.accumulate(map(len, words)))
    assert not text or ends[-1] == len(text)  # the expressions leave nothing out
    counts = list(itertools.accumulate(map(len, tokens)))
    runs = []
    for span in spans:
        run = []
        for border in span:
            last = bisect_left(ends, border) if border else -1
            if border and (ends[last] != border or text[border - 1] == " "):
                return None
            run.append(counts[last] if last >= 0 else 0)
        runs.append((run[0], run[1]))
    return runs


# Which tokenizers ---------------------------------------------------------------------------------------------------------


def words_of(backend: Any) -> WordTable | None:
    """None for a tokenizer that does not go about it like this, or of which it is not known."""
    pattern = _pattern(_state(backend.pre_tokenizer))
    normalizer, added = _state(backend.normalizer), backend.get_added_tokens_decoder()
    if pattern is None or normalizer not in (None, {"type": "NFC"}) or backend.truncation or backend.padding:
        return None
    if (_state(backend.decoder) or {}).get("type") != "ByteLevel":
        return None
    if type(backend.model).__name__ != "BPE" or backend.model.dropout or backend.encode_special_tokens:
        return None
    # In two passes where some are looked for in the normalized text; and some take the blanks around them.
    if any(token.lstrip or token.rstrip or token.single_word or not token.content for token in added.values()):
        return None
    if len({token.normalized for token in added.values()} | ({False} if normalizer else set())) > 1:
        return None
    if any(backend.decode([number], skip_special_tokens=False) != token.content for number, token in added.items()):
        return None
    return WordTable(backend, re.compile(in_python(pattern)), {token.content: number for number, token in added.items()})


def _state(part: Any) -> Any:
    """As it stands in tokenizer.json; one that is written in Python cannot stand there."""
    try:
        return None if part is None else json.loads(part.__getstate__())
    except Exception as error:
        if type(error) is not Exception:  # which tokenizers (Rust) raises
            raise
        return {"type": "custom"}


def _pattern(pre_tokenizer: Any) -> str | None:
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer and pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    last = parts[-1] if parts and parts[-1] else {}
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    before = parts[:-1]
    if last["use_regex"]:
        digits = [{"type": "Digits", "individual_digits": True}]
        return GPT2 if not before else GPT2_BETWEEN_DIGITS if before == digits else None
    if len(before) != 1 or before[0]["type"] != "Split":
        return None
    pattern = before[0]["pattern"].get("Regex")
    same = before[0]["behavior"] == "Isolated" and not before[0]["invert"] and pattern in PATTERNS
    return str(pattern) if same else None


def in_python(pattern: str) -> str:
    """The same over the letters of EASY: Python knows neither `\\p{L}` nor, of all blanks, the same."""
    made, inside = "", False
    for part in re.findall(r"\\p\{\w+\}|\\.|.", pattern):
        inside = part == "[" or (inside and part != "]")
        if part.startswith(r"\p") or part in (r"\s", r"\S"):
            letters = _letters(_of_category(part[3:-1]) if part.startswith(r"\p") else SPACE.__contains__)
            others = "^" if part == r"\S" else ""
            made += letters if inside else f"[{others}{letters}]"
        else:
            made += part
    return made


def _of_category(name: str) -> Callable[[str], bool]:
    return lambda letter: unicodedata.category(letter).startswith(name)


def _letters(belongs: Callable[[str], bool]) -> str:
    """Those of EASY, for between brackets."""
    numbers = [number for first, last in EASY for number in range(first, last + 1) if belongs(chr(number))]
    runs = [list(run) for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return "".join(f"\\u{run[0][1]:04x}-\\u{run[-1][1]:04x}" for run in runs)


HARD = re.compile(f"[^{_letters(lambda _: True)}]")
