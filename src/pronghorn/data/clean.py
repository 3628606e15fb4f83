"""Rows that teach nothing new, or nothing good: exact copies, near copies and junk.

Works on examples, before tokens, so what it finds does not depend on the model. It only finds; the recipe decides.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pronghorn.data.formats import Example
from pronghorn.errors import CommandError

# A word, one sign of a script that writes no spaces, or one punctuation mark: `2+2` and `2*2` are different things.
WORD = re.compile(r"[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]|\w+|[^\w\s]")
SHINGLE = 3  # words in a row; with 3, one changed word among 50 leaves a similarity of 0.89
# 20 bands of 6 rows: a pair that is alike at 0.8 becomes a candidate with 99.8 %, one at 0.5 with 27 %, at 0.3 with 1 %.
BANDS, BAND_ROWS = 20, 6
SEED = 20  # of MinHash; fixed, so that the same data loses the same rows
BATCH = 1000  # examples whose MinHashes are made in one call

# How many times smaller an answer may become under zlib. The most in 49,430 real answers (mathematics, chat in many
# languages, code, song texts) was 5.2, in a hundred lines `x7 = 0` 5.9; one sentence said 20 times reaches 15, `no` said
# 1,000 times 100. Twice what real data reaches, so that nothing ordinary is lost.
MOST_REPETITION = 10.0
LEAST_LENGTH = 200  # bytes; a shorter "hahaha" is an answer


def copies_of(identities: bytes | bytearray) -> dict[int, int]:
    """Index of every copy -> index of the first, by the examples' identities one after the other: 16 bytes a row, where a
    dictionary takes 200."""
    found = np.frombuffer(identities, dtype=[("high", "<u8"), ("low", "<u8")])
    order = np.lexsort((np.arange(len(found)), found["low"], found["high"]))
    same = found[order[1:]] == found[order[:-1]] if len(found) > 1 else np.zeros(0, np.bool_)
    copies: dict[int, int] = {}
    for at in np.flatnonzero(same):
        before, index = int(order[at]), int(order[at + 1])
        copies[index] = copies.get(before, before)
    return dict(sorted(copies.items()))


def identity(example: Example) -> bytes:
    parts = [
        example.kind,
        example.messages,
        example.tools,
        example.prompt,
        example.completion,
        example.text,
        example.prompt_messages,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16).digest()


class NearDuplicates:
    """Near copies among rows that come in batches.

    Two rows are near copies when the Jaccard similarity of their word shingles reaches `threshold`. MinHash and LSH
    only propose pairs; every pair is confirmed. A row is compared with the rows kept so far, so that of a chain
    a ~ b ~ c whose ends differ only b goes.
    """

    def __init__(self, example: Callable[[int], Example], threshold: float = 0.8) -> None:
        """`example`: an earlier row, by its index, to be looked at again."""
        try:
            import rensa
        except ImportError as error:
            raise CommandError(
                what="near duplicates need the `rensa` library", where="data.duplicates", fix="pip install 'pronghorn[clean]'"
            ) from error

        self.copies: dict[int, int] = {}
        self._count, self._threshold = 0, threshold
        self._minhashes = rensa.RMinHash.from_token_sets
        self._kept = rensa.RMinHashLSH(threshold=threshold, num_perm=BANDS * BAND_ROWS, num_bands=BANDS)
        self._earlier = functools.lru_cache(maxsize=2 * BATCH)(lambda index: frozenset(_shingles(example(index))))

    def add(self, batch: Sequence[Example]) -> None:
        shingles = [_shingles(example) for example in batch]
        minhashes = self._minhashes(shingles, BANDS * BAND_ROWS, SEED)
        for index, (mine, minhash) in enumerate(zip(shingles, minhashes, strict=True), start=self._count):
            if not mine:
                continue  # nothing to compare; an empty row is junk, and equal ones are exact copies
            candidates = sorted(self._kept.query(minhash))
            own = frozenset(mine) if candidates else frozenset()
            like = next((i for i in candidates if _jaccard(self._earlier(i), own) >= self._threshold), None)
            if like is None:
                self._kept.insert(index, minhash)
            else:
                self.copies[index] = like
        self._count += len(batch)


def _shingles(example: Example) -> list[str]:
    words = WORD.findall(compared_text(example).lower())
    if len(words) < SHINGLE:
        return [" ".join(words)] if words else []
    return list(map(" ".join, zip(*(words[i:] for i in range(SHINGLE)), strict=False)))


def compared_text(example: Example, *, prompt: bool = False) -> str:
    """All that is said, but for system messages: a long one shared by all rows would make them all alike. `prompt`: only what
    comes before the answer, if something does."""
    if example.kind != "chat":
        alone = prompt and example.prompt.strip()
        return example.prompt if alone else f"{example.prompt}\n{example.completion}\n{example.text}"
    spoken = [_said(message) for message in _spoken(example.messages[: example.prompt_messages])] if prompt else []
    return "\n".join(spoken or [_said(message) for message in _spoken(example.messages)])


def _spoken(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message for message in messages if message["role"] not in ("system", "developer")]


def _said(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return (message["content"] or "") + (json.dumps(calls, sort_keys=True, default=str) if calls else "")


def _jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common)


def junk(example: Example) -> str | None:
    """Why this example should not be trained on, or None."""
    pairs = _answers(example)
    if says_nothing(example):
        return "empty text" if example.kind == "text" else "empty answer"
    # In a longer talk an echo ("Bye!" - "Bye!") is ordinary, so all answers must be echoes.
    if all(_plain(prompt) == _plain(answer) for prompt, answer in pairs):
        return "answer equal to the prompt"
    if any(repetition(answer) > MOST_REPETITION for _, answer in pairs):
        return "absurd repetition"
    return None


def says_nothing(example: Example) -> bool:
    """Whether an answer is empty: the model would learn to end its turn at once."""
    return any(not answer.strip() for _, answer in _answers(example))


def _answers(example: Example) -> list[tuple[str, str]]:
    """What was said before, and the answer to it, for every answer that carries loss."""
    if example.kind == "text":
        return [("", example.text)]
    if example.kind == "completion":
        return [(example.prompt, example.completion)]
    before = ("", *(_said(message) for message in example.messages))
    return [
        (before[i], _said(message))
        for i, message in enumerate(example.messages)
        if message["role"] == "assistant" and i >= example.prompt_messages
    ]


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def repetition(text: str) -> float:
    """How many times smaller the text becomes when zlib says each repeated thing once; 1.0 for short texts."""
    data = text.encode()
    return len(data) / len(zlib.compress(data)) if len(data) >= LEAST_LENGTH else 1.0
