"""From characters to tokens: which tokens a span of the text became.

A border falls before the first token that starts at it or behind it. To look that up in the list of all offsets means to make
that list, a pair of Python numbers for each token: 0.09 ms for a row of 200 tokens, a quarter of what tokenizing it costs. The
tokenizer finds the token of one character by itself, in a microsecond in such a row and in more the longer it is, so the list
is made only where a border falls into a token or beside tokens without any width, or for many borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pronghorn.data.encode.tokens import Span

MANY = 256  # spans; 10,000 of them in a row of 400 kB took 1.7 s one by one


def runs_of(encoding: Any, spans: Sequence[Span], length: int) -> list[Span]:
    """The run of tokens of each span of characters; `length`: of the text."""
    if len(spans) > MANY:
        return runs_by_offsets(encoding, spans)
    runs = []
    for start, stop in spans:
        first, last = _at(encoding, start, length), _at(encoding, stop, length)
        if first is None or last is None:
            return runs_by_offsets(encoding, spans)
        runs.append((first, last))
    return runs


def runs_by_offsets(encoding: Any, spans: Sequence[Span]) -> list[Span]:
    """The definition."""
    starts = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
    return [(int(a), int(b)) for a, b in np.searchsorted(starts, np.array(spans).reshape(-1, 2), side="left")]


def _at(encoding: Any, place: int, length: int) -> int | None:
    """The token before which a border falls; None: look at all of them."""
    token = len(encoding) if place == length else encoding.char_to_token(place)
    if token is None or (token < len(encoding) and _start(encoding, token) != place):
        return None
    return token if not token or _start(encoding, token - 1) < place else None


def _start(encoding: Any, token: int) -> int:
    found = encoding.token_to_chars(token)
    return int(found[0]) if found is not None else -1
